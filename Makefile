# Everything a developer or CI runs. Each virtual environment is made once; stamps inside it say what is installed.
#
#   make demo            .venv, install, run the main job
#   make test            .venv, editable install, tests         (TESTS=tests/kernels PYTEST_ARGS="-x" JOBS=4)
#   make lint types      ruff, mypy
#   make bench           benchmarks
#   make test-lowest     tests with the lowest transformers we declare
#   make wheel-test      sdist -> wheel -> a fresh environment away from the checkout
#   make no-nvcc         what an install says and does without nvcc

PYTHON ?= python3
VENV ?= .venv
# Arguments of pip: for CPU-only wheels on Linux, TORCH="torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu"
TORCH ?= torch==2.13.0
# Empty, or a pin such as transformers==5.17.0
TRANSFORMERS ?=
TESTS ?= tests
JOBS ?= 2
PYTEST_ARGS ?=
PIP_FLAGS ?=

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check -q $(PIP_FLAGS)
PIN := $(subst =,,$(TRANSFORMERS))
TORCH_STAMP := $(VENV)/.torch
INSTALLED := $(VENV)/.installed$(PIN)
EDITABLE := $(VENV)/.editable$(PIN)
BUILD_FILES := pyproject.toml setup.py $(wildcard csrc/*)
SOURCES := $(BUILD_FILES) $(shell find medusa_kernels python/medusa_decoding -name _lib -prune -o -name __pycache__ -prune -o -type f -print)
# A development install sees every change of the Python sources, so it serves the demo too.
READY := $(if $(wildcard $(EDITABLE)),$(EDITABLE),$(INSTALLED))
# -I: from the checkout's root, only an isolated interpreter imports the installed package. pip hides what a successful
# build prints, so say here whether the CUDA library is there.
SAY_CUDA = @$(BIN)/python -I -c "from medusa_kernels import _native; print(_native.why_missing('cuda') or 'the CUDA library was built')"

.PHONY: demo test test-lowest lint format types bench wheel-test no-nvcc clean
.DELETE_ON_ERROR:

demo: $(READY)
	$(BIN)/medusa demo

test: $(EDITABLE)
	OMP_NUM_THREADS=1 $(BIN)/pytest -n $(JOBS) $(PYTEST_ARGS) $(TESTS)

test-lowest:
	$(MAKE) test VENV=.venv-lowest TRANSFORMERS=transformers==5.17.0 PIP_FLAGS=--no-compile

lint: $(EDITABLE)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(EDITABLE)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(EDITABLE)
	$(BIN)/mypy

bench: $(EDITABLE)
	$(BIN)/pytest benchmarks/ --benchmark-only $(PYTEST_ARGS)

wheel-test: $(EDITABLE)
	.ci/wheel-test $(BIN)/python "$(TORCH)" $(TRANSFORMERS)

no-nvcc: $(TORCH_STAMP)
	.ci/no-nvcc $(BIN)/python

clean:
	rm -rf build dist *.egg-info .venv .venv-lowest medusa_kernels/_lib

$(TORCH_STAMP):
	$(PYTHON) -m venv $(VENV)
	$(PIP) $(TORCH)
	@touch "$@"

$(INSTALLED): $(TORCH_STAMP) $(SOURCES)
	$(PIP) . $(TRANSFORMERS)
	$(SAY_CUDA)
	@touch "$@"

$(EDITABLE): $(TORCH_STAMP) $(BUILD_FILES)
	$(PIP) -e ".[dev]" $(TRANSFORMERS)
	$(SAY_CUDA)
	@touch "$@"
