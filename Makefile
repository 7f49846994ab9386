# make demo: watch the bundled model answer in 4 bits. make test: the whole test suite. Both install into .venv first.
VENV ?= .venv
PYTHON_BIN = "$(VENV)/bin/python"
# Targets lie in the same folder; make wants the spaces of a path escaped.
space := $() $()
STAMPS := $(subst $(space),\ ,$(VENV))

.PHONY: demo test lint

demo: $(STAMPS)/.demo
	$(PYTHON_BIN) -m redraft demo

test: $(STAMPS)/.dev lint
	$(PYTHON_BIN) -m pytest -n auto --dist worksteal

lint: $(STAMPS)/.dev
	$(PYTHON_BIN) -m ruff check redraft recipes tests
	$(PYTHON_BIN) -m ruff format --check redraft recipes tests
	$(PYTHON_BIN) -m mypy

$(STAMPS)/.demo: pyproject.toml requirements/cpu.txt scripts/setup.sh
	scripts/setup.sh "$(VENV)" plot
	touch "$@"

$(STAMPS)/.dev: pyproject.toml requirements/cpu.txt scripts/setup.sh
	scripts/setup.sh "$(VENV)" dev
	touch "$@" "$(VENV)/.demo"
