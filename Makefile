# Everything a developer or CI runs. Each virtual environment is made once; stamps inside it say what is installed.
#
#   make demo            .venv, install, run the main job
#   make test            .venv, editable install, the tests without slow ones  (TESTS=tests/kernels PYTEST_ARGS="-x" JOBS=4)
#   make test-all        every test
#   make test-products   every test with every combination of its parameters
#   make faults          single faults, one at a time, each with the test that must fail for it   (FAULTS=tests/faults/cpp.yaml)
#   make test-emulated   the kernels as compiled for sm_80, 86 and 90, run without a GPU, races looked for 
#   make test-interpreted  the Triton kernels in Triton's interpreter
#   make kernels         the launches of real models compiled for all GPUs; checked
#   make kernels-all     all kernels compiled for sm_80, 86, 89, 90, 100, 120: registers, spills, memory, instructions; checked
#   make sanitize        random cases of the C++ ops under the sanitizers of addresses, undefined behaviour and threads
#   make lint types      ruff, mypy
#   make bench           benchmarks
#   make docs            the documentation site, in site/; warnings are errors
#   make train-demo      new heads for the embedded demo model, in runs/demo   (REQUESTS=64 TRAIN_ARGS="--set ..")
#   make demo-model      a demo model and its heads from nothing, in runs/demo-model   (MODEL_ARGS="--set ..")
#   make smollm2-heads   the heads of the published model, in runs/smollm2   (PROMPTS=FILE CONVERSATIONS=4100)
#   make gpu             tests and benchmarks of a GPU machine  (PY=python3 FORCE=1; stages: gpu-test, gpu-attention, ...)
#   make test-transformers  transformers' documented examples, and a checkout's own tests, with heads  (TRANSFORMERS_SOURCE=DIR)
#   make test-lowest     tests with the lowest transformers we declare
#   make test-clients    clients of other projects against our server, in .venv-clients   (LOAD= leaves out what needs torch)
#   make test-vllm bench-vllm  the plugin in vLLM on a CPU, in .venv-vllm: tests; tokens per second with and without heads
#   make newcomer        the way in, from a clone to own heads used in Python: each command's time
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
BUILD_FILES := pyproject.toml setup.py $(wildcard csrc/*.* csrc/cpu/*)
SOURCES := $(BUILD_FILES) $(shell find medusa_kernels python/medusa_decoding -name _lib -prune -o -name __pycache__ -prune -o -type f -print)
# A development install sees every change of the Python sources, so it serves the demo too.
READY := $(if $(wildcard $(EDITABLE)),$(EDITABLE),$(INSTALLED))
# -I: from the checkout's root, only an isolated interpreter imports the installed package. pip hides what a successful
# build prints, so say here whether the CUDA library is there. -B: an isolated interpreter ignores PYTHONPYCACHEPREFIX, and pip
# would leave the bytecode behind, which then hides the editable install.
SAY_CUDA = @$(BIN)/python -I -B -c "from medusa_kernels import _native; print(_native.why_missing('cuda') or 'the CUDA library was built')"

EMULATED_PARTS := test-emulated-80 test-emulated-86 test-emulated-90 test-emulated-sample

.PHONY: demo test test-all test-products faults test-interpreted test-emulated $(EMULATED_PARTS) test-transformers test-lowest test-clients sanitize lint format types bench docs newcomer wheel-test no-nvcc kernels kernels-all clean
.DELETE_ON_ERROR:

demo: $(READY)
	$(BIN)/medusa demo

include recipes/recipes.mk  # train-demo demo-model smollm2-heads
include benchmarks/gpu.mk  # gpu and its stages, gpu-tune
include integrations/vllm/vllm.mk  # test-vllm bench-vllm

test: $(EDITABLE)
	OMP_NUM_THREADS=1 $(BIN)/pytest -n $(JOBS) --dist worksteal -m "not slow" $(PYTEST_ARGS) $(TESTS)

test-all: $(EDITABLE)
	OMP_NUM_THREADS=1 $(BIN)/pytest -n $(JOBS) --dist worksteal $(PYTEST_ARGS) $(TESTS)

# Every combination of parameters. The others run enough of them that every two values meet (tests/conftest.py).
test-products: $(EDITABLE)
	OMP_NUM_THREADS=1 $(BIN)/pytest -n $(JOBS) --dist worksteal --products $(PYTEST_ARGS) $(TESTS)

# Mistakes that tests must find, one at a time: tests/faults. Half an hour of two cores.
faults: $(EDITABLE)
	$(BIN)/python -m tests.faults.run --jobs $(JOBS) $(FAULTS)

# The kernels in Triton's interpreter, on CPU tensors: every op against its specification, and whole generations.
test-interpreted: $(EDITABLE)
	TRITON_INTERPRET=1 OMP_NUM_THREADS=1 $(BIN)/pytest -n $(JOBS) --dist worksteal $(PYTEST_ARGS) tests/kernels tests/decode/test_fused.py

# The kernels as compiled for GPUs, run by the emulator of PTX in tests/emulator: every op against its specification, whole
# generations, and the launches of real models. `make test-emulated-sample` is what CI runs of it.
OPS := add_rms_norm cross_entropy decode_linear draw_tokens gumbel_noise heads_topk kv_compact rope_append tree_accept tree_attention \
	tree_select tree_verify
OP_TESTS := $(OPS:%=tests/kernels/test_%.py)
EMULATE = PYTHONPATH=tests OMP_NUM_THREADS=1 $(BIN)/pytest -p emulator.plugin --races -n $(JOBS) --dist worksteal $(PYTEST_ARGS)
test-emulated: test-emulated-80 test-emulated-86 test-emulated-90
test-emulated-80: $(EDITABLE)
	$(EMULATE) --sm 80 tests/emulator $(OP_TESTS)
test-emulated-86: $(EDITABLE)
	$(EMULATE) --sm 86 tests/emulator tests/kernels/test_tree_attention.py tests/kernels/test_decode_linear.py
test-emulated-90: $(EDITABLE)
	$(EMULATE) --sm 90 tests/emulator $(OP_TESTS)
test-emulated-sample: $(EDITABLE)
	$(EMULATE) --sm 80 -m "not slow" -k "not cuda and not opcheck and not torch.float16 and not (test_tree_attention and torch.float32)" $(OP_TESTS)
	$(EMULATE) --sm 90 -m "not slow" tests/emulator

# transformers' own: the documented examples of the installed version and, of a checkout of that version's tag, its tests.
TRANSFORMERS_SOURCE ?=
SUITE := $(CURDIR)/tests/transformers_suite
test-transformers: $(EDITABLE)
	OMP_NUM_THREADS=1 $(BIN)/pytest -n $(JOBS) --dist worksteal $(PYTEST_ARGS) tests/transformers_suite
	$(if $(TRANSFORMERS_SOURCE),$(PIP) parameterized && cd "$(TRANSFORMERS_SOURCE)" && OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 \
		PYTHONPATH="$(SUITE):$(CURDIR)/tests/decode:." $(abspath $(BIN))/python -m pytest -q -p checkout -p no:cacheprovider \
		-c /dev/null --rootdir=. -W ignore -k "(generat or beam or assisted or prompt_lookup or left_padding or \
		past_key_values) and not compil and not Integration and not tp_ and not tiny_model" \
		$(foreach family,llama mistral ministral qwen2 qwen3 smollm3 phi3 granite olmo2 olmo3 gemma2 gemma3 mixtral \
		qwen2_moe qwen3_moe,tests/models/$(family)/test_modeling_$(family).py))

# In an environment on top of $(VENV), which has only transformers' lowest version and what it wants instead.
LOWEST_VENV := .venv-lowest
LOWEST := transformers==5.17.0
# Whatever uses transformers for more than making a model.
LOWEST_TESTS := tests/transformers_suite tests/cli/test_template.py tests/training/test_packing.py \
	$(patsubst %,tests/checkpoints/test_%.py,base_revision gguf one_loader) \
	$(patsubst %,tests/decode/test_%.py,attention custom_generate custom_generate_surface families from_pretrained greedy lora \
	model_cache processors quantised recording_hooks stopping tensor_parallel transformers_surface unsupported)
test-lowest: $(LOWEST_VENV)/.installed
	OMP_NUM_THREADS=1 $(LOWEST_VENV)/bin/python -m pytest -n $(JOBS) --dist worksteal $(PYTEST_ARGS) $(if $(TESTS:tests=),$(TESTS),$(LOWEST_TESTS))

$(LOWEST_VENV)/.installed: $(EDITABLE)
	$(BIN)/python -m venv $(LOWEST_VENV)
	$(LOWEST_VENV)/bin/python -c "from sysconfig import get_path; below = get_path('purelib', vars={'base': '$(abspath $(VENV))'}); \
		open(get_path('purelib') + '/below.pth', 'w').write(f'import site; site.addsitedir({below!r})')"
	$(PIP:$(BIN)/%=$(LOWEST_VENV)/bin/%) $(LOWEST)
	@touch "$@"

# Clients of the server that other projects write, in an environment of their own, with a table of what works at the end.
# LOAD=1 adds guidellm, which needs torch. Bytecode is cached, because each command line starts Python again.
CLIENTS_VENV ?= .venv-clients
LOAD ?= 1
CLIENTS := tests/clients
CLIENTS_STAMP := $(CLIENTS_VENV)/.installed$(if $(LOAD),-load)
CLIENTS_PIP := $(PIP:$(BIN)/%=$(CLIENTS_VENV)/bin/%)
test-clients: $(READY) $(CLIENTS_STAMP)
	PYTHONDONTWRITEBYTECODE= MEDUSA_PYTHON="$(abspath $(BIN))/python" $(CLIENTS_VENV)/bin/pytest $(CLIENTS) \
		$(if $(LOAD),,--ignore $(CLIENTS)/test_guidellm.py) $(PYTEST_ARGS)

$(CLIENTS_STAMP): $(wildcard $(CLIENTS)/*.txt)
	$(PYTHON) -m venv $(CLIENTS_VENV)
	$(if $(LOAD),$(CLIENTS_PIP) $(TORCH))
	$(CLIENTS_PIP) -c $(CLIENTS)/constraints.txt -r $(CLIENTS)/requirements.txt $(if $(LOAD),-r $(CLIENTS)/requirements-load.txt)
	@touch "$@"

# The library is compiled with each sanitizer and a driver in C++: two minutes on two cores, less when compiled before.
sanitize: $(EDITABLE)
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python tests/kernels/sanitize_cpu.py

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

docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

$(VENV)/.docs: $(EDITABLE)
	$(PIP) -e ".[docs]"
	@touch "$@"

# Without a GPU: registers, spills, shared memory and instructions of the launches of whole steps of real models on every GPU,
# how many multiprocessors they leave idle, and the kernels that these steps do not launch.
kernels: $(EDITABLE)
	$(BIN)/python -m benchmarks.grids
	$(BIN)/python -m benchmarks.inspection --arch 80 --arch 90 --only draw_tokens gumbel_noise tree_select

# All forms for all targets.
kernels-all: $(EDITABLE)
	$(BIN)/python -m benchmarks.inspection

newcomer:
	.ci/newcomer $(PYTHON) "$(TORCH)"

wheel-test: $(EDITABLE)
	.ci/wheel-test $(BIN)/python "$(TORCH)" $(TRANSFORMERS)

no-nvcc: $(TORCH_STAMP)
	.ci/no-nvcc $(BIN)/python

clean:
	rm -rf build dist *.egg-info .venv .venv-lowest .venv-clients $(VLLM_VENV) medusa_kernels/_lib

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
