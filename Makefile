# `make demo` and `make test` do all the set-up they need. The second time it is there already.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test test-long lint clean
demo: $(READY)
	@$(BIN)/python -m lpa.demo

test: $(READY)
	@$(BIN)/python -m pytest

test-long: $(READY)
	@$(BIN)/python -m pytest tests/long

lint: $(READY)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

$(READY): pyproject.toml constraints.txt
	@echo "Setting up $(VENV): Python packages, about 1.7 GB with torch; this happens once."
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "lpa needs Python 3.11 or newer; type: make PYTHON=python3.12 …")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "  torch (CPU build) …" && $(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt torch
	@echo "  lpa and the tools to test it …" && $(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $(READY)

clean:
	rm -rf $(VENV)
