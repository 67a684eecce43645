.PHONY: install demo test lint bench bench-peers clean

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PEERS := .venv-peers
PEERS_STAMP := $(PEERS)/.installed

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable ".[dev]"
	touch $@

demo: install
	$(BIN)/omniload demo --out runs/demo

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: install lint
	$(BIN)/pytest --numprocesses auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder

bench: install
	$(BIN)/python -m benchmarks run all

bench-peers: $(PEERS_STAMP)
	for name in loader_formats loader_text loader_images; do $(PEERS)/bin/python -W ignore -m benchmarks run --repeats 3 $$name || exit; done

$(PEERS_STAMP): pyproject.toml benchmarks/peers/requirements.txt benchmarks/peers/constraints.txt
	test -x $(PEERS)/bin/python || $(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/pip install --quiet --constraint benchmarks/peers/constraints.txt --requirement benchmarks/peers/requirements.txt --editable .
	touch $@

clean:
	rm -rf $(VENV) $(PEERS) build dist runs *.egg-info
