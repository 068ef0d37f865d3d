# Both commands do everything on a fresh machine with Python 3.11+ and make.

PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test test-all check clean

demo: .venv/demo-is-installed
	$(BIN)/sfumato demo --preset digits-cpu

# Two workers, one thread each: on two cores, four threads only wait for each other. A file goes to
# one of them, so that what its tests share is made once.
WORKERS := -n 2 --dist loadfile --no-loadscope-reorder

test: check
	OMP_NUM_THREADS=1 $(BIN)/pytest $(WORKERS) -m "not slow and not gpu and not sweep and not full"

# Everything but what needs a GPU: whole matrices of cases, and hours of models at full depth.
test-all: check
	OMP_NUM_THREADS=1 $(BIN)/pytest $(WORKERS) -m "not gpu"

check: .venv/dev-is-installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/basedpyright
	$(BIN)/lint-imports

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| (echo "sfumato needs Python 3.11 or newer: make PYTHON=python3.11 $(MAKECMDGOALS)"; exit 1)
	$(PYTHON) -m venv .venv

.venv/demo-is-installed: .venv/bin/python pyproject.toml constraints.txt
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[demo]"
	touch $@

.venv/dev-is-installed: .venv/bin/python pyproject.toml constraints.txt
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[demo,dev]"
	touch $@ .venv/demo-is-installed

clean:
	rm -rf .venv
