# make demo: watch the bundled model answer in 4 bits. make test: the whole test suite. Both install into .venv first.
VENV ?= .venv
PYTHON_BIN = $(VENV)/bin/python

.PHONY: demo test lint

demo: $(VENV)/.demo
	$(PYTHON_BIN) -m redraft demo

test: $(VENV)/.dev lint
	$(PYTHON_BIN) -m pytest -n auto --dist worksteal

lint: $(VENV)/.dev
	$(PYTHON_BIN) -m ruff check redraft recipes tests
	$(PYTHON_BIN) -m ruff format --check redraft recipes tests
	$(PYTHON_BIN) -m mypy

$(VENV)/.demo: pyproject.toml requirements/cpu.txt scripts/setup.sh
	scripts/setup.sh $(VENV) plot
	touch $@

$(VENV)/.dev: pyproject.toml requirements/cpu.txt scripts/setup.sh
	scripts/setup.sh $(VENV) dev
	touch $@ $(VENV)/.demo
