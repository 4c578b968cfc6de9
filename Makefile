# Every target makes its own virtual environment. PYTHON=python3.13 and DJANGO="Django~=6.1.0" choose the versions, and
# get an environment of their own.
PYTHON ?= python3
DJANGO ?=
ENGINE ?=
ARGS ?=

CHOSEN := $(filter-out python3,$(PYTHON))$(DJANGO)
VENV ?= .venv$(if $(CHOSEN),-$(shell echo '$(PYTHON) $(DJANGO)' | cksum | cut -d' ' -f1))
BIN := $(VENV)/bin

# Python keeps what it compiled, whatever the shell says: else pytest rewrites every test file at each start, and each
# process that a test starts compiles the package.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help demo test test-fast test-slow test-scale chaos lint format docs bench clean

help: ## say what there is
	@sed -n 's/^\([a-z-]*\):.*## /\1: /p' Makefile

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)
	@# The pip that comes with Python 3.11 knows no dependency groups.
	$(BIN)/python -m pip install --quiet --upgrade 'pip>=25.1'

# One stamp for each dependency group: the package itself, editable, and the tools of the group.
$(VENV)/.stamp-%: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --editable . --group $* $(if $(DJANGO),'$(DJANGO)')
	@touch $@

demo: $(VENV)/.stamp-demo ## a shop with web and jobs on SQLite, at an address and with a login that it prints
	@$(BIN)/python example_project/manage.py demo $(ARGS)

test: $(VENV)/.stamp-test ## the fast cases on every engine; ENGINE=sqlite|postgres|mysql narrows
	@$(BIN)/python -m tests.run $(if $(ENGINE),--engine $(ENGINE)) $(if $(ARGS),-- $(ARGS))

# Nothing here waits long: to arm the timer of faulthandler before each case is work without use.
test-fast: $(VENV)/.stamp-test ## SQLite, no processes, no case of a good part of a second: for the loop of work
	@ENGINE=sqlite $(BIN)/python -m pytest -q -n 2 -o faulthandler_timeout=0 -m 'not slow and not subprocess and not medium' $(ARGS)

test-slow: $(VENV)/.stamp-test ## the cases that wait; ENGINE=sqlite|postgres|mysql narrows
	@$(BIN)/python -m tests.run --slow $(if $(ENGINE),--engine $(ENGINE)) $(if $(ARGS),-- $(ARGS))

test-scale: $(VENV)/.stamp-test ## the cases about size at full size, about ten minutes an engine; ENGINE= narrows
	@$(BIN)/python -m tests.run --scale $(if $(ENGINE),--engine $(ENGINE)) $(if $(ARGS),-- $(ARGS))

chaos: $(VENV)/.stamp-test ## kill, freeze and restart everything, then judge; SECONDS=60 SEED= ENGINE=postgres DISPATCHER=redis PROCESSES= choose
	@$(BIN)/python -m tests.chaos --engine $(or $(ENGINE),postgres) --seconds $(or $(SECONDS),60) $(if $(DISPATCHER),--dispatcher $(DISPATCHER)) $(if $(SEED),--seed $(SEED)) $(if $(PROCESSES),--processes $(PROCESSES))

lint: $(VENV)/.stamp-lint ## style, types, layers, migrations
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m django makemigrations --settings tests.settings --check --dry-run

format: $(VENV)/.stamp-lint ## mend what can be mended by itself
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(VENV)/.stamp-docs ## the documentation as HTML in docs/_build/html
	$(BIN)/sphinx-build -W --keep-going -b html docs docs/_build/html

bench: $(VENV)/.stamp-test ## measure; ARGS go to the benchmark
	$(BIN)/python benchmarks/drain.py $(ARGS)

clean: ## remove what the other targets made
	rm -rf .venv .venv-* .test-logs docs/_build build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
