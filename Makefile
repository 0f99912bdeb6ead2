# Every target first completes the set-up; once that is done, it costs a tenth of a second.
.DEFAULT_GOAL := help
.PHONY: help setup packages constraints run lab test check lint types light processes notebooks fuzz soak test-browser bench site clean
MAKEFLAGS += --no-print-directory

# It starts the set-up, which finds a supported version itself.
PYTHON ?= python3
BIN := .venv/bin

# Programs that a notebook or a test starts by name (mpirun, horovodrun, torchrun) come from this environment.
export PATH := $(CURDIR)/$(BIN):$(PATH)
# So does the notebooks' kernel, python3, whatever kernels the user has.
export JUPYTER_PREFER_ENV_PATH := 1
unexport JUPYTER_PATH
# Lessons and tests start thousands of processes, which should not compile the same modules again and again.
unexport PYTHONDONTWRITEBYTECODE

# $(call step,NAME,COMMAND): announces a step, runs it, prints its time, and fails if it fails.
define step
@printf '\n== %s\n' '$(1)'; start=$$(date +%s); code=0; $(2) || code=$$?; \
printf '== %s: %s, %s s\n' '$(1)' "$$(test $$code -eq 0 && echo passed || echo FAILED)" "$$(($$(date +%s) - start))"; \
exit $$code
endef

help: ## show this list
	@awk -F ':.*## ' '/^[a-z][a-z-]*:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

# $(call set-up,OPTIONS): completes .venv. It says nothing if that is complete, unless it is what was asked for.
define set-up
@$(PYTHON) -c 'import sys; sys.version_info >= (3, 9) or sys.exit("make: $(PYTHON) is Python %d.%d; the set-up starts with 3.9 or later: make $@ PYTHON=python3.11" % sys.version_info[:2])'
@$(PYTHON) -m workshop_utils.setup.bootstrap $(1) $(if $(filter $@,$(MAKECMDGOALS)),,--quiet)
endef

setup: ## complete .venv: all packages, and Horovod compiled for them (HOROVOD=no leaves it out)
	$(call set-up,$(if $(filter no,$(HOROVOD)),--without-horovod))

packages: ## create .venv with what JupyterLab and cells on ranks need
	$(call set-up,--lab)

run: setup ## execute all lessons into build/, with a report (WORKERS=4 SIZE=small NOTEBOOKS=...)
	$(foreach each,$(filter $(addsuffix =%,WORKER worker workers SIZES size NOTEBOOK notebook notebooks),$(MAKEOVERRIDES)),\
	  $(error $(each) has no effect: make run takes WORKERS, SIZE and NOTEBOOKS))
	$(if $(SIZE),WORKSHOP_SIZE=$(SIZE)) $(BIN)/workshop run $(NOTEBOOKS) --output build \
	  $(if $(WORKERS),-p workers=$(WORKERS))

lab: packages ## open JupyterLab on your own copy of the lessons, my_lessons/
	@$(BIN)/workshop lab my_lessons

test: setup ## all checks: those of `check`, tests of processes and frameworks, notebooks
	@$(MAKE) check
	@code=0; $(MAKE) processes || code=1; $(MAKE) notebooks || code=1; exit $$code

check: setup ## what needs no framework and starts no process: lint, types, light tests; at most two minutes
	@$(MAKE) lint
	@$(MAKE) -j 2 -k types light

lint: setup ## ruff: rules and format; import-linter: which module may import which
	$(call step,lint,$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/lint-imports --no-cache --no-logo)

types: setup ## mypy
	$(call step,types,$(BIN)/mypy)

# One thread per process: tests already start several processes on every core.
light processes notebooks: export OMP_NUM_THREADS := 1
light processes notebooks: export TF_CPP_MIN_LOG_LEVEL := 2

light: setup ## tests that need no framework and start no process
	$(call step,light tests,$(BIN)/pytest --light -r fEs)

# Several files at a time: tests of real processes wait more than they compute. The slowest
# come first: tests/conftest.py sorts them.
processes: setup ## tests of real processes and frameworks
	$(call step,tests of processes and frameworks,$(BIN)/pytest -m processes -n 4 --dist loadfile --no-loadscope-reorder -r fEs)

notebooks: export WORKSHOP_SIZE := small
# The learner's edition is the source without its solutions, in its own folder.
EDITION ?= source
# Three at a time, since they wait more than they compute; those that take the longest first.
LESSONS := $(if $(filter learner,$(EDITION)),build/editions/learner/notebooks,notebooks)
notebooks: setup ## run the notebooks, compare the marked cells, take each solution (EDITION=learner: the learner's edition)
	$(if $(filter learner,$(EDITION)),@$(BIN)/workshop release)
	$(call step,notebooks ($(EDITION)),PYTHONPATH=tests $(BIN)/pytest -p verdicts --nbval-lax $(addsuffix .ipynb,$(addprefix $(LESSONS)/,14* 05* 0[67]* 1* *)) -n 3 --dist loadfile --no-loadscope-reorder --nbval-cell-timeout 600 --timeout 900)

fuzz: setup ## any job.yaml: ten minutes, or FUZZ_MINUTES
	$(call step,fuzz,$(BIN)/pytest tests/fuzz.py -q --timeout 7200)

soak: setup ## 1,000 LAUNCHES, 500 CALLS of on_ranks and 300 CELLS on ranks that stay, with kills and interrupts; nothing may be left behind
	$(call step,soak,$(BIN)/python tests/soak.py --launches $(or $(LAUNCHES),1000) --calls $(or $(CALLS),500) --cells $(or $(CELLS),300))

test-browser: setup ## each lesson in a real JupyterLab in Chromium, pictures in build/browser/ (NOTEBOOKS=...)
	@$(BIN)/python -c "import playwright" 2>/dev/null || $(BIN)/python -m pip install --quiet -e ".[browser]"
	$(call step,lessons in the browser,NOTEBOOKS="$(NOTEBOOKS)" WORKSHOP_SIZE=small $(BIN)/pytest tests/browser/lessons.py -q)

bench: setup ## measure the claims and compare them with their limits (NAMES="all_reduce steps")
	$(BIN)/python tests/benchmarks $(NAMES)

site: setup ## the executed lessons as a web site with search: build/site/html/index.html
	@$(BIN)/python -m workshop_utils.lessons.site

# PyTorch has a build for each device, so it is pinned beside these files, and decides on torchvision; CUDA's packages
# come with its own.
CUDA := triton cuda-bindings cuda-pathfinder cuda-toolkit $(addprefix nvidia-,cublas cuda-cupti cuda-nvrtc cuda-runtime \
  cudnn-cu13 cufft cufile curand cusolver cusparse cusparselt-cu13 nccl-cu13 nvjitlink nvshmem-cu13 nvtx)
constraints: setup ## resolve the tested versions anew, for each Python (a release does it)
	@for version in 3.11 3.12 3.13; do $(BIN)/uv pip compile pyproject.toml --all-extras --universal --upgrade --quiet \
	  --python-version $$version $(addprefix --no-emit-package ,torch torchvision $(CUDA)) --generate-hashes --no-header --no-annotate \
	  --overrides workshop_utils/setup/requirements/overrides.txt --output-file workshop_utils/setup/requirements/python$$version.txt || exit 1; done

clean: ## remove build/ and caches; .venv and the built Horovod stay
	rm -rf build .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -path ./.venv -prune -o -type d \( -name __pycache__ -o -name .ipynb_checkpoints \) -exec rm -rf {} +
