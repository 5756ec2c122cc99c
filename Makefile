# Every target sets itself up: a local .venv with the pinned dependencies, renewed when they change.
# Options are passed with ARGS:  make train ARGS="experiment=digits"   make test ARGS="tests/layout -x"
# Tests run in WORKERS processes, each of which takes over what another has left; WORKERS=0: in this one, as --pdb needs.

VENV ?= .venv
PYTHON ?=
PIP_ARGS ?=
ARGS ?=
WORKERS ?= 2
INSTALLED := $(VENV)/.installed
SPREAD := --numprocesses $(WORKERS) --dist worksteal

# Python keeps what it compiles, also where the environment says no: else each process compiles torch and the rest anew.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup train test test-all test-perf lint format docs clean

help:  ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-9s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

setup: $(INSTALLED)  ## create .venv and install what is needed (the other targets do it too)

train: $(INSTALLED)  ## train; hydra overrides in ARGS
	$(VENV)/bin/python -m recipes.train $(ARGS)

test: lint  ## lint, type check and the tests of minutes; pytest options in ARGS
	$(VENV)/bin/python -m pytest $(SPREAD) -m "not full and not perf" $(ARGS)

test-all: lint  ## the same and all other tests: more placements, schedules and transforms
	$(VENV)/bin/python -m pytest $(SPREAD) -m "not perf" $(ARGS)

test-perf: $(INSTALLED)  ## limits on durations, for a machine that has nothing else to do
	$(VENV)/bin/python -m pytest -m perf $(ARGS)

lint: $(INSTALLED)  ## ruff and mypy
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy

format: $(INSTALLED)  ## let ruff order imports and lay out the code
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

docs: $(INSTALLED)  ## the pages of docs/ and a reference made from the docstrings, in build/docs
	$(VENV)/bin/pip install $(PIP_ARGS) --quiet --constraint constraints.txt --editable '.[docs]'
	$(VENV)/bin/python -m sphinx -W --keep-going -q -b html docs build/docs
	@echo "build/docs/index.html"

clean:  ## remove the environment, caches and builds (not the outputs of runs)
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Python compiles modules at their first import; pip would compile all 22,000. For a .venv that users cannot write:
# make setup PIP_ARGS=--compile
$(INSTALLED): pyproject.toml constraints.txt | $(VENV)/bin/pip
	$(VENV)/bin/pip install --no-compile $(PIP_ARGS) --constraint constraints.txt --editable '.[dev]'
	@touch $@

# PYTHON=... chooses the interpreter; otherwise the first that is new enough.
$(VENV)/bin/pip:
	@for python in $(PYTHON) python3.11 python3.12 python3.13 python3.14 python3; do \
		if command -v $$python >/dev/null && $$python -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then \
			echo "creating $(VENV) with $$($$python --version)"; exec $$python -m venv $(VENV); \
		fi; \
	done; echo "hetero_strategy needs Python 3.11 or newer; name one with make PYTHON=/path/to/python" >&2; exit 1
