# `make train` and `make test` on a machine with Python 3.11 or newer; each sets up .venv first, once.
PYTHON ?= python3
RUN = .venv/bin/python -m
VLLM_VENV ?= .venv-vllm
# A teacher's starter branch has no solutions/: nothing to check there, and the tests that it skips leave lines uncovered.
REFERENCE = $(wildcard solutions/__init__.py)

.PHONY: train test test-vllm lint unit notebooks install

train: install
	.venv/bin/a5 train

test: lint unit notebooks

lint: install
	$(RUN) ruff check .
	$(RUN) ruff format --check .
	$(RUN) mypy a5lib $(if $(REFERENCE),solutions)

# One thread a worker: two workers on two cores then disturb neither each other nor bit-for-bit comparisons.
unit: install
	OMP_NUM_THREADS=1 $(RUN) pytest -n logical --maxprocesses 4 \
		$(if $(REFERENCE),--cov=a5lib --cov=solutions --cov-fail-under=90)

# Every notebook, run by nbval on the reference and by nbclient on the stubs.
notebooks: install
	$(RUN) tests.notebook_tools validate

# A real vLLM on the CPU, in an environment of its own: two minutes to make it, once, and about six for the tests.
test-vllm: install
	.venv/bin/python tests/vllm/make_environment.py $(VLLM_VENV)
	OMP_NUM_THREADS=1 A5_VLLM_PYTHON=$(abspath $(VLLM_VENV))/bin/python $(RUN) pytest tests/vllm

install:
	@$(PYTHON) install.py
