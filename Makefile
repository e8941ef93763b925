# `make demo` trains the indexer of a small DeepSeek-V4 model on real text; `make test` proves the library.
# Each sets up all it needs in .venv. PYTHON=python3.12 picks an interpreter, TORCH=... another torch (e.g. a CUDA build).

PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin
export OMP_WAIT_POLICY := PASSIVE

.PHONY: demo test lint types unit clean

demo: $(VENV)/ready
	$(BIN)/csakit train --preset tiny

test: lint types unit

lint: $(VENV)/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/ready
	$(BIN)/mypy

# one thread per worker: two workers on two cores are faster than one with two threads, and every run sums in the same order
unit: $(VENV)/ready
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2

# torch first and by itself: a looser requirement of another package would choose the build
$(VENV)/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt $(TORCH)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) runs
