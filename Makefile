# A bare machine with Python 3.11+ and make needs nothing else: both targets set up .venv first.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
ARGS ?=
# pip would compile 20,000 files, of which a run imports a tenth: those are compiled by importing them once
QUICK = --quiet --disable-pip-version-check --no-compile
WARM = env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -c "import matplotlib.pyplot, timm, torch._dynamo, wandb"

.PHONY: run test test-all lint bench clean

run: $(VENV)/ready  ## train the default (real handwritten digits) in under a minute
	$(BIN)/python train.py $(ARGS)

test: lint  ## what CI runs
	$(BIN)/python -m pytest -n 3 --dist loadgroup -m "not slow" --durations=40 $(ARGS)

test-all: lint  ## with full matrices, chaos, network namespaces and a browser
	$(BIN)/python -m pytest -n 3 --dist loadgroup $(ARGS)

lint: $(VENV)/test-ready
	$(BIN)/ruff check src tests benchmarks train.py
	$(BIN)/mypy

bench: $(VENV)/ready
	$(BIN)/python benchmarks/loop.py

$(VENV)/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install $(QUICK) -c constraints.txt -e .
	@$(WARM)
	@touch $@

$(VENV)/test-ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install $(QUICK) -c constraints.txt -e '.[test]'
	@$(WARM)
	@touch $@ $(VENV)/ready

clean:
	rm -rf $(VENV)
