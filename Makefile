# Strata: `make serve` to try it, `make test` to test it. Needs Python 3.11+ and a C/C++ compiler; the rest comes from pip.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ARGS ?=

# llama.cpp tuned to the building machine is slower on some x86 processors than its portable AVX2 build; elsewhere
# (Apple silicon, ARM servers) the tuned one is right.
ifneq ($(filter x86_64 amd64,$(shell uname -m)),)
export CMAKE_ARGS ?= -DGGML_NATIVE=OFF
endif

.PHONY: help serve test check crash soak docs bench-restart bench-park bench-restore bench-serve clean

help:
	@echo "make serve          install into $(VENV) and serve the bundled model with a durable cache (ARGS=... adds flags)"
	@echo "make test           run the tests"
	@echo "make check          formatting, lint, types, import rules, laws"
	@echo "make crash          proof of durability: every state that a power cut may leave, and 220 kills of the real server under load"
	@echo "make soak           ten minutes of random clients on the real server (ARGS=\"--minutes 1\"), everything accounted for at rest"
	@echo "make bench-restart  measure what a restart costs with and without the cache"
	@echo "make bench-park     measure what keeping conversations costs (ARGS=\"stall save\": parts of it) and saves"
	@echo "make bench-restore  measure what bringing a conversation back costs (ARGS=\"rates stall\": parts of it), and what is reused"
	@echo "make bench-serve    measure Strata against llama-server (ARGS=\"decode ttft\": parts of it)"
	@echo "make docs           write docs/flags.md and docs/errors.md anew"

serve: $(VENV)/.installed-demo
	$(BIN)/strata serve --model demo --parallel 2 --context 8192 \
	  --conversation-cache-cold-dir .strata/conversations $(ARGS)

test: $(VENV)/.installed-dev
	$(BIN)/pytest -m "not slow" $(ARGS)

check: $(VENV)/.installed-dev
	$(BIN)/ruff format --check src tests benchmarks
	$(BIN)/ruff check src tests benchmarks
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/pytest tests/laws

crash: $(VENV)/.installed-dev
	$(BIN)/python -m tests.crash

soak: $(VENV)/.installed-dev
	$(BIN)/python -m tests.soak $(ARGS)

docs: $(VENV)/.installed-dev
	$(BIN)/python -m strata.cli.docs docs

bench-restart: $(VENV)/.installed-dev
	$(BIN)/python -m benchmarks.restart $(ARGS)

bench-park: $(VENV)/.installed-dev
	$(BIN)/python -m benchmarks.park $(ARGS)

bench-restore: $(VENV)/.installed-dev
	$(BIN)/python -m benchmarks.restore $(ARGS)

bench-serve: $(VENV)/.installed-dev
	$(BIN)/python -m benchmarks.serve $(ARGS)

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Strata needs Python 3.11 or newer, $(PYTHON) is older; try: make PYTHON=python3.12 ..." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; } # half a venv would look like a whole one the next time

# What pip says goes to a log; shown are its steps and, while llama.cpp compiles, how far ninja is.
$(VENV)/.installed-%: pyproject.toml | $(BIN)/python
	@echo "Installing Strata into $(VENV). Compiling llama.cpp takes about five minutes the first time."
	@$(BIN)/python -m pip install --verbose --disable-pip-version-check --editable ".[$*]" 2>&1 \
	  | tee $(VENV)/install.log | awk -f .ci/pip-progress.awk \
	  || { tail -n 40 $(VENV)/install.log >&2; echo "pip failed; all it said is in $(VENV)/install.log" >&2; exit 1; }
	@touch $@
