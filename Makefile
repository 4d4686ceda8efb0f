# make demo: set everything up and tune the embedded model; with ACCELERATOR=cuda12, cuda13 or tpu, on a GPU or TPU.
# make test: set everything up and run the tests;
# make test-slow: run the slow tests (whole runs in several processes, the benchmarks' own tests);
# make tpu-check, make gpu-check: run the tests that compile for TPUs or GPUs, which this machine need not have, each with
# the compiler in an environment of its own;
# make gpu-table: write docs/performance.md's table of the published recipes on GPUs;
# make docs: write the configuration reference from the code;
# make constraints: take the newest versions that requirements*.txt allow; then run make test and make test-slow.
PYTHON ?= python3
VERSION := $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')
PYTHONS := 3.11 3.12 3.13
VENV := .venv/$(VERSION)
RUN := $(VENV)/bin/python
# JAX's extra with what a GPU or TPU needs; without one JAX runs on the CPU.
ACCELERATOR ?=
TRAIN := $(VENV)/train$(addprefix -,$(ACCELERATOR))
# Exact versions: new releases change nothing here.
INSTALL := $(RUN) -m pip install -q --disable-pip-version-check -c constraints/$(VERSION).txt
PYTEST := $(RUN) -m pytest --dist loadfile --no-loadscope-reorder --numprocesses
# Tests sometimes wait for processes, slow ones more often: one or two more at a time than there are cores.
PROCESSES := $(shell $(PYTHON) -c 'import os; print(min(os.cpu_count() + 1, 8))')
SLOW_PROCESSES := $(shell $(PYTHON) -c 'import os; print(min(os.cpu_count() + 2, 8))')

.PHONY: demo docs test test-slow tpu-check gpu-check gpu-table lint format constraints clean

demo: $(TRAIN)
	$(RUN) launch/train.py --config configs/shapes_demo.py --workdir runs/shapes

docs: $(TRAIN)
	$(RUN) -m digen_jax.config.reference > docs/configuration.md

# Test processes share the modules' bytecode, even where the shell turns that off.
test test-slow: export PYTHONDONTWRITEBYTECODE =
test: $(VENV)/dev
	$(PYTEST) $(PROCESSES) -m "not slow and not tpu and not gpu"

test-slow: $(VENV)/dev
	$(PYTEST) $(SLOW_PROCESSES) -m "slow and not tpu and not gpu"

# Without parallel processes, because each would hold a compiler of its own.
tpu-check: $(VENV)-tpu/dev
	$(VENV)-tpu/bin/python -m pytest -m tpu

gpu-check: $(VENV)-gpu/dev
	$(VENV)-gpu/bin/python -m pytest -m gpu

gpu-table: $(VENV)-gpu/dev
	$(VENV)-gpu/bin/python -m tests.planning.gpus

lint: $(VENV)/dev
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(VENV)/bin/lint-imports
	$(VENV)/bin/hadolint Dockerfile
	$(RUN) -m mypy
	$(RUN) tools/size.py

format: $(VENV)/dev
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .

clean:
	rm -rf .venv .cache .pytest_cache .ruff_cache

# uv resolves for all systems at once and installs nothing. torch pins its own versions of CUDA libraries, which
# would conflict with those of a JAX for CUDA.
constraints: $(VENV)/bin/python
	$(RUN) -m pip install -q --disable-pip-version-check uv
	for version in $(PYTHONS); do \
	    $(RUN) -m uv pip compile -q --universal --no-header --no-annotate --python-version $$version \
	        requirements-dev.txt -o .cache/constraints.txt --upgrade || exit 1; \
	    grep -vE '^(nvidia|cuda|triton)' .cache/constraints.txt > constraints/$$version.txt || exit 1; \
	done

$(VENV)/bin/python: | constraints/$(VERSION).txt
	$(PYTHON) -m venv $(VENV)

constraints/$(VERSION).txt:
	@echo "There are exact versions for Python $(PYTHONS), not for $(VERSION): name one, such as make demo PYTHON=python3.12" >&2
	@exit 1

$(TRAIN): requirements.txt constraints/$(VERSION).txt | $(VENV)/bin/python
	$(INSTALL) -r requirements.txt -e . $(patsubst %,"jax[%]",$(ACCELERATOR))
	touch $@

# Compiling 26,000 modules, most of which no test imports, would take as long as installing them.
$(VENV)/dev: requirements.txt requirements-reward.txt requirements-ray.txt requirements-video.txt requirements-trackio.txt requirements-dev.txt constraints/$(VERSION).txt | $(VENV)/bin/python
	$(INSTALL) --no-compile -r requirements-dev.txt -e .
	$(INSTALL) --no-deps -r requirements-trackio.txt
	touch $@ $(VENV)/train

$(VENV)-tpu/dev: requirements-tpu.txt
$(VENV)-gpu/dev: requirements-gpu-check.txt
$(VENV)-tpu/dev $(VENV)-gpu/dev: requirements.txt requirements-reward.txt requirements-ray.txt requirements-video.txt requirements-dev.txt constraints/$(VERSION).txt
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install -q --disable-pip-version-check -c constraints/$(VERSION).txt \
	    -r requirements-dev.txt -r $(filter requirements-tpu.txt requirements-gpu-check.txt,$^) -e .
	touch $@
