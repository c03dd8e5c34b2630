# Everything from a fresh clone: `make demo` and `make test` install what they need and say what they download.
# An active environment that has torch is used as it is; otherwise .venv is made, with the torch of python3 if it has one. TORCH=torch==2.11.0 picks a version.

SHELL := /bin/bash
export TORCH

.PHONY: help demo golden test test-slow test-oldest test-newest test-peers lint docs hostile wheel gpu-check

help:
	@echo "make demo   fine-tune a real model under an enforced limit on device memory, at most 4 minutes (FAST=1: 8 steps, at most 90 seconds)"
	@echo "make test   lint, types, imports and the test suite (DURATIONS=30: list the slowest tests)"
	@echo "make test-slow  the cases that make test leaves out (TESTS=tests/numerics)"
	@echo "make test-oldest  numerics with the engine's dependencies alone, in the oldest versions (TESTS=..., TORCH=torch==2.11.0)"
	@echo "make test-newest  a sample of the tests with the newest transformers (TESTS=..., TORCH=torch for the newest torch)"
	@echo "make test-peers  a few of PEFT's own tests, from its sdist, on streamed models"
	@echo "make golden compare losses, weights and plans bit for bit with those of the first call, in .cache/golden.json"
	@echo "make lint   lint, types and imports alone"
	@echo "make docs   build the documentation as a site, in build/site; a broken link is an error"
	@echo "make gpu-check  the three calls of docs/first-contact.md, into runs/gpu-check (DEVICE=cpu: these and all tests, on toys)"
	@echo "make wheel  build wheel and sdist, and try the wheel outside the checkout"

demo:
	@python=$$(scripts/bootstrap.sh gguf,report --demo) && $$python examples/demo.py $(if $(FAST),--fast)

test: lint
	@python=$$(scripts/bootstrap.sh dev) && $$python -m pytest -n 2 --dist worksteal $(if $(DURATIONS),--durations=$(DURATIONS))

test-slow:
	@python=$$(scripts/bootstrap.sh dev) && $$python -m pytest -n 2 --dist worksteal -m "slow and not gpu" $(TESTS)

test-oldest:
	@scripts/test_oldest.sh $(TESTS)

test-newest:
	@scripts/test_newest.sh $(TESTS)

test-peers:
	@python=$$(scripts/bootstrap.sh dev) && $$python -m tests.peers sample

lint:
	@python=$$(scripts/bootstrap.sh dev) && set -x && $$python -m ruff check . && $$python -m ruff format --check . \
	  && $$python -m mypy && $$python -m mypy --config-file benchmarks/mypy.ini && $$python -c 'from importlinter.cli import lint_imports_command; lint_imports_command()'

golden:
	@python=$$(scripts/bootstrap.sh dev) && $$python -m tests.golden.record .cache/golden.json

hostile:
	@python=$$(scripts/bootstrap.sh dev) && $$python -m tests.security.hostile 20

docs:  # PATH: signatures are formatted by ruff
	@python=$$(scripts/bootstrap.sh docs --alone) && PATH="$$(dirname "$$python"):$$PATH" NO_MKDOCS_2_WARNING=1 \
	  $$python -m mkdocs build --strict && echo "build/site/index.html; with search: $$python -m http.server -d build/site"

gpu-check:
	@$(or $(PYTHON),python3) scripts/gpu_check.py --device $(or $(DEVICE),cuda) $(if $(OUT),--output $(OUT))

wheel:
	@python=$$(scripts/bootstrap.sh dev) && scripts/try_wheel.sh $$python
