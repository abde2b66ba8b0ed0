# Every task of the project. A machine needs python3 (3.11 to 3.13) with pip, and make; the rest goes into .venv.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# An existing .venv says which Python it is for, whatever python3 is by now.
PY_VERSION := $(shell $(firstword $(wildcard $(BIN)/python) $(PYTHON)) -c 'import sys; print("%d.%d" % sys.version_info[:2])')
CONSTRAINTS := constraints/constraints-$(PY_VERSION).txt
INSTALLED := $(VENV)/.installed
STRICT := airflow_saga/core airflow_saga/store airflow_saga/runtime airflow_saga/ai
PYTEST := $(BIN)/python -m pytest --durations=15
# Two workers, each with a Postgres of its own: more only queue on a small machine.
WORKERS ?= 2

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help install services demo demo-agent demo-up demo-down test test-fast test-unit test-chaos test-e2e bench lint type format \
	constraints clean

help: ## List the targets
	@grep -hE '^[a-z][a-z0-9-]*:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | sort \
		| awk -F'\t' '{ printf "  make %-12s %s\n", $$1, $$2 }'

install: $(INSTALLED) ## Make .venv with the pinned dependencies and this checkout in it

# uv comes out of the same constraints and only makes the long list fast.
$(INSTALLED): setup.cfg pyproject.toml $(CONSTRAINTS)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m uv --version >/dev/null 2>&1 || { \
		$(BIN)/python -m pip --version >/dev/null 2>&1 || $(BIN)/python -m ensurepip; \
		$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint $(CONSTRAINTS) uv; }
	$(BIN)/python -m uv pip install --quiet --python $(BIN)/python --constraint $(CONSTRAINTS) \
		--editable '.[ai,capsules,celery,embedded,rag,dev]'
	touch $@

constraints/constraints-%.txt:
	@echo "Python $* is not supported: set PYTHON to a Python 3.11, 3.12 or 3.13 (make install PYTHON=python3.12)"; exit 1

demo: install ## Three sagas on a real Airflow: done, cancelled, partly cancelled; prints what happened
	@$(BIN)/python dags/support/demo.py

demo-up: install ## The demo, left running for you to look at
	@$(BIN)/python dags/support/demo.py --up

demo-agent: install ## Three runs of an agent with a scripted model: let be, stopped and killed in mid-sentence
	@$(BIN)/python dags/support/demo.py --agent

# Not behind `install`: what runs was started by what is installed.
demo-down: ## Stop what demo-up left running, and remove it
	@test ! -x $(BIN)/python || $(BIN)/python dags/support/demo.py --down

test: lint type test-unit test-chaos test-e2e ## Everything that must pass before a change lands

test-fast: install services ## The tests that need no Airflow processes and kill nothing
	$(PYTEST) -n $(WORKERS) -m "not e2e and not chaos and not slow"

# Real processes on a machine that does other things too: what fails is run once more, by itself, before it counts.
define checked
	$(PYTEST) $(1) || { test $$? -eq 1 && echo "--- once more, what failed:" && $(PYTEST) --last-failed --last-failed-no-failures=none $(2); }
endef

# What no wheel brings: an IMAP server, a payment service's mock, a small language model. Quick where all is there.
services: install
	$(BIN)/python -m tests.support.install_services
	$(BIN)/python -m tests.support.small_model

test-unit: install services
	$(call checked,-n $(WORKERS) -m "not e2e and not chaos",-m "not e2e and not chaos")

test-chaos: install
	$(call checked,-n $(WORKERS) -m "chaos and not e2e",-m "chaos and not e2e")

# One Airflow at a time: a scheduler, an API server, a dag processor and a triggerer fill two cores.
test-e2e: install
	$(call checked,-m e2e,-m e2e)

bench: install ## The numbers, as JSON lines
	$(BIN)/python -m tests.bench

lint: install ## ruff: rules and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

type: install ## mypy, strict, on core, store, runtime and ai
	$(BIN)/mypy $(STRICT)

format: install ## Let ruff repair what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

constraints: install ## Resolve the dependencies anew for every Python that is supported
	for version in 3.11 3.12 3.13; do \
		$(BIN)/python -m uv pip compile setup.cfg --all-extras --upgrade --quiet --no-annotate \
			--python-version $$version --custom-compile-command "make constraints" \
			--output-file constraints/constraints-$$version.txt; \
	done

clean: demo-down ## Remove all that the other targets made, .venv too
	rm -rf $(VENV) .run build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find airflow_saga dags tests -name __pycache__ -type d -prune -exec rm -rf {} +
