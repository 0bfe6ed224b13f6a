# Everything starts here: `make help` lists the commands. Each one first sets up .venv if it is missing or stale.
PYTHON      ?= python3
VENV        ?= .venv
CONSTRAINTS ?= constraints/cpu.txt
WORKERS     ?= 2
ARGS        ?=

BIN   := $(VENV)/bin
STAMP := $(VENV)/.installed

# Fixed here so that a run does not depend on the caller's shell. A spinning OpenMP pool slows small operations badly
# on shared cores, and Triton's default for fused multiply-add changes between releases.
export OMP_WAIT_POLICY          ?= PASSIVE
export GOMP_SPINCOUNT           ?= 0
export TRITON_DEFAULT_FP_FUSION ?= 0
export TORCHINDUCTOR_CACHE_DIR  ?= $(CURDIR)/.cache/inductor
export TRITON_CACHE_DIR        ?= $(CURDIR)/.cache/triton
export HF_HUB_OFFLINE           ?= 1
export PIP_DISABLE_PIP_VERSION_CHECK ?= 1

.DEFAULT_GOAL := help
.PHONY: help setup demo demo-ep demo-pd test test-all test-kernels test-slow lint format typecheck check bench kernel-facts cost-model tuning-records compat device clean distclean

help: ## List the commands
	@printf 'Usage: make COMMAND [ARGS="..."] [PYTHON=python3.12]\n\n'
	@sed -n 's/^\([a-z-]*\):[^#]*## \(.*\)/  \1|\2/p' $(firstword $(MAKEFILE_LIST)) | awk -F'|' '{printf "%-14s %s\n", $$1, $$2}'

setup: $(STAMP) ## Create .venv and install the project (again only when its requirements change)

$(STAMP): pyproject.toml $(CONSTRAINTS)
	@$(PYTHON) -c 'import sys; v = sys.version_info; print("==> Python %d.%d.%d in $(VENV)" % v[:3]); \
	  sys.exit(0 if v >= (3, 11) else "dscompile needs Python 3.11 or newer: make PYTHON=/path/to/python3.11 ...")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@printf '==> installing the versions of %s; the first time this takes a minute or two\n' $(CONSTRAINTS)
	@$(BIN)/python tools/install.py $(CONSTRAINTS) test,dev,gpu
	@touch $@

demo: $(STAMP) ## Compile a miniature DeepSeek model and show what was recognised
	@printf '==> examples/quickstart.py\n'
	@$(BIN)/python examples/quickstart.py $(ARGS)

demo-ep: $(STAMP) ## Spread the experts of two miniatures over four processes
	@printf '==> examples/expert_parallel.py, 4 processes\n'
	@OMP_NUM_THREADS=1 $(BIN)/python -m torch.distributed.run --standalone --nproc-per-node 4 examples/expert_parallel.py $(ARGS)

demo-pd: $(STAMP) ## Prefill and decode in processes of their own, requests handed over between them
	@printf '==> examples/disaggregated.py, 6 processes\n'
	@OMP_NUM_THREADS=1 $(BIN)/python examples/disaggregated.py $(ARGS)

# One torch thread per test process: two processes on two cores beat two threads in one.
PYTEST = OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --durations 10

# Triton decides when it is imported whether kernels are compiled or interpreted, so those tests run on their own.
INTERPRETED = TRITON_INTERPRET=1 $(PYTEST) tests/interpreted

test: $(STAMP) ## Run the tests, but for the slow ones
	@printf '==> pytest, %s processes, without the slow tests\n' $(WORKERS)
	@$(PYTEST) -m 'not slow' $(ARGS)
	@printf "==> pytest, kernels in Triton's interpreter\n"
	@$(INTERPRETED) -m 'not slow'

test-all: $(STAMP) ## Run every test
	@printf '==> pytest, %s processes, every test\n' $(WORKERS)
	@$(PYTEST) $(ARGS)
	@$(INTERPRETED)

test-kernels: $(STAMP) ## Run the kernels in Triton's interpreter (ARGS=tests/interpreted/test_rms_norm.py for one file)
	@$(if $(ARGS),TRITON_INTERPRET=1 $(PYTEST) $(ARGS),$(INTERPRETED) -m 'not slow')

test-slow: $(STAMP) ## Run the slow tests only
	@printf '==> pytest, %s processes, slow tests only\n' $(WORKERS)
	@$(PYTEST) -m slow $(ARGS)

lint: $(STAMP) ## Check style and formatting (ruff)
	@printf '==> ruff check\n'
	@$(BIN)/ruff check .
	@printf '==> ruff format --check\n'
	@$(BIN)/ruff format --check .

format: $(STAMP) ## Rewrite the sources in the project's style (ruff)
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

typecheck: $(STAMP) ## Check the types (mypy)
	@printf '==> mypy\n'
	@$(BIN)/mypy

check: lint typecheck test ## Lint, type check and tests

bench: $(STAMP) ## Time eager, stock Inductor and dsv4 side by side (an hour or more; ARGS=--quick for a smoke test)
	@printf '==> benchmarks/cpu.py\n'
	@$(BIN)/python benchmarks/cpu.py $(ARGS)

kernel-facts: $(STAMP) ## Write docs/kernel_facts.md from the machine code of the kernels
	@$(BIN)/python tools/kernel_facts.py $(ARGS)

cost-model: $(STAMP) ## Write docs/cost_model.md: how the model of kernel times orders configs (minutes)
	@OMP_NUM_THREADS=1 $(BIN)/python tools/cost_model.py --jobs $(WORKERS) $(ARGS)

tuning-records: $(STAMP) ## Write the modelled tuning records that are shipped (most of an hour from nothing)
	@OMP_NUM_THREADS=1 $(BIN)/python tools/tuning_records.py --jobs $(WORKERS) $(ARGS)

compat: $(STAMP) ## Compile the Triton templates with four releases of Triton (by hand; downloads them)
	@printf '==> tools/compat.py\n'
	@OMP_NUM_THREADS=1 $(BIN)/python tools/compat.py --write docs/compat.md $(ARGS)

device: $(STAMP) ## On a GPU machine: check and time every kernel (ARGS=--dry-run without a GPU)
	@PYTHON=$(BIN)/python benchmarks/device.sh $(ARGS)

clean: ## Remove caches and build products, keep .venv
	@printf '==> removing caches and build products\n'
	@rm -rf build dist *.egg-info .cache .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@find dscompile passes templates tests examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean ## Remove .venv too
	@rm -rf $(VENV)
