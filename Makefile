# Two commands do everything on a fresh machine: make demo, make test.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test test-cpus test-system check bench-gpu clean

# The stamp is newer than what it depends on exactly when the environment is up to date.
$(VENV)/.installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $@

demo: $(VENV)/.installed
	$(BIN)/echelon train --demo

# One pytest process per core; a file's tests stay together, because they share fixtures that train.
test: $(VENV)/.installed
	$(BIN)/pytest -n logical --dist loadfile

# The numeric tests again, with the kernels that torch uses on CPUs without AVX-512 and without AVX2.
test-cpus: $(VENV)/.installed
	ATEN_CPU_CAPABILITY=avx2 $(BIN)/pytest -n logical --dist loadfile -m 'numeric and not long'
	ATEN_CPU_CAPABILITY=default $(BIN)/pytest -n logical --dist loadfile -m 'numeric and not long'

# Needs root: installs Debian packages, makes network namespaces. Also runs what takes minutes.
test-system: $(VENV)/.installed
	tests/system/install.sh
	$(BIN)/pytest -m system tests/system
	$(BIN)/pytest -m long

# Needs a GPU and CIFAR-10 (DATA). GPU_FLAGS: --only, --jobs, --budget-s, …; `python -m benchmarks.gpu --help` lists them.
DATA ?= data
bench-gpu: $(VENV)/.installed
	$(BIN)/python -m benchmarks.gpu --data-dir $(DATA) --docs docs/results.md $(GPU_FLAGS)

check: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

clean:
	rm -rf $(VENV) .peers .pytest_cache .mypy_cache .ruff_cache .hypothesis
