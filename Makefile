# Octavo. `make demo` and `make test` set everything up themselves; they need python3 with venv and pip.
PYTHON ?= python3
BIN    := .venv/bin
JOBS   ?= 2
DEMO   ?=
# what make gpu runs with: torch, triton, transformers, pytest, hypothesis and numpy are all it needs
GPU_PYTHON ?= python3
GPU_WORDS  = $(if $(PART),--part $(PART)) $(if $(ONLY),--only $(ONLY)) $(if $(OUT),--out $(OUT)) \
	$(if $(BUDGET),--budget $(BUDGET)) $(if $(SMALL),--small)

.PHONY: help install demo test test-long gpu lint types clean

help:             ## show this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

install: .venv/.installed  ## build .venv with everything that demo and tests need

.venv/.installed: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	@touch $@

demo: install     ## FP8 beside high precision on real handwriting: trains, compares, writes demo/report/report.html
	$(BIN)/octavo demo $(DEMO)

lint: install     ## ruff: lint and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: install    ## the type checker on fp8/ and config/
	$(BIN)/mypy

test: lint types  ## what every change must pass, in about 6 minutes on 2 cores; says what it cost
	$(BIN)/python -m pytest -q -n $(JOBS) -m "not long and not gpu"

test-long: install ## the long tests: kill and resume at random moments, several ranks, example files
	$(BIN)/python -m pytest -q -n $(JOBS) -m "long and not gpu"

gpu:              ## on an NVIDIA GPU: tests and benchmarks in 8 minutes; all of them with PART=1, 2, 3 (ONLY= OUT= BUDGET= SMALL=1)
	$(GPU_PYTHON) -m benchmarks.gpu $(GPU_WORDS)

clean:            ## remove what the commands above made
	rm -rf .venv demo runs build *.egg-info .pytest_cache .mypy_cache .ruff_cache
