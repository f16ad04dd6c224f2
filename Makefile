# Everything here sets itself up first, in .venv, from Python 3.11 and pip alone.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: setup test check format demo wheel constraints clean

setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip --constraint constraints.txt
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[demo]" --group dev
	touch $@

test: setup
	$(BIN)/python -m pytest

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

demo: setup
	$(BIN)/dataload demo

wheel: setup
	$(BIN)/python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist .

# The newest versions that pyproject.toml admits, exactly; torch stays at the pinned release.
constraints: setup
	$(BIN)/python -m pip install --quiet --upgrade --upgrade-strategy eager "torch==2.13.0" --editable ".[demo]" --group dev
	$(BIN)/python -m pip freeze --all --exclude-editable | sed 's/+cpu$$//' > constraints.txt

clean:
	rm -rf $(VENV) build dist *.egg-info
