# A bare machine with Python 3.11+ and make needs nothing else: both targets set up .venv first.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
ARGS ?=
# pip compiles 20,000 files on one core, half of them tests of libraries; this takes all cores and leaves those out
QUICK = --quiet --disable-pip-version-check --no-compile
COMPILE = $(BIN)/python -m compileall -qq -j 0 -x '/tests?/' $(VENV)/lib || true

.PHONY: run test test-all lint bench clean

run: $(VENV)/ready  ## train the default (real handwritten digits) in under a minute
	$(BIN)/python train.py $(ARGS)

test: lint  ## what CI runs
	@echo "the fast suite: 4 to 5 minutes on 2 quiet cores, longer on busy ones (the first time also the set-up, minutes)"
	$(BIN)/python -m pytest -n 3 --dist loadgroup -m "not slow" --durations=40 $(ARGS)

test-all: lint  ## every command started cold, with full matrices, chaos, network namespaces and a browser
	ISOBATCH_COLD=1 $(BIN)/python -m pytest -n 3 --dist loadgroup $(ARGS)

lint: $(VENV)/test-ready
	$(BIN)/ruff check src tests benchmarks train.py
	$(BIN)/ruff format --check --quiet src tests benchmarks examples train.py
	$(BIN)/mypy

bench: $(VENV)/ready
	$(BIN)/python benchmarks $(ARGS)

$(VENV)/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install $(QUICK) -c constraints.txt -e .
	@$(COMPILE)
	@touch $@

$(VENV)/test-ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install $(QUICK) -c constraints.txt -e '.[test]'
	@$(COMPILE)
	@touch $@ $(VENV)/ready

clean:
	rm -rf $(VENV)
