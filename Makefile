# `make help` lists the targets.
PYTHON ?= $(firstword $(foreach v,3.11 3.12 3.10,$(shell command -v python$(v))) $(shell command -v python3))
TORCH_INDEX ?=
WORKERS ?= 2
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PEERS := openvino llamacpp

.PHONY: help install demo serve test test-slow check parity bench bench-peers chaos browser test-gpu bench-gpu gpu-static clean

demo: $(STAMP) ## convert two adapters, serve them, and ask the base model and both adapters
	@$(BIN)/python examples/demo/run.py demo

help: ## list the targets
	@sed -nE 's/^([a-z-]+):[^#]*## (.*)/make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 18

install: $(STAMP) ## install everything into .venv; other targets do this when they need it

serve: $(STAMP) ## start the demo's server, leave it running, and print commands to try
	@$(BIN)/python examples/demo/run.py serve

test: $(STAMP) ## run the tests, including those against a real tritonserver
	$(BIN)/python -m pytest -n $(WORKERS)

test-slow: $(STAMP) ## run the slow tests, which `make test` skips
	$(BIN)/python -m pytest --slow -m slow

test-gpu: $(STAMP) ## run the tests of the GPU path and its kernels; needs a CUDA GPU
	$(BIN)/python -m pytest tests/gpu $(addprefix tests/cpu/test_,$(addprefix cuda_,kernels.py blocks.py experts.py backends.py quantised.py recurrent.py) \
		float8_kernels.py)

bench-gpu: ## run the GPU benchmark (BENCH_ARGS=...); works with any Python that has torch, triton and numpy
	PYTHONPATH=src $(or $(wildcard $(BIN)/python),python3) benchmarks/gpu.py $(BENCH_ARGS)

gpu-static: $(STAMP) ## write docs/gpu_static.md: machine code of every GPU kernel; needs no GPU; takes minutes
	PYTHONPATH=src $(BIN)/python benchmarks/gpu_static.py --out docs/gpu_static.md

check: $(STAMP) ## check lint, format and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	for model in model_repo/*/1/model.py; do $(BIN)/mypy $$model || exit 1; done

bench: $(STAMP) ## compare the engine, with and without adapters, with this machine's limits; under 5 minutes
	@$(BIN)/python benchmarks/engine.py --rounds 2

bench-peers: $(STAMP) $(PEERS:%=build/%/.installed) ## compare the engine with OpenVINO and llama.cpp (short: BENCH_ARGS="--cases base")
	@$(BIN)/python benchmarks/peers.py --peers openvino,llama.cpp --python openvino=build/openvino/bin/python \
	  --python llama.cpp=build/llamacpp/bin/python --keep build/peers --json build/peers.json $(BENCH_ARGS)

chaos: $(STAMP) ## test a service under kills, hostile requests, hostile adapters and disconnects (CHAOS_ARGS=...); about 10 minutes
	@$(BIN)/python tests/chaos $(CHAOS_ARGS)

parity: $(STAMP) ## compare every model family and kind of adapter with transformers + PEFT; takes minutes
	@$(BIN)/python -m manylora.testing.parity

browser: ## install Chromium for the tests of the web page (Debian, Ubuntu); without it they are skipped
	apt-get install -y --no-install-recommends chromium chromium-driver fonts-noto-cjk

$(STAMP): pyproject.toml setup.py constraints.txt
	@test -n "$(PYTHON)" || { echo "Python 3.10, 3.11 or 3.12 is needed: apt install python3 python3-venv"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 12))' || \
	  { echo "$(PYTHON) is not Python 3.10 to 3.12: set PYTHON=/path/to/python3.11"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo "venv is missing: apt install python3-venv"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(if $(TORCH_INDEX),$(BIN)/pip install --index-url $(TORCH_INDEX) torch==2.13.0)
	$(BIN)/pip install -q -c constraints.txt -e '.[dev]'
	touch $@

build/%/.installed: benchmarks/peers/%.txt
	$(PYTHON) -m venv $(@D)
	$(if $(TORCH_INDEX),$(@D)/bin/pip install --index-url $(TORCH_INDEX) torch==2.13.0 torchvision)
	$(@D)/bin/pip install -q -r $<
	touch $@

clean: ## remove the virtual environment and build outputs
	rm -rf $(VENV) build
