# Every target runs in the project's own environment; uv makes it on first use.
UV ?= uv
RUN = $(UV) run
CODE = agentflow examples tests

.DEFAULT_GOAL := help
.PHONY: help format lint types arch test test-all check bench overhead demo

help: ## Show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  make %-10s %s\n", $$1, $$2}'

format: ## Format the code and sort its imports
	$(RUN) ruff check --select I --fix $(CODE)
	$(RUN) ruff format $(CODE)

lint: ## Check format and lint, changing nothing
	$(RUN) ruff format --check $(CODE)
	$(RUN) ruff check $(CODE)

types: ## Check types, strictly
	$(RUN) mypy

arch: ## Check the rules on imports and file length
	$(RUN) pytest tests/test_architecture.py

test: ## Run the tests (those that CI runs)
	$(RUN) pytest

test-all: ## Run all tests, those that take minutes or want a GPU too
	$(RUN) pytest -m ''

check: lint types arch test ## All that CI checks

bench: ## Run the standard benchmarks (about 20 minutes) and write docs/benchmarks.md
	OMP_NUM_THREADS=1 $(RUN) python -m agentflow.bench.standard

overhead: ## Measure the framework's own overhead
	$(RUN) python -m agentflow.bench.overhead

demo: ## Run the demo on the embedded engine
	$(RUN) agentflow demo
