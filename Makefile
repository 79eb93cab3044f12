# make demo    the main job: convert two adapters, serve them, ask one question three ways
# make serve   the same server, left running, with commands to try
# make test    every test, the real server included
# make check   lint, format, types
# make parity  every model family and kind of adapter beside transformers + PEFT, as a table; takes minutes
# make test-gpu    the tests that need a CUDA GPU, and the GPU's kernels on it
# make bench-gpu   the GPU benchmark, with any Python that has torch, triton and numpy
# make bench   the engine with and without adapters, against this machine's limits; under 5 minutes
# make chaos   kills, hostile requests and adapters, and clients that leave, against a running service; about 10 minutes
# make browser Chromium for the tests of the page (Debian, Ubuntu; they are skipped without it)
PYTHON ?= $(firstword $(foreach v,3.11 3.12 3.10,$(shell command -v python$(v))) $(shell command -v python3))
TORCH_INDEX ?=
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo serve test check parity bench chaos browser test-gpu bench-gpu clean

demo: $(STAMP)
	@$(BIN)/python examples/demo/run.py demo

serve: $(STAMP)
	@$(BIN)/python examples/demo/run.py serve

test: $(STAMP)
	$(BIN)/python -m pytest

test-gpu: $(STAMP)
	$(BIN)/python -m pytest tests/gpu $(addprefix tests/cpu/test_,$(addprefix cuda_,kernels.py blocks.py experts.py backends.py quantised.py) \
		float8_kernels.py)

bench-gpu:
	PYTHONPATH=src $(or $(wildcard $(BIN)/python),python3) benchmarks/gpu.py $(BENCH_ARGS)

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	for model in model_repo/*_bls/1/model.py model_repo/*processing/1/model.py; do $(BIN)/mypy $$model || exit 1; done

bench: $(STAMP)
	@$(BIN)/python benchmarks/engine.py --rounds 2

chaos: $(STAMP)
	@$(BIN)/python tests/chaos $(CHAOS_ARGS)

parity: $(STAMP)
	@$(BIN)/python -m manylora.testing.parity

browser:
	apt-get install -y --no-install-recommends chromium chromium-driver fonts-noto-cjk

$(STAMP): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "Python 3.10, 3.11 or 3.12 is needed: apt install python3 python3-venv"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 12))' || \
	  { echo "$(PYTHON) is not Python 3.10 to 3.12: set PYTHON=/path/to/python3.11"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo "venv is missing: apt install python3-venv"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(if $(TORCH_INDEX),$(BIN)/pip install --index-url $(TORCH_INDEX) torch==2.13.0)
	$(BIN)/pip install -q -c constraints.txt -e '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) build
