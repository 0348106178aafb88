# Everything here works from nothing: the first target that needs it makes .venv and installs all it uses.
VENV   := .venv
PYTHON ?= python3
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
RUN    ?= runs/demo

# TORCH: what pip is given for torch, e.g. TORCH='torch==2.13.0 --index-url ...' for another build.
.PHONY: help demo test test-slow lint package bench clean
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

# sdist and wheel, and the wheel in an environment of its own (which borrows the installed dependencies).
package: $(STAMP)
	rm -rf dist build
	$(BIN)/python -m build --no-isolation --outdir dist .
	rm -rf build
	$(BIN)/python -m venv --clear --system-site-packages build/wheel-venv
	build/wheel-venv/bin/python -m pip install -q --no-deps --force-reinstall dist/*.whl
	cd build && PYTHONPATH=$$(../$(BIN)/python -c "import site; print(site.getsitepackages()[0])") wheel-venv/bin/python -c \
	  "import zerokl, zerokl.engine.config as c; assert 'build' in zerokl.__file__, zerokl.__file__; print(c.preset_names())"

bench: $(STAMP) .venv-trl/.installed
	$(BIN)/python benchmarks/bench_step.py --trl-python .venv-trl/bin/python

# TRL in an environment of its own: it pins other versions, and zerokl does not depend on it.
.venv-trl/.installed:
	$(PYTHON) -m venv .venv-trl
	.venv-trl/bin/pip install -q $(TORCH)
	.venv-trl/bin/pip install -q trl==1.16.0
	touch $@

clean:
	rm -rf build dist *.egg-info
