# `make help` lists the targets.
PYTHON ?= $(firstword $(foreach v,3.11 3.12 3.10,$(shell command -v python$(v))) $(shell command -v python3))
TORCH_INDEX ?=
WORKERS ?= 2
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip install -qq --no-compile --disable-pip-version-check -c constraints.txt
PEERS := openvino llamacpp
comma := ,
# A page in a browser is tested where there is one; C is compiled with zig where there is no compiler.
BROWSER := $(if $(shell command -v chromium),$(comma)browser)
ZIG := $(if $(shell command -v cc || command -v gcc || command -v clang),,ziglang)
DOTS := set -e; while sleep 2; do printf .; done & trap "kill $$!; echo" EXIT;
COMPILE := from manylora.kernels import native; native.load()

.PHONY: help install demo serve test test-all test-durations quick check lines replay parity bench bench-peers \
	browser test-gpu bench-gpu gpu-static clean

demo: $(VENV)/.server ## ask a real model and its adapters through Triton and the OpenAI server (DEMO=offline: a toy)
	@$(BIN)/python examples/demo/run.py demo $(DEMO:%=--%)

help: ## list the targets
	@sed -nE 's/^([a-z-]+):[^#]*## (.*)/make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 18

install: $(VENV)/.server ## install what serves into .venv; other targets install what they need

serve: $(VENV)/.server ## serve the demo's model and adapters over the OpenAI API, and print commands to try
	@$(BIN)/python examples/demo/run.py serve $(DEMO:%=--%)

test: $(VENV)/.test ## run the tests, including those against a real tritonserver; 9 to 10 minutes on two cores
	$(BIN)/python -m pytest -n $(WORKERS)

quick: $(VENV)/.test ## run the tests that need nothing, and a tiny model through each door; 2 minutes
	$(BIN)/python -m pytest -n $(WORKERS) --quick

test-all: $(VENV)/.dev ## run every case of every test, and write tests/last_test_all.json; an hour beside other work
	$(BIN)/python -m pytest -n $(WORKERS) --all --record

test-durations: $(VENV)/.test ## run `make test`, and write what each file takes to tests/durations.json
	$(BIN)/python -m pytest -n $(WORKERS) --write-durations

test-gpu: $(VENV)/.test ## run the tests of the GPU path and its kernels; needs a CUDA GPU
	$(BIN)/python -m pytest --all tests/gpu $(addprefix tests/cpu/test_,cuda_kernels.py \
	  adapter_kernels.py expert_kernels.py recurrent_kernels.py)

bench-gpu: ## run the GPU benchmark (BENCH_ARGS=...); works with any Python that has torch, triton and numpy
	PYTHONPATH=src $(or $(wildcard $(BIN)/python),python3) benchmarks/gpu.py $(BENCH_ARGS)

gpu-static: $(VENV)/.test ## compile every GPU kernel for three kinds of GPU; needs no GPU; takes two minutes
	$(BIN)/python -m pytest --all tests/cpu/test_cuda_compile.py

check: $(VENV)/.check ## check lint, format, types and size
	$(BIN)/python .ci/lines.py
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	for model in model_repo/*/1/model.py; do $(BIN)/mypy $$model || exit 1; done

lines: $(VENV)/.check ## print the size of each part of the project beside its budget
	@$(BIN)/python .ci/lines.py

bench: $(VENV)/.dev ## compare the engine, with and without adapters, with this machine's limits; under 5 minutes
	@$(BIN)/python benchmarks/engine.py --rounds 2

bench-peers: $(VENV)/.dev $(PEERS:%=build/%/.installed) ## compare the engine with OpenVINO and llama.cpp (short: BENCH_ARGS="--cases base")
	@$(BIN)/python benchmarks/peers.py --peers openvino,llama.cpp --python openvino=build/openvino/bin/python \
	  --python llama.cpp=build/llamacpp/bin/python --keep build/peers --json build/peers.json $(BENCH_ARGS)

replay: $(VENV)/.test ## compare what each door answers with its record (RECORD=1 writes it; BITS=FOLDER for all bits)
	$(BIN)/python -m pytest tests/replay tests/server/test_replay_triton.py $(if $(RECORD),--record-replay) \
	  $(BITS:%=--replay-bits=%)

parity: $(VENV)/.test ## compare every model family and kind of adapter with transformers + PEFT; takes minutes
	$(BIN)/python -m pytest --all tests/cpu/test_parity_models.py -k every_kind

browser: ## install Chromium for the tests of the web page (Debian, Ubuntu); without it they are skipped
	apt-get install -y --no-install-recommends chromium chromium-driver fonts-noto-cjk
	@rm -f $(VENV)/.test $(VENV)/.check  # the next of these installs its driver

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "Python 3.10, 3.11 or 3.12 is needed: apt install python3 python3-venv"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 12))' || \
	  { echo "$(PYTHON) is not Python 3.10 to 3.12: set PYTHON=/path/to/python3.11"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo "venv is missing: apt install python3-venv"; exit 1; }
	$(PYTHON) -m venv $(VENV)

# Each extra of pyproject.toml that a target needs. The largest packages come first, while the kernels are compiled.
$(VENV)/.%: pyproject.toml setup.py constraints.txt | $(BIN)/python
	@echo "Installing what \`$*\` needs into $(VENV): about a minute. Torch, and the kernels for this processor"
	@$(DOTS) $(PIP) setuptools $(ZIG); \
	  PYTHONPATH=src $(BIN)/python -c "$(COMPILE)" & compiling=$$!; \
	  $(PIP) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) --no-deps torch; wait $$compiling
	@echo "The other packages: .[$(EXTRA_$*)]"
	@$(DOTS) $(PIP) --no-build-isolation -e '.[$(EXTRA_$*)]'
	@touch $@
EXTRA_server := server,openai
EXTRA_test := test$(BROWSER)
EXTRA_check := check$(BROWSER)
EXTRA_dev := dev

build/%/.installed: benchmarks/peers/%.txt
	$(PYTHON) -m venv $(@D)
	$(if $(TORCH_INDEX),$(@D)/bin/pip install --index-url $(TORCH_INDEX) torch==2.13.0 torchvision)
	$(@D)/bin/pip install -q -r $<
	touch $@

clean: ## remove the virtual environment and build outputs
	rm -rf $(VENV) build
