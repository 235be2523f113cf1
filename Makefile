# The README's two commands: `make demo` and `make test`. They need python3, make and a package index.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: demo test check format clean
.DEFAULT_GOAL := help

help:
	@echo "make demo    compare five methods on embedded data, with pictures (about two minutes, set-up included)"
	@echo "make test    lint, types and the test suite"
	@echo "make check   lint and types only"
	@echo "make format  rewrite the code in the house style"

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml constraints.txt | $(BIN)/python
	$(INSTALL) torch --constraint constraints.txt
	$(INSTALL) --editable .
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(INSTALL) --editable '.[dev]'
	touch $@

demo: $(VENV)/.installed
	$(BIN)/fedlesam demo

check: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: check
	$(BIN)/pytest -n 2

format: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV)
