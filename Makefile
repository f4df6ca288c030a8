# Everything starts from Python >= 3.11 and make; each target makes what it needs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
OLDEST_LIGHTNING := 2.6.1
# Most tests wait for processes; three at once keep two cores busy.
TEST_WORKERS ?= 3

.PHONY: help venv quickstart test lint format soak contract benchmarks clean

help:  ## Show the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

venv: $(READY)  ## Make .venv with the tested versions and all extras

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "lightning_air needs Python 3.11 or newer, found " + sys.version.split()[0] + ". Name one with: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[all]'
	touch $(READY)

quickstart: venv  ## Train the small GPT of recipes/quickstart.py on two CPU processes
	$(BIN)/python recipes/quickstart.py

test: venv contract  ## Run the tests
	$(BIN)/python -m pytest -m "not soak" --numprocesses $(TEST_WORKERS) --dist loadfile

contract: venv .oldest/.ready  ## Check our overrides against the oldest Lightning that we claim
	PYTHONPATH=.oldest $(BIN)/python -m pytest -q tests/test_lightning_contract.py

.oldest/.ready: $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade --target .oldest lightning==$(OLDEST_LIGHTNING)
	touch .oldest/.ready

soak: venv  ## Run the long tests
	$(BIN)/python -m pytest -m soak

lint: venv  ## Run ruff, mypy and import-linter
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: venv  ## Format the code and fix what ruff can fix
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

benchmarks: venv  ## Run every benchmark and print its ratios
	for file in $(patsubst benchmarks/%.py,%,$(wildcard benchmarks/[a-z]*.py)); do $(BIN)/python -m benchmarks.$$file || exit 1; done

clean:  ## Remove what the other targets made
	rm -rf $(VENV) .oldest quickstart_output build dist
