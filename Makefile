PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test lint gpu-test bench clean

demo: $(READY)
	$(BIN)/engine generate "What is the capital of France?"

test: lint
	$(BIN)/python -m pytest -q -n auto

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy -p hookline -p hookline_kernels
	$(BIN)/mypy -p hookline_llama -p hookline_mixtral -p hookline_qwen2_moe -p hookline_glm5_2_mtp

gpu-test: $(READY)
	TRITON_INTERPRET=0 $(BIN)/python -m pytest -q -m gpu

bench: $(READY)
	$(BIN)/python benchmarks/cpu.py

$(READY): pyproject.toml constraints.txt plugins/*/pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
		-e ".[test]" $(foreach plugin,$(wildcard plugins/*),-e $(plugin))
	touch $(READY)

clean:
	rm -rf $(VENV) build dist
