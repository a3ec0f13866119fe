# pdvsim: everything runs in .venv, which is made on first use. A second make finds its stamp and installs nothing.
PYTHON ?= python3
PIP_FLAGS ?=
PYTEST_FLAGS ?=
VENV := .venv
BIN := $(VENV)/bin
# Bytecode is kept, whatever the environment says: the tests start many processes. It is made of what is imported, not of
# all that is installed, which would take minutes.
export PYTHONDONTWRITEBYTECODE :=

AGAINST ?= HEAD
SOAK_FIRST ?= 1
SOAK_COUNT ?= 10
LAWS := tests/sim/test_laws.py::test_
SOAKED := $(addprefix $(LAWS),conservation a_block_changes_nothing a_block_is_cut_at_an_instant rounds_are_leviathans \
  more_bandwidth_never_hurts_anyone_in_a_queue_of_one_server) \
  tests/sim/test_streaming.py::test_the_metrics_are_those_of_the_records \
  tests/sim/test_prefix.py::test_blocks_are_conserved_under_random_traffic \
  tests/bench/test_sweepdir.py::test_killed_at_random_moments_and_resumed
FUZZ_FIRST ?= 0
FUZZ_COUNT ?= 100000

.PHONY: sweep original test docs bench fuzz soak notebooks clean chromium

sweep: $(VENV)/.installed
	$(BIN)/pdvsim sweep --arch pdv

# The original question end to end, as one page: results/original/original.html. A minute and a half of one core.
original: $(VENV)/.installed
	$(BIN)/python studies/original.py

# mypy has one process, and would leave a core idle for a minute before the tests.
test: $(VENV)/.installed-dev chromium
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy & typed=$$!; $(BIN)/pytest -n 2 --dist worksteal $(PYTEST_FLAGS); tested=$$?; wait $$typed && exit $$tested

# The report is tested in a real browser. Without one those tests are skipped, or fail where CI is set.
chromium:
	@command -v chromium >/dev/null || command -v chromium-browser >/dev/null || command -v google-chrome >/dev/null || \
	{ [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && apt-get -qq update && \
	  DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends chromium >/dev/null; } || \
	echo "chromium is missing and could not be installed: the report is not tested in a browser" >&2

# The documentation site, from docs/_build/html/index.html on.
docs: $(VENV)/.installed-dev
	$(BIN)/sphinx-build -q -W --keep-going -c docs . docs/_build/html

# Speed and memory; with AGAINST=COMMIT processor time against the code of another commit, which runs in turn with this.
bench: $(VENV)/.installed
	$(BIN)/python tests/benchmarks/$(if $(AGAINST),against.py $(AGAINST),bench.py)

# Broken files and command lines, each from a seed: FUZZ_FIRST is the first. The last seed printed is of what ended it.
fuzz: $(VENV)/.installed-dev
	FUZZ_FIRST=$(FUZZ_FIRST) FUZZ_COUNT=$(FUZZ_COUNT) $(BIN)/pytest -s --timeout 0 tests/cli/test_fuzz.py -k any_file

# Random experiments under the laws, and sweeps that are killed and resumed: examples of one seed after the other.
soak: $(VENV)/.installed-dev
	for seed in $$(seq $(SOAK_FIRST) $$(($(SOAK_FIRST) + $(SOAK_COUNT) - 1))); do \
	  PDVSIM_SOAK=$$seed $(BIN)/pytest -x --hypothesis-seed=$$seed $(SOAKED) || { echo "seed $$seed breaks a law"; exit 1; }; done

# The notebooks with their outputs, at the full budget: a few minutes.
notebooks: $(VENV)/.installed-dev
	$(BIN)/python tests/notebookfiles.py

clean:
	rm -rf $(VENV) build dist docs/_build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

# The pip that comes with Python 3.11 takes twice as long to resolve as this one.
$(BIN)/python:
	$(PYTHON) -m venv $(VENV)
	$@ -m pip install --quiet --upgrade $(PIP_FLAGS) -c constraints.txt pip

$(VENV)/.installed: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/pip install --quiet --no-compile $(PIP_FLAGS) -c constraints.txt -e .
	touch $@

$(VENV)/.installed-dev: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/pip install --quiet --no-compile $(PIP_FLAGS) -c constraints.txt -e '.[dev]'
	touch $(VENV)/.installed $@
