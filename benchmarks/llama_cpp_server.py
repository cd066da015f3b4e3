"""llama.cpp's HTTP server for `bench_published`: its files of a model, its process and one request.

The server is that of the package `xllamacpp`, in an interpreter of its own, so that it needs nothing of this project's
environment. `gguf` writes a file's weights in another type.
"""

from __future__ import annotations

import http.client
import json
import os
import subprocess
import time
from pathlib import Path
from typing import Any

from benchmarks.ablations.measuring import Written

# Arguments: file, rows of the cache, threads, whether to draft from n-grams, whether to keep keys and values in fp32.
_SERVE = """
import sys, threading
import xllamacpp as x
params = x.CommonParams()
params.model.path = sys.argv[1]
rows, threads, draft, exact = map(int, sys.argv[2:])
params.n_ctx, params.n_parallel = rows, 1
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
params.fit_params = params.ctx_shift = params.ui = False
params.cache_ram_mib = params.port = 0
params.verbosity, params.endpoint_slots = 1, False
if draft:
    params.speculative.types = [x.common_speculative_type.COMMON_SPECULATIVE_TYPE_NGRAM_SIMPLE]
if exact:  # flash attention adds up in fp16
    params.cache_type_k = params.cache_type_v = x.ggml_type.GGML_TYPE_F32
    params.flash_attn_type = x.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
server = x.Server(params)
print("ready", x.__version__, server.listening_address, flush=True)
threading.Event().wait()
"""


def version(python: str) -> str | None:
    """Return the version of xllamacpp that an interpreter imports, or None."""
    code = "import xllamacpp; print(xllamacpp.__version__)"
    found = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
    return found.stdout.strip() if found.returncode == 0 else None


def rewrite(source: Path, path: Path, layers: str, lm_head: str) -> None:
    """Write a GGUF file again with its weights in other types, such as "F32", "BF16" or "Q8_0"; the rest stays."""
    import gguf

    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(path, reader.fields["general.architecture"].contents())
    for field in reader.fields.values():
        if not field.name.startswith("GGUF.") and field.name not in ("general.architecture", "general.file_type"):
            writer.add_key_value(field.name, field.contents(), field.types[0], field.types[-1])
    for tensor in reader.tensors:
        weights = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        outer = lm_head if tensor.name in ("output.weight", "token_embd.weight") else layers
        kind = gguf.GGMLQuantizationType["F32" if weights.ndim == 1 else outer]
        writer.add_tensor(tensor.name, gguf.quants.quantize(weights, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


class Server:
    """A server of one GGUF file, in a process of its own.

    Args:
        python: an interpreter that has xllamacpp.
        file: the model.
        rows: of its cache.
        threads: of the computation.
        draft: whether to draft from n-grams of the text, with llama.cpp's own settings.
        exact: keep keys and values in fp32 and leave out flash attention.
    """

    def __init__(self, python: str, file: Path, rows: int, threads: int, draft: bool, exact: bool) -> None:
        arguments = [str(file), *(str(int(value)) for value in (rows, threads, draft, exact))]
        self._process = subprocess.Popen(
            [python, "-c", _SERVE, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": str(threads)},
        )
        assert self._process.stdout is not None
        line = next((line for line in self._process.stdout if line.startswith("ready ")), None)
        if line is None:
            raise RuntimeError(f"llama.cpp: expected a server of {file.name}, got none: {self._process.wait()}")
        self._address = line.split("://")[1].strip()

    def cpu_seconds(self) -> float:
        """Return the processor time of the process so far, in steps of 10 ms."""
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def answer(self, ids: list[int], new_tokens: int) -> tuple[Written, float]:
        """Return a greedy text, an EOS token included, and its CPU seconds; no keys of earlier prompts are used."""
        settings: dict[str, Any] = {"n_predict": new_tokens, "top_k": 1, "temperature": 0, "repeat_penalty": 1}
        settings |= {"prompt": ids, "cache_prompt": False, "return_tokens": True}
        before, start = self.cpu_seconds(), time.perf_counter()
        connection = http.client.HTTPConnection(self._address)
        connection.request("POST", "/completion", json.dumps(settings), {"Content-Type": "application/json"})
        found = json.loads(connection.getresponse().read())
        seconds = time.perf_counter() - start
        connection.close()
        return Written(found["tokens"], seconds, 0, 0), self.cpu_seconds() - before

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.wait()
