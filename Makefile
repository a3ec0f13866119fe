# pdvsim: everything runs in .venv, which is made on first use. A second make finds its stamp and installs nothing.
PYTHON ?= python3
PIP_FLAGS ?=
VENV := .venv
BIN := $(VENV)/bin

.PHONY: sweep test bench clean

sweep: $(VENV)/.installed
	$(BIN)/pdvsim sweep --arch pdv

test: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pytest -n 2

bench: $(VENV)/.installed
	$(BIN)/python tests/benchmarks/bench.py

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/pip install --quiet $(PIP_FLAGS) -c constraints.txt -e .
	touch $@

$(VENV)/.installed-dev: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/pip install --quiet $(PIP_FLAGS) -c constraints.txt -e '.[dev]'
	touch $(VENV)/.installed $@
