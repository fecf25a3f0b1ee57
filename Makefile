# `make train` and `make test` on a machine with Python 3.11 or newer; each sets up .venv first, once.
PYTHON ?= python3
RUN = .venv/bin/python -m

.PHONY: train test lint unit install

train: install
	.venv/bin/a5 train

test: lint unit

lint: install
	$(RUN) ruff check .
	$(RUN) ruff format --check .
	$(RUN) mypy

# One thread a worker: two workers on two cores then disturb neither each other nor bit-for-bit comparisons.
unit: install
	OMP_NUM_THREADS=1 $(RUN) pytest -n logical --maxprocesses 4 --cov=a5lib --cov=solutions --cov-fail-under=90

install:
	@$(PYTHON) install.py
