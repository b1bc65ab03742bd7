# `make demo` and `make test` do all the set-up. `make test-gpu` uses the machine's own python3, torch and Triton, and no network.
VENV := .venv
PYTHON ?= $(VENV)/bin/python
SOURCES := $(shell find csrc -type f) setup.py pyproject.toml

.PHONY: venv demo test test-slow test-rest test-gpu bench-cpu check clean

venv: $(VENV)/.installed

# torch is pinned: an open range may fetch a build of several GB more. The second install builds against what the first one brought.
$(VENV)/.torch:
	python3 -m venv $(VENV)
	$(VENV)/bin/python -m pip install -q "torch==2.13.*" "setuptools>=77" numpy "triton==3.9.*"
	touch $@

$(VENV)/.installed: $(VENV)/.torch $(SOURCES)
	$(VENV)/bin/python -m pip install -q --no-build-isolation -e ".[test]"
	touch $@

demo: venv
	$(PYTHON) -m moelora_ops.cli demo

# Two processes side by side: what Triton's interpreter and transformers take is half of the time.
SLOW := $(wildcard tests/test_triton_*.py) tests/transformers

test: venv
	$(MAKE) --no-print-directory -j2 test-slow test-rest

test-slow:
	$(PYTHON) -m pytest -q -m "not gpu" $(SLOW)

test-rest:
	$(PYTHON) -m pytest -q -m "not gpu" $(addprefix --ignore=,$(SLOW))

test-gpu:
	python3 -m pip install -q --no-build-isolation --no-deps --no-index -e .
	python3 -m pytest -q -m gpu tests/gpu

bench-cpu: venv
	$(VENV)/bin/python -m pip install -q --no-build-isolation -e ".[bench]"
	$(PYTHON) -m benchmarks.cpu

check: venv
	$(VENV)/bin/python -m pip install -q ruff mypy
	$(PYTHON) -m ruff check .
	$(PYTHON) -m mypy

clean:
	rm -rf $(VENV) build *.egg-info moelora_ops/*.so
