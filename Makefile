# Two commands do everything on a fresh machine: make demo, make test. make help lists the others.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
NEEDED := import sys; sys.exit(sys.version_info < (3, 11))

.DEFAULT_GOAL := help
.PHONY: help demo test test-cpus test-dropins test-ray test-system chaos loops-table check bench bench-gpu clean

help:  ## list these commands
	@sed -nE 's/^([a-z-]+):[^#]*## (.*)/make \1\t\2/p' Makefile | expand -t 20

# The stamp is newer than what it depends on exactly when the environment is up to date. An environment that an older
# Python made, or whose Python is gone, is created again.
$(VENV)/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c '$(NEEDED)' || { echo "Echelon needs Python 3.11 or later, but $(PYTHON) is $$($(PYTHON) --version 2>&1)."; \
	  echo "Install one and name it: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; } >&2
	@$(BIN)/python -c '$(NEEDED)' 2>/dev/null || $(PYTHON) -m venv --clear $(VENV)
	@echo "installing Echelon and PyTorch into $(VENV); this takes about a minute …"
	@$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	@touch $@

demo: $(VENV)/.installed  ## train on the embedded digits, four workers and two servers
	$(BIN)/echelon train --demo

# Two pytest processes more than cores, because tests often wait for processes that they start. A file's tests stay
# together, because they share fixtures that train.
PYTESTS := $(shell expr $$(nproc) + 2)
test: $(VENV)/.installed  ## all tests that need no root
	$(BIN)/pytest -n $(PYTESTS) --dist loadfile

# The numeric tests again, with the kernels that torch uses on CPUs without AVX-512 and without AVX2.
test-cpus: $(VENV)/.installed  ## the numeric tests again, with other instruction sets of the CPU
	ATEN_CPU_CAPABILITY=avx2 $(BIN)/pytest -n $(PYTESTS) --dist loadfile -m 'numeric and not long'
	ATEN_CPU_CAPABILITY=default $(BIN)/pytest -n $(PYTESTS) --dist loadfile -m 'numeric and not long'

# The drop-ins against the real libraries, in an environment of their own.
DROPINS := .peers/dropins
$(DROPINS)/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -m venv --clear $(DROPINS)
	@echo "installing Lightning, Transformers, Accelerate and wandb into $(DROPINS) …"
	@$(DROPINS)/bin/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev,lightning,transformers,wandb]"
	@touch $@

test-dropins: $(DROPINS)/.installed  ## the drop-ins, with Lightning, Hugging Face's Trainer and Accelerate
	$(DROPINS)/bin/pytest -m dropins tests/dropins

# The Ray launcher on a real local cluster, in an environment of its own.
RAY := .peers/ray
$(RAY)/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -m venv --clear $(RAY)
	@echo "installing Ray into $(RAY) …"
	@$(RAY)/bin/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev,ray]"
	@touch $@

test-ray: $(RAY)/.installed  ## the Ray launcher, on a real Ray cluster of two nodes
	$(RAY)/bin/pytest -m ray tests/ray_cluster

# Needs root: installs Debian packages, makes network namespaces. Also runs what takes minutes.
test-system: $(VENV)/.installed  ## tests that need root and Debian packages, and those that take minutes
	tests/system/install.sh
	$(BIN)/pytest -n $(PYTESTS) --dist loadfile -m system tests/system
	$(BIN)/pytest -n $(PYTESTS) -m long

# Random faults against real jobs, for MINUTES per scheme; the history of every job is checked. docs/reliability.md
MINUTES ?= 10
SEED ?= 1
chaos: $(VENV)/.installed  ## kill, stop and cut processes of real jobs at random (MINUTES, SEED, SCHEME)
	$(BIN)/python -m echelon.testing.chaos --minutes $(MINUTES) --seed $(SEED) $(if $(SCHEME),--scheme $(SCHEME))

# Needs a GPU and CIFAR-10 (DATA). GPU_FLAGS: --only, --jobs, --budget-s, …; `python -m benchmarks.gpu --help` lists them.
DATA ?= data
bench-gpu: $(VENV)/.installed  ## measure the training commands on one GPU
	$(BIN)/python -m benchmarks.gpu --data-dir $(DATA) --docs docs/results.md $(GPU_FLAGS)

# About half an hour on two cores that nothing else uses. BENCH_FLAGS: --missing, --only, --quick, …; as root also the
# case with a slow link. `python -m benchmarks.compare --help` lists the flags.
bench: $(VENV)/.installed  ## the published comparison: measure, and write docs/results.md
	$(BIN)/python -m benchmarks.compare $(BENCH_FLAGS)

loops-table: $(VENV)/.installed  ## write the table of loops into docs/how-to/use-your-own-loop.md
	PYTHONPATH=src:tests $(BIN)/python -m loops.table

check: $(VENV)/.installed  ## ruff, mypy --strict, import-linter
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

clean:  ## remove the environment and caches
	rm -rf $(VENV) .peers .pytest_cache .mypy_cache .ruff_cache .hypothesis
