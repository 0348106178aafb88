# Everything here works from nothing: the first target that needs it makes .venv and installs all it uses.
VENV   := .venv
PYTHON ?= python3
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
RUN    ?= runs/demo

# TORCH: what pip is given for torch, e.g. TORCH='torch==2.13.0 --index-url ...' for another build.
.PHONY: help demo test test-slow lint bench clean
.DEFAULT_GOAL := help

help:
	@echo "make demo       train a small model to add, exactly on-policy; ends with reward curve, mismatch and fingerprint"
	@echo "make test       the tests (minutes)"
	@echo "make test-slow  the long proofs: 200-step runs, real vocabularies and head counts, memory, the demo twice"
	@echo "make lint       ruff"
	@echo "make bench      one RL step beside TRL, sampling beside transformers, the linear beside plain torch"

# torch first, so that an installed build (a CPU one, say) is kept: later packages ask for torch in any version.
TORCH ?= torch==2.13.0
$(STAMP): pyproject.toml setup.py
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -c "import torch" 2>/dev/null || $(BIN)/pip install -q $(TORCH)
	$(BIN)/pip install -q -e ".[test]"
	touch $(STAMP)

demo: $(STAMP)
	$(BIN)/zerokl train --preset demo --run-dir $(RUN)

test: $(STAMP)
	$(BIN)/python -m pytest -m "not slow"

test-slow: $(STAMP)
	$(BIN)/python -m pytest -m slow

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

bench: $(STAMP) .venv-trl/.installed
	$(BIN)/python benchmarks/bench_step.py --trl-python .venv-trl/bin/python

# TRL in an environment of its own: it pins other versions, and zerokl does not depend on it.
.venv-trl/.installed:
	$(PYTHON) -m venv .venv-trl
	.venv-trl/bin/pip install -q $(TORCH)
	.venv-trl/bin/pip install -q trl==1.16.0
	touch $@

clean:
	rm -rf build dist *.egg-info runs
