# make demo: set everything up and tune the embedded model.   make test: set everything up and run the tests;
# make test-slow: those that take long (sweeps, many random configurations, kills).
PYTHON ?= python3
VERSION := $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')
VENV := .venv/$(VERSION)
RUN := $(VENV)/bin/python
PYTEST := $(RUN) -m pytest --numprocesses auto --maxprocesses 8 --dist loadfile --no-loadscope-reorder

.PHONY: demo test test-slow lint format clean

demo: $(VENV)/train
	$(RUN) launch/train.py --config configs/shapes_flow_grpo.py --workdir runs/shapes

# Their many processes share the modules' bytecode, wherever the shell turns that off.
test test-slow: export PYTHONDONTWRITEBYTECODE =
test: $(VENV)/dev
	$(PYTEST) -m "not slow"

test-slow: $(VENV)/dev
	$(PYTEST) -m slow

lint: $(VENV)/dev
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .

format: $(VENV)/dev
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .

clean:
	rm -rf .venv .cache .pytest_cache .ruff_cache

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/train: requirements.txt | $(VENV)/bin/python
	$(RUN) -m pip install -q --disable-pip-version-check -r requirements.txt -e .
	touch $@

$(VENV)/dev: requirements.txt requirements-dev.txt | $(VENV)/bin/python
	$(RUN) -m pip install -q --disable-pip-version-check -r requirements-dev.txt -e .
	touch $@ $(VENV)/train
