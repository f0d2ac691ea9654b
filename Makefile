# Each target installs what it needs into .venv and works from a fresh clone with nothing but Python 3.11 or 3.12.
PYTHON ?= $(shell command -v python3.11 || command -v python3.12 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
SEED ?= 0
ENGINE ?= embedded
DRILL ?= processes
JOBS ?= 1
LANES := sglang faults unit redis ray demo cluster

export OMP_NUM_THREADS := 1
export TOKENIZERS_PARALLELISM := false
export HF_HUB_OFFLINE := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Empty is unset: the suite starts hundreds of processes, and each would compile our modules anew.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help install demo drill sglang-cpu test test-sglang check soak bench-buffer bench-weights bench-learning coverage lint format clean $(addprefix lane-,$(LANES))

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  make %-8s %s\n", $$1, $$2}'

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/installed-all: pyproject.toml constraints.txt | $(BIN)/python
	@echo 'Installing into $(VENV): one to three minutes, most of it torch …'
	@$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[all]'
	@touch $@

$(VENV)/installed-dev: pyproject.toml constraints.txt | $(BIN)/python
	@echo 'Installing into $(VENV), with what tests and checks need: one to four minutes …'
	@$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[all,dev]'
	@touch $@ $(VENV)/installed-all

install: $(VENV)/installed-all  ## the commands rl-producer, rl-trainer and rollstream in .venv/bin

demo: $(VENV)/installed-all $(if $(filter sglang,$(ENGINE)),sglang-cpu)  ## train a model through Redis, live engines and the weight channel (SEED=n, ENGINE=sglang)
	$(BIN)/rollstream demo --seed $(SEED) --engine $(ENGINE) $(if $(filter sglang,$(ENGINE)),--engine-python $(SGLANG)/bin/python)

drill: $(VENV)/installed-all  ## the demo under kill -9 (DRILL=processes or DRILL=group)
	$(BIN)/rollstream demo --seed $(SEED) --drill $(DRILL)

# SGLang pins other versions of torch and transformers than ours, so it has an environment of its own: 2.9 GB, two to four minutes.
SGLANG := .venv-sglang
SGLANG_PINS := $(addprefix producer/engine/sglang/,requirements-cpu.txt requirements-cpu-bare.txt)
$(SGLANG)/installed: $(SGLANG_PINS)
	@echo 'Installing SGLang for CPUs into $(SGLANG): two to four minutes …'
	@test -x $(SGLANG)/bin/python || $(PYTHON) -m venv $(SGLANG)
	@$(SGLANG)/bin/pip install --quiet --requirement $(word 1,$(SGLANG_PINS))
	@$(SGLANG)/bin/pip install --quiet --no-deps --requirement $(word 2,$(SGLANG_PINS))
	@touch $@

sglang-cpu: $(SGLANG)/installed  ## SGLang for machines without a GPU, in .venv-sglang

# The lanes of the test suite, with the minutes each takes beside another on two cores. Two run at a time, as none keeps both cores busy: each has servers,
# ports and folders of its own. The longest begin, or a long one would run alone at the end: so SGLang is installed before, as make puts off a lane that has to wait.
test: $(VENV)/installed-dev sglang-cpu  ## the whole test suite
	$(MAKE) --jobs 2 --output-sync=target $(addprefix lane-,$(LANES))

lane-unit: $(VENV)/installed-dev  # 10 minutes
	$(BIN)/pytest -q -m 'not redis and not cluster and not demo and not faults and not ray and not sglang'

lane-redis: $(VENV)/installed-dev  # 7 minutes
	$(BIN)/pytest -q -m 'redis and not cluster and not demo and not faults and not ray and not sglang'

lane-cluster: $(VENV)/installed-dev  # 1 minute
	$(BIN)/pytest -q -m 'cluster and not demo and not faults and not ray and not sglang'

lane-demo: $(VENV)/installed-dev  # 8 minutes
	$(BIN)/pytest -q -m 'demo and not faults and not ray and not sglang'

lane-faults: $(VENV)/installed-dev  # 17 minutes
	$(BIN)/pytest -q -m 'faults and not ray and not sglang'

lane-ray: $(VENV)/installed-dev  # 9 minutes
	$(BIN)/pytest -q -m 'ray and not sglang'

lane-sglang: $(VENV)/installed-dev sglang-cpu  # 19 minutes, after two to four for the first installation
	$(BIN)/pytest -q -m sglang

test-sglang: $(VENV)/installed-dev sglang-cpu  ## the contract of engines, checked on real SGLang (and on the embedded engine by `make test`)
	$(BIN)/pytest -q -m sglang tests/contract

# The peers bring Ray and 1.4 GB with them, so they have an environment of their own.
BENCH := .venv-bench
$(BENCH)/installed: pyproject.toml constraints.txt benchmarks/requirements.txt
	$(PYTHON) -m venv $(BENCH)
	$(BENCH)/bin/pip install --quiet --requirement benchmarks/requirements.txt
	$(BENCH)/bin/pip install --quiet --constraint constraints.txt --editable '.[local]'
	@touch $@

bench-buffer: $(BENCH)/installed  ## the buffer against the ceiling of its server and against other queues
	$(BENCH)/bin/python -m benchmarks.buffer

bench-weights: $(VENV)/installed-all  ## engines updated by themselves against all of them stopped: store, gloo, delta
	$(BIN)/python -m benchmarks.weights

bench-learning: $(VENV)/installed-all  ## losses at forced staleness through the whole service, 36 runs: hours on two cores (JOBS=n runs at once), resumable
	$(BIN)/python -m benchmarks.learning --jobs $(JOBS)
	$(BIN)/python -m benchmarks.learning --report runs/learning/report

soak: $(VENV)/installed-dev  ## 20,000 simulated runs, then 300 runs of the buffer and 40 of the weight channel under kill -9: an hour or two
	$(BIN)/python -m benchmarks.simulator --seeds 20000 --jobs 2
	$(BIN)/python -m tests.faults.soak --rounds 300

coverage: $(VENV)/installed-dev  ## lines and branches that the suite without demo and faults reaches
	$(BIN)/pytest -q -m 'not demo and not faults and not ray and not sglang' --cov --cov-report=term

lint: $(VENV)/installed-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/mypy -p benchmarks.simulator -p benchmarks.weights -p benchmarks.learning -p benchmarks.failures
	$(BIN)/mypy --explicit-package-bases benchmarks/gpu/*.py
	$(BIN)/lint-imports

format: $(VENV)/installed-dev  ## write the code in its one format
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

check: lint test  ## everything CI checks

clean:
	rm -rf $(VENV) $(SGLANG) .mypy_cache .ruff_cache .pytest_cache
