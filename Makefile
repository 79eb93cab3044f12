# `make help` lists the targets.
PYTHON ?= $(firstword $(foreach v,3.11 3.12 3.10,$(shell command -v python$(v))) $(shell command -v python3))
TORCH_INDEX ?=
WORKERS ?= 2
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PEERS := openvino llamacpp

.PHONY: help install demo serve test test-slow check parity bench bench-peers chaos browser test-gpu bench-gpu gpu-static clean

demo: $(STAMP) ## convert two adapters, serve them, ask one question three ways
	@$(BIN)/python examples/demo/run.py demo

help: ## this list
	@sed -nE 's/^([a-z-]+):[^#]*## (.*)/make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 18

install: $(STAMP) ## .venv with everything in it, which the other targets make too

serve: $(STAMP) ## the server of the demo, left running, with commands to try
	@$(BIN)/python examples/demo/run.py serve

test: $(STAMP) ## the tests, also against a real tritonserver
	$(BIN)/python -m pytest -n $(WORKERS)

test-slow: $(STAMP) ## the slow tests, which `make test` skips
	$(BIN)/python -m pytest --slow -m slow

test-gpu: $(STAMP) ## the tests of the GPU and its kernels; needs a CUDA GPU
	$(BIN)/python -m pytest tests/gpu $(addprefix tests/cpu/test_,$(addprefix cuda_,kernels.py blocks.py experts.py backends.py quantised.py recurrent.py) \
		float8_kernels.py)

bench-gpu: ## the GPU benchmark (BENCH_ARGS=...), with any Python that has torch, triton and numpy
	PYTHONPATH=src $(or $(wildcard $(BIN)/python),python3) benchmarks/gpu.py $(BENCH_ARGS)

gpu-static: $(STAMP) ## docs/gpu_static.md: registers, spills and loops of every GPU kernel, without a GPU; takes minutes
	PYTHONPATH=src $(BIN)/python benchmarks/gpu_static.py --out docs/gpu_static.md

check: $(STAMP) ## lint, format, types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	for model in model_repo/*/1/model.py; do $(BIN)/mypy $$model || exit 1; done

bench: $(STAMP) ## the engine with and without adapters, against this machine's limits; under 5 minutes
	@$(BIN)/python benchmarks/engine.py --rounds 2

bench-peers: $(STAMP) $(PEERS:%=build/%/.installed) ## the engine beside OpenVINO and llama.cpp, in pairs (BENCH_ARGS="--cases base" is the short one)
	@$(BIN)/python benchmarks/peers.py --peers openvino,llama.cpp --python openvino=build/openvino/bin/python \
	  --python llama.cpp=build/llamacpp/bin/python --keep build/peers --json build/peers.json $(BENCH_ARGS)

chaos: $(STAMP) ## a service under kills, hostile requests and adapters, and leaving clients (CHAOS_ARGS=...); about 10 minutes
	@$(BIN)/python tests/chaos $(CHAOS_ARGS)

parity: $(STAMP) ## every model family and kind of adapter against transformers + PEFT; takes minutes
	@$(BIN)/python -m manylora.testing.parity

browser: ## install Chromium for the tests of the page (Debian, Ubuntu); without it they are skipped
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
