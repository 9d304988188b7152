PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
# A tenth of pip's time for so many packages; torch stays with pip, which knows where this machine has one.
UV := $(BIN)/python -m uv pip install --quiet --python $(BIN)/python -c constraints.txt
PACKAGES := $(notdir $(patsubst %/,%,$(dir $(wildcard plugins/*/*/__init__.py))))
PLUGINS := $(foreach plugin,$(wildcard plugins/*),-e $(plugin))
# One more than processors: the reliability suites wait for deadlines now and then. Other packages' plugins of pytest
# take seconds to import, and none of them is used.
WORKERS := $(shell expr $$(getconf _NPROCESSORS_ONLN) + 1)
READY := $(VENV)/.ready
TEST_READY := $(VENV)/.ready-test

# Debian's packages come while pip's do.
MAKEFLAGS += -j2

.PHONY: demo test lint gpu-test soak bench browser clean

demo: $(READY)
	$(BIN)/engine generate "What is the capital of France?"

test: lint browser
	$(BIN)/python -m pytest -q -n $(WORKERS) --dist worksteal --disable-plugin-autoload -p xdist.plugin

lint: $(TEST_READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy $(foreach package,hookline hookline_kernels $(PACKAGES),-p $(package))

gpu-test: $(TEST_READY)
	TRITON_INTERPRET=0 $(BIN)/python -m pytest -q -m gpu

soak: $(TEST_READY)
	$(BIN)/python -m tests.suites --tier 2 --lanes

bench: $(READY)
	$(BIN)/python benchmarks/cpu.py

# The web page's tests skip where there is no Chromium, so that a failure here fails nothing.
browser:
	@command -v chromium >/dev/null || ! command -v apt-get >/dev/null || [ "$$(id -u)" != 0 ] \
		|| { apt-get update -qq; apt-get install -y -qq chromium >/dev/null; } || true

$(READY): pyproject.toml constraints.txt plugins/*/pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(PIP) torch uv
	$(UV) -e ".[serve]" $(PLUGINS) || $(PIP) -e ".[serve]" $(PLUGINS)
	touch $(READY)

$(TEST_READY): $(READY)
	$(UV) -e ".[serve,test,clients]" || $(PIP) -e ".[serve,test,clients]"
	touch $(TEST_READY)

clean:
	rm -rf $(VENV) build dist
