"""Which implementation of an op is used, the log line that names it, and the ops under torch.compile."""

from __future__ import annotations

import inspect
import logging
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

import medusa_kernels as mk
from medusa_kernels import _registry, reference, selftest
from medusa_kernels._registry import OPS, Implementation, served_by


@pytest.fixture(autouse=True)
def _choices_made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_registry, "_chosen", {})
    monkeypatch.setattr(_registry, "_choosers", dict(_registry._choosers))


@pytest.mark.parametrize("op", OPS)
def test_every_form_of_an_op_names_the_arguments_of_the_public_function(op: str) -> None:
    """The schema is inferred from this one signature."""
    functions = [getattr(reference, op), *(served_by(op, device).function for device in ("cpu", "cuda"))]
    if op not in ("kv_compact", "decoder_layers"):  # one is CUDA C++, the other made of other ops on a GPU
        functions.append(getattr(pytest.importorskip(f"medusa_kernels._triton.{op}"), op))
    wanted = [(p.name, p.kind, p.default) for p in inspect.signature(getattr(mk, op)).parameters.values()]
    for function in functions:
        assert [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()] == wanted
    schema = getattr(torch.ops.medusa_kernels, op).default._schema
    assert [(a.name, a.kwarg_only) for a in schema.arguments] == [(n, k is k.KEYWORD_ONLY) for n, k, _ in wanted]


MUTATED = {
    "decoder_layers": ["kv"],
    "kv_compact": ["kv"],
    "rope_append": ["k_cache", "v_cache"],
    "tree_accept": ["lengths", "root", "state_hidden", "output", "count", "finished", "log", "report"],
}


@pytest.mark.parametrize("op", OPS)
def test_the_schema_tells_which_arguments_are_written(op: str) -> None:
    schema = getattr(torch.ops.medusa_kernels, op).default._schema
    assert [a.name for a in schema.arguments if a.alias_info and a.alias_info.is_write] == MUTATED.get(op, [])
    assert "SymInt" not in str(schema)


def test_each_gpu_of_a_machine_gets_its_own_implementation(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A GPU too old for the kernels next to one that runs them, in either order of calls."""
    caplog.set_level(logging.INFO, logger="medusa_kernels")
    capabilities = {0: (7, 5), 1: (8, 0)}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capabilities[torch.device(device).index])
    names = {device: served_by("tree_verify", device).name for device in ("cuda:1", "cuda:0", "cuda")}
    assert names == {"cuda:1": "triton", "cuda:0": "linear", "cuda": "triton"}
    assert served_by("tree_verify", "cuda:0").reason == "Triton kernels need compute capability 8.0, got (7, 5)"
    assert [record.getMessage().split(" (")[0] for record in caplog.records] == [
        "tree_verify on cuda:1: triton",
        "tree_verify on cuda:0: linear",
    ]


def test_a_call_is_served_by_its_tensors_device(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = {}
    monkeypatch.setattr(_registry.LIBRARY, "impl", lambda op, function, key: kernels.update({key: function}))
    _registry.serve("kv_compact", "cuda", lambda device: Implementation("mine", lambda x: str(device), "for this test"))
    for index in (1, 0, 1):
        assert kernels["CUDA"](types.SimpleNamespace(device=torch.device("cuda", index))) == f"cuda:{index}"


@pytest.mark.gpu
def test_every_op_is_right_on_every_gpu() -> None:
    """Also on those that are not the current one."""
    results = [result for index in range(torch.cuda.device_count()) for result in selftest.run(f"cuda:{index}")]
    assert [f"{result.op} on {result.device}" for result in results if not result.passed] == []
    assert len(results) == torch.cuda.device_count() * len(OPS)


def test_an_empty_batch_gives_empty_results(device: str) -> None:
    lens, depths = (torch.zeros(n, dtype=torch.int32, device=device) for n in (0, 3))
    q, table, cache = (torch.zeros(*n, 8, device=device) for n in ((0, 3, 2), (0, 9), (4, 2, 9)))
    hidden, w1, words = q.flatten(2), torch.zeros(2, 16, 16, device=device), depths.long()[:, None] + 1
    weight = torch.zeros(20, 16, device=device)
    results = (
        mk.tree_attention(q, cache, cache, lens, words, slots=lens),
        mk.rope_append(q, q, q, table, table, cache, cache, lens, depths, slots=lens),
        *mk.tree_verify(hidden, weight, hidden[..., 0].long(), depths),
        *mk.heads_topk(hidden[:, 0], w1, None, weight, 5),
    )
    assert [tuple(result.shape) for result in results] == [(0, 3, 2, 8)] * 2 + [(0, 3)] * 4 + [(0, 2, 5)] * 2


def test_importing_the_kernels_imports_no_transformers() -> None:
    code = "import sys, medusa_kernels; sys.exit('transformers' in sys.modules)"
    root = str(Path(mk.__file__).parents[1])
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
