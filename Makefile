# lookahead-agent: `make run` and `make test` do everything on a fresh clone, installation and models included.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
# "gpu" if the NVIDIA driver is installed; override with make EXTRA=cpu.
EXTRA  ?= $(shell command -v nvidia-smi >/dev/null 2>&1 && echo gpu || echo cpu)
PIP    := $(BIN)/python -m pip --disable-pip-version-check --quiet
TORCH_CPU_INDEX := https://download.pytorch.org/whl/cpu
Q      ?=
# Problems of `make bench`: GSM8K if its file exists, else the packaged problems.
DATASET ?= $(firstword $(wildcard ../shared/data/gsm8k-train-400.jsonl) own)

INSTALLED := $(VENV)/.installed-$(EXTRA)
LANGGRAPH_DEV := $(VENV)/langgraph-dev
# Fetch the default models; `models fetch` returns at once if the cache has them.
FETCH  := $(BIN)/lookahead-agent models fetch
# Unit tests of what decides, which run with branch coverage: `make test` runs them so, and the others without.
DECIDES := $(patsubst %,tests/unit/test_%.py,arithmetic calibration_risk chat_model driver driver_faults driver_regions \
    driver_tokenizers driver_tree judges numbers policy policy_choice remote_engines reply_text results \
    runtime scheduler segmenter draft_follower drift_monitor shared_draft verifiers)
# pytest-xdist silently runs nothing if one of its files does not exist.
$(foreach FILE,$(DECIDES),$(if $(wildcard $(FILE)),,$(error $(FILE), which the Makefile measures, does not exist)))
# Many tests wait for subprocesses, so pytest starts twice as many workers as cores.
UNIT_TESTS := $(BIN)/python -m pytest -n $(shell $(PYTHON) -c 'import os; print(2 * (os.cpu_count() or 1))') --dist worksteal
# Tests start Python hundreds of times, so keep its bytecode caches even if the shell disables them.
unexport PYTHONDONTWRITEBYTECODE
# Durations of the stages, shown at the end.
STAGES := $(VENV)/.stages
TIMED  := @.ci/timed.sh $(STAGES)
SHOWN  := @.ci/timed.sh $(STAGES) --show

.DEFAULT_GOAL := help
.PHONY: help run lookahead bench test test-unit coverage lint style types site package format install models programs \
    prepare clean

help: ## Show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "make %-10s %s\n", $$1, $$2}'

run: models ## Run an agent with a database and a calculator on a question (Q="...")
	@$(BIN)/lookahead-agent agent --temperature 0 $(if $(Q),"$$Q")
	$(SHOWN)

lookahead: models ## The same with forced draft steps: live steps, a trace page, and the time saved or lost
	@$(BIN)/lookahead-agent agent --temperature 0 --depth 4 --compare --live --trace run.html $(if $(Q),"$$Q")
	@echo "The run as a page: run.html"
	$(SHOWN)

bench: models ## Measure the default and fixed configurations on this machine (DATASET=problems.jsonl)
	@$(BIN)/lookahead-agent bench --config cpu --dataset $(DATASET) --out results/bench.jsonl
	@$(BIN)/lookahead-agent bench report results/bench.jsonl -o results/bench.md > /dev/null

test: prepare coverage ## Run all tests, also those with real models
	$(TIMED) "other unit tests" $(UNIT_TESTS) $(DECIDES:%=--ignore=%) tests/unit
	$(TIMED) "tests on tiny models" $(BIN)/python -m pytest -n 4 --dist loadfile --no-loadscope-reorder -m "not packaged" tests/integration
	$(TIMED) "tests on the packaged models" $(BIN)/python -m pytest -m packaged tests/integration
	$(SHOWN)

test-unit: $(INSTALLED) programs ## Run the unit tests only (a few minutes)
	@$(UNIT_TESTS) tests/unit

coverage: $(INSTALLED) ## Measure branch coverage of the decoder, the verifiers and the policies by unit tests
	$(TIMED) "unit tests with coverage" $(BIN)/python -m pytest -q -n auto --cov --cov-report=term $(DECIDES)

lint: style types site ## Check format, lint, types and the documentation's links

style: $(INSTALLED)
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .

types: $(INSTALLED)
	$(TIMED) "types" $(BIN)/mypy

site: $(INSTALLED) ## Build the documentation into build/site
	$(TIMED) "the site" env NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

package: $(INSTALLED) ## Build the package into dist/, and use the wheel in an environment of its own
	$(TIMED) "the package" .ci/package.sh $(BIN)/python
	$(SHOWN)

format: $(INSTALLED) ## Format the code
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

models: $(INSTALLED) ## Get the default models
	$(TIMED) "getting the models" $(FETCH) > /dev/null

programs: ## Install what tests need besides Python: a headless browser, PostgreSQL and Bubblewrap
	$(TIMED) "installing programs" .ci/programs.sh

# All that tests need.
prepare: models programs $(LANGGRAPH_DEV)/.installed

install: $(INSTALLED) ## Install into .venv

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("Python 3.11 or newer is needed: make PYTHON=python3.11")'
	@echo "Making $(VENV)"
	@$(PYTHON) -m venv $(VENV)

$(INSTALLED): pyproject.toml | $(BIN)/python
	@echo "Installing into $(VENV) (a few minutes)"
	$(TIMED) "installing" $(BIN)/python .ci/install.py $(EXTRA) $(TORCH_CPU_INDEX)
	@touch $@

# LangGraph's development server needs an older jsonschema-rs than schemathesis, so it is installed in a separate folder.
$(LANGGRAPH_DEV)/.installed: .ci/langgraph-dev.txt | $(INSTALLED)
	$(TIMED) "installing LangGraph's server" $(PIP) install --upgrade --no-deps --target $(LANGGRAPH_DEV) --requirement $<
	@touch $@

clean: ## Remove .venv, caches of tools and builds (models stay in the cache)
	@rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

export Q
