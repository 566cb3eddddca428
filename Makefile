# make demo   measures the bundled story repository through a real service and a real daemon
# make test   linters, types, import contracts and every test tier
# Both do all their set-up in .venv and reuse it.

PYTHON ?= python3
# What pip installs as torch: torch==2.13.0 is the CPU build on Python 3.11, x86-64. A CUDA host names its own, for example
#   make demo TORCH="torch==2.13.0 --index-url <the index of your CUDA build>"
TORCH ?= torch==2.13.0
EXTRAS ?= service,runner,dashboards,dev

BIN := .venv/bin
PIP := $(BIN)/pip --disable-pip-version-check --quiet
SETUP := $(shell printf '%s' '$(TORCH) $(EXTRAS)' | cksum | cut -d' ' -f1)
STAMP := .venv/.installed-$(SETUP)
# Beside it the tests want Triton, 200 MB, whose interpreter and compiler need no GPU. A torch for CUDA brought its own.
TESTED := .venv/.installed-for-tests-$(SETUP)

.PHONY: setup demo test lint clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(PIP) install $(TORCH)
	$(PIP) install --constraint constraints.txt --editable '.[$(EXTRAS)]'
	rm -f .venv/.installed-* && touch $@

$(TESTED): $(STAMP)
	$(BIN)/python -c 'import triton' 2>/dev/null || $(PIP) install --constraint constraints.txt --editable '.[triton]'
	touch $@

demo: $(STAMP)
	$(BIN)/ulpwatch demo

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: lint $(TESTED)
	$(BIN)/pytest --numprocesses 2 --dist worksteal

clean:
	rm -rf .venv .ulpwatch .mypy_cache .ruff_cache .pytest_cache build *.egg-info
