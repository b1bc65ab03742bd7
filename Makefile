# `make demo` and `make test` do all the set-up. On a machine with its own torch and no network: `make test-gpu PYTHON=python3`.
VENV := .venv
PYTHON ?= $(VENV)/bin/python
SOURCES := $(shell find csrc -type f) setup.py pyproject.toml

.PHONY: venv demo test test-gpu bench-cpu check clean

venv: $(VENV)/.installed

# CPU torch is pinned: an open range would fetch a CUDA build of several GB. The second install reuses what the first one brought.
$(VENV)/.torch: pyproject.toml
	python3 -m venv $(VENV)
	$(VENV)/bin/python -m pip install -q "torch==2.13.*" "setuptools>=77" numpy "triton==3.9.*"
	touch $@

$(VENV)/.installed: $(VENV)/.torch $(SOURCES)
	$(VENV)/bin/python -m pip install -q --no-build-isolation -e ".[test]"
	touch $@

demo: venv
	$(PYTHON) -m moelora_ops.cli demo

test: venv
	$(PYTHON) -m pytest -q -m "not gpu"

# Uses what the machine has installed: python3 with a CUDA torch, Triton, nvcc.
test-gpu:
	python3 -m pip install -q --no-build-isolation --no-deps --no-index -e .
	python3 -m pytest -q -m gpu tests/gpu

bench-cpu: venv
	$(VENV)/bin/python -m pip install -q -e ".[bench]" --no-build-isolation
	$(PYTHON) -m benchmarks.cpu

clean:
	rm -rf $(VENV) build *.egg-info moelora_ops/*.so
