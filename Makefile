# A bare machine with Python 3.11+ and make needs nothing else: both targets set up .venv first.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
ARGS ?=
# pip compiles 20,000 files on one core, half of them tests of libraries; this takes all cores and leaves those out
QUICK = --quiet --disable-pip-version-check --no-compile
COMPILE = $(BIN)/python -m compileall -qq -j 0 -x '/tests?/' $(VENV)/lib || true

# where it is set (containers), every worker and every command of the tests would compile all modules anew
unexport PYTHONDONTWRITEBYTECODE

.PHONY: run test test-loggers test-all lint bench clean

run: $(VENV)/ready  ## train the default (real handwritten digits) in under a minute
	$(BIN)/python train.py $(ARGS)

test: lint  ## what CI runs; a file's tests share what its fixtures train, so they run in one process
	@echo "the fast suite: 4 minutes on 2 quiet cores, longer on busy ones (the first time also the set-up, minutes)"
	$(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder -m "not slow" --durations=40 $(ARGS)

test-loggers: $(VENV)/loggers-ready  ## in CI, after `test`: the two loggers whose packages are too much for everyone
	$(VENV)/loggers/bin/python -m pytest -n 0 -m "not slow" tests/logger/test_logger_mlflow.py tests/logger/test_logger_trackio.py

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

# beside the first environment, whose packages it sees: trackio wants pillow below 13, mlflow brings a cloud's SDK along
$(VENV)/loggers-ready: $(VENV)/test-ready
	$(BIN)/python -m venv --without-pip $(VENV)/loggers
	$(BIN)/python -c "import site; print(f'import site; site.addsitedir({site.getsitepackages()[0]!r})')" > "$$(echo $(VENV)/loggers/lib/python3*/site-packages)/base.pth"
	grep -v '^pillow==' constraints.txt > $(VENV)/loggers/constraints.txt
	$(VENV)/loggers/bin/python -m pip install $(QUICK) -c $(VENV)/loggers/constraints.txt 'trackio>=0.40' 'mlflow-skinny>=3'
	$(VENV)/loggers/bin/python -c 'import mlflow, trackio'  # else their tests would be skipped
	@touch $@

clean:
	rm -rf $(VENV)
