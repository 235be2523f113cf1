# The README's two commands: `make demo` and `make test`. They need python3, make and a package index.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
LOWEST := .venv-lowest
NEWEST := .venv-flower
INSTALL := $(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: help demo pictures test test-extras test-lowest test-flower-newest test-slow torture check format docs docs-serve release-check test-gpu bench bench-gpu bench-peers clean
.DEFAULT_GOAL := help

help:
	@echo "make demo    compare five methods on embedded data, with sharpness and pictures (about two minutes, set-up included)"
	@echo "make test    lint, types and the test suite"
	@echo "make test-extras  the tests of optional packages, and of the report in a browser (installs the packages)"
	@echo "make test-lowest  the main commands with the lowest versions that pyproject.toml allows (a venv of its own)"
	@echo "make test-flower-newest  the main tests of deployment with the newest Flower below 2 (a venv of its own)"
	@echo "make test-slow  the tests that take minutes"
	@echo "make test-gpu   the tests that need a CUDA device, and those of the checks that stand for one"
	@echo "make torture    kill runs a thousand times at random instants and compare what they resume to (KILLS, SEED, JOBS),"
	@echo "                and damage 100,000 files, each of which must be refused or restored to the bit"
	@echo "make check   lint and types only"
	@echo "make format  rewrite the code in the house style"
	@echo "make docs    the documentation as a site, in site/: open site/index.html"
	@echo "make docs-serve  the same with search, at http://127.0.0.1:8000 until Ctrl-C"
	@echo "make release-check  build wheel and sdist, and try both away from the repository"
	@echo "make pictures  the README's picture again, from the demo"
	@echo "make bench   speed and memory against the bare PyTorch loop (about 45 minutes on an idle machine); apart from it are"
	@echo "                jitted_round.py --jax (an environment with JAX) and stacked_methods.py OLD (an older tree), see there"
	@echo "make bench-gpu  rounds on a CUDA device: graphs and precisions against the bare PyTorch loop"
	@echo "make bench-peers  the same work in Flower, pfl-research and others (installs them, about an hour)"

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml setup.py fedlesam/__init__.py constraints.txt | $(BIN)/python
	$(INSTALL) torch --constraint constraints.txt
	$(INSTALL) --editable .
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(INSTALL) --editable '.[dev]'
	touch $@

$(VENV)/.installed-extras: $(VENV)/.installed-dev
	$(INSTALL) --editable '.[dev,extras]'
	touch $@

pictures: $(VENV)/.installed
	$(BIN)/fedlesam demo --out runs/pictures
	cp runs/pictures/accuracy.png docs/images/demo-accuracy.png

demo: $(VENV)/.installed
	$(BIN)/fedlesam demo

check: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: check
	$(BIN)/pytest -n 2 -m "not slow and not extras"

test-extras: $(VENV)/.installed-extras
	$(BIN)/pytest -n 2 --dist loadfile --no-loadscope-reorder -m "extras and not slow"

$(LOWEST)/.installed: pyproject.toml constraints-lowest.txt
	$(PYTHON) -m venv --clear $(LOWEST)
	$(LOWEST)/bin/pip install --quiet --disable-pip-version-check --only-binary :all: --requirement constraints-lowest.txt
	$(LOWEST)/bin/pip install --quiet --disable-pip-version-check --constraint constraints-lowest.txt --editable .
	touch $@

test-lowest: $(LOWEST)/.installed
	tests/lowest.sh $(LOWEST)/bin

# Flower without its dependencies: those of the version that constraints.txt pins do, and the newest may ask for a release
# of certifi or uv that not every index has.
$(NEWEST)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv --clear $(NEWEST)
	$(NEWEST)/bin/pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	$(NEWEST)/bin/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[flower]' pytest hypothesis
	$(NEWEST)/bin/pip install --quiet --disable-pip-version-check --upgrade --no-deps 'flwr<2'
	touch $@

test-flower-newest: $(NEWEST)/.installed
	$(NEWEST)/bin/flwr --version
	$(NEWEST)/bin/pytest -m "extras and not slow" tests/flower/test_equal.py tests/flower/test_deploy_check.py \
		tests/flower/test_try.py::test_the_example_from_start_to_end

test-slow: check
	$(BIN)/pytest -n 2 -m slow

test-gpu: $(VENV)/.installed-dev
	$(BIN)/pytest -m "gpu" tests
	$(BIN)/pytest tests/core/test_graphs.py tests/core/test_precision.py tests/core/test_device_reads.py

torture: $(VENV)/.installed-dev
	$(BIN)/python tests/reliability/torture.py
	FEDLESAM_TORTURE=1 $(BIN)/pytest -s tests/data/test_fuzz.py tests/reliability -k "fuzz"

format: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(VENV)/.installed-docs: $(VENV)/.installed-dev
	$(INSTALL) --editable '.[dev,docs]'
	touch $@

docs: $(VENV)/.installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet --clean

docs-serve: docs
	$(BIN)/python -m http.server --directory site --bind 127.0.0.1 8000

release-check: $(VENV)/.installed-dev
	tests/release.sh $(BIN)

# Not jitted_round.py --jax, which needs an environment with JAX, nor stacked_methods.py OLD, an older tree to compare with.
bench: $(VENV)/.installed-dev
	$(BIN)/python benchmarks/startup.py
	$(BIN)/python benchmarks/methods.py
	$(BIN)/python benchmarks/stacked.py
	$(BIN)/python benchmarks/stacked_sweep.py --ways plain eager compiled --runs 20 --rounds 30 --alone 2
	$(BIN)/python benchmarks/jitted_round.py
	$(BIN)/python benchmarks/growth.py
	$(BIN)/python benchmarks/growth.py --resnet18
	$(BIN)/python benchmarks/checkpoints.py
	$(BIN)/python benchmarks/memory.py
	$(BIN)/python benchmarks/overhead.py
	$(BIN)/python benchmarks/workers.py
	$(BIN)/python benchmarks/kept_memory.py
	$(BIN)/python benchmarks/layouts.py

bench-gpu: $(VENV)/.installed-dev
	$(BIN)/python benchmarks/gpu.py

bench-peers: $(VENV)/.installed-dev
	$(BIN)/python benchmarks/peers/run.py --fresh
	$(BIN)/python benchmarks/peers/run.py --method fedsam
	$(BIN)/python benchmarks/peers/run.py --method fedlesam-s
	$(BIN)/python benchmarks/peers/run.py --model mlp --rounds 20
	$(BIN)/python benchmarks/peers/run.py --model mlp --rounds 20 --method fedsam
	$(BIN)/python benchmarks/peers/run.py --model mlp --rounds 20 --method fedlesam-s

clean:
	rm -rf $(VENV) $(LOWEST) $(NEWEST) site dist
