"""Whole texts by the compiled kernels: the reference's tokens in fp32, and within its rounding in 16 bits.

The layers run in the launches that a GPU gets (`fused_layers`), the cache is compacted by the CUDA kernel of csrc/, and
a step is also run as one stream whose launches overlap. Tokens are held against transformers' forward pass in fp64.
"""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.generation import logits_process as lp

from medusa_decoding import MedusaModel, Tree
from medusa_decoding.decode.limits import Limits
from medusa_decoding.decode.prefill import prefill
from medusa_decoding.decode.runtime.memory import Sizes
from medusa_decoding.decode.selection.greedy import Greedy
from medusa_decoding.decode.selection.sampling import Sampling
from medusa_decoding.generation.request import row_seed
from medusa_kernels import _registry, reference

sys.path.append(str(Path(__file__).parents[1] / "decode"))
from models import VOCAB, heads_for, padded, prompts, tiny, transformers_greedy
from oracles import assert_some_accepted, new_tokens

NEW = 12
RATES = [[0.5, 0.2, 0.1, 0.05], [0.4, 0.2, 0.1, 0.05], [0.3, 0.2, 0.1], [0.2, 0.1]]
TREES = {
    "root": Tree([]),
    "chain": Tree.chain(3),
    "64 nodes": Tree.optimal(RATES, 64),
    "dynamic": Tree.dynamic(16, depth=3, top_k=4).with_lookup(2),
}
GQA, MHA = {"num_attention_heads": 4, "num_key_value_heads": 2}, {"num_attention_heads": 2, "num_key_value_heads": 2}
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
slow = pytest.mark.slow


@pytest.fixture(autouse=True)
def nothing_found(machine):
    """No test of this file may leave a finding."""
    before = len(machine.findings)
    yield
    assert list(machine.findings)[before:] == []


def model_of(family, dtype, heads):
    sizes = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 64, "initializer_range": 0.2}
    return tiny(family, dtype=dtype, max_position_embeddings=1024, **sizes, **heads)


def written(model, tree, rows, **settings):
    """Each row's new tokens and the output, with fused layers."""
    ids, mask = padded(rows)
    with MedusaModel(model, heads_for(model), TREES[tree]) as medusa:
        medusa.backbone.choose_layers = lambda captured, **_: setattr(medusa.backbone, "fuse", True)
        output = medusa.generate(ids, mask, max_new_tokens=NEW, **settings)
    if tree != "root":
        assert_some_accepted(output)
    return new_tokens(output, ids.shape[1])


@torch.no_grad()
def following(model, row, text):
    """Logits after the row and after each new token but the last, fp64 [new tokens, V]."""
    return model(torch.cat((row, torch.tensor(text)))[None]).logits[0, len(row) - 1 : -1].double()


def check_tokens(model, rows, texts, drawn=None):
    """Fail if a token is not the exact model's, or in 16 bits not the best within rounding.

    In 16 bits the kernels round no more often than the modules, so no logit may be off by more than the modules' worst
    one, and no token by more than two logits. `drawn` makes scores [new tokens, V] from the logits of a row.
    """
    modules = [following(model, row, text) for row, text in zip(rows, texts, strict=True)]
    dtype = model.dtype
    exact = [following(model.double(), row, text) for row, text in zip(rows, texts, strict=True)]
    for number, (text, plain, logits) in enumerate(zip(texts, modules, exact, strict=True)):
        scores = logits if drawn is None else drawn(logits, number)
        if dtype == FP32:
            assert text == scores.argmax(-1).tolist()
            continue
        bound = 2 * (plain - logits).abs().max()
        taken = scores.gather(1, torch.tensor(text)[:, None])[:, 0]
        assert (scores.amax(-1) - taken).max() <= bound, f"row {number}: more than {bound:.3f} below the best"


# One row of 64 nodes, because PyTorch multiplies more than 64 rows. 420 tokens are so many that keys are divided.
GREEDY = [
    pytest.param("llama", BF16, GQA, "64 nodes", [420], id="llama bf16 gqa 64 nodes"),
    pytest.param("qwen3", FP16, MHA, "chain", [33, 40], id="qwen3 fp16 mha chain"),
    pytest.param("qwen3", BF16, GQA, "root", [33, 1], id="qwen3 bf16 gqa root", marks=slow),
    pytest.param("llama", FP16, MHA, "64 nodes", [12], id="llama fp16 mha 64 nodes", marks=slow),
    pytest.param("llama", FP32, GQA, "64 nodes", [33], id="llama fp32 gqa 64 nodes"),
    pytest.param("qwen3", FP32, MHA, "root", [20, 1], id="qwen3 fp32 mha root", marks=slow),
    pytest.param("qwen3", FP32, GQA, "dynamic", [20, 7], id="qwen3 fp32 gqa dynamic", marks=slow),
    pytest.param("llama", FP32, MHA, "chain", [420], id="llama fp32 mha chain", marks=slow),
]


@pytest.mark.parametrize(("family", "dtype", "heads", "tree", "lengths"), GREEDY)
def test_greedy_text_is_the_model_s_own(machine, family, dtype, heads, tree, lengths):
    model, rows = model_of(family, dtype, heads), prompts(len(lengths), lengths)
    expected = [transformers_greedy(model, row, NEW) for row in rows] if dtype == FP32 else None
    texts = written(model, tree, rows)
    assert expected is None or texts == expected
    check_tokens(model, rows, texts)


# Drawn within the projection to the vocabulary, and from logits by `draw_tokens`.
NUCLEUS = {"top_k": 6, "top_p": 0.8, "min_p": 0.05}
SAMPLED = [
    pytest.param("llama", FP32, GQA, "64 nodes", [9], {"temperature": 0.8}, id="llama fp32 gqa 64 nodes temperature"),
    pytest.param("qwen3", FP32, MHA, "chain", [20, 9], NUCLEUS, id="qwen3 fp32 mha chain nucleus", marks=slow),
    pytest.param("qwen3", BF16, GQA, "64 nodes", [20], {"temperature": 1.5}, id="qwen3 bf16 gqa 64 nodes", marks=slow),
]


@pytest.mark.parametrize(("family", "dtype", "heads", "tree", "lengths", "settings"), SAMPLED)
def test_sampled_text_is_what_the_seed_draws(machine, family, dtype, heads, tree, lengths, settings):
    """The noise is a function of seed, place and token: the reference draws the same tokens from the same logits."""
    model, rows, seed = model_of(family, dtype, heads), prompts(len(lengths), lengths), 5
    texts = written(model, tree, rows, do_sample=True, seed=seed, **settings)
    temperature = settings.get("temperature", 1.0)
    filters = [make(settings[name]) for name, make in FILTERS.items() if name in settings]

    def drawn(logits, row):
        scores = logits / temperature
        for keep in filters:
            scores = keep(None, scores)
        key, first = torch.tensor([row_seed(seed, row)]), torch.zeros(1, dtype=torch.int32)
        # Times the temperature, so that scores differ by as much as logits do.
        return temperature * (scores + reference.gumbel_noise(key, first, len(scores), VOCAB)[0])

    check_tokens(model, rows, texts, drawn)


FILTERS = {"top_k": lp.TopKLogitsWarper, "top_p": lp.TopPLogitsWarper, "min_p": lp.MinPLogitsWarper}


@slow
def test_typical_acceptance_takes_what_the_reference_takes(machine):
    model, rows = model_of("llama", FP32, GQA), prompts(2, [20, 9])
    served = {
        (op, torch.device("cpu")): _registry.Implementation("reference", getattr(reference, op), "")
        for op in _registry.OPS
    }
    typical = {"acceptance": "typical", "posterior_threshold": 0.3, "posterior_alpha": 0.6}
    with mock.patch.dict(_registry._chosen, served):
        expected = written(model, "64 nodes", rows, **typical)
        greedy = written(model, "64 nodes", rows)
    assert expected != greedy, "every accepted draft was the argmax: the test shows nothing"
    assert written(model, "64 nodes", rows, **typical) == expected


class Captured(TorchDispatchMode):
    """Runs a step as a captured graph does: launches of ops in a row overlap, operations of PyTorch stand alone.

    Attributes:
        longest: most ops in a row.
    """

    def __init__(self, machine):
        super().__init__()
        self.machine, self.longest, self.count = machine, 0, 0
        self.stream = contextlib.ExitStack()

    def begin(self):
        self.stream.enter_context(self.machine.stream())

    def end(self):
        self.stream.close()
        self.longest, self.count = max(self.longest, self.count), 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == _registry.NAMESPACE:
            self.count += 1
            op = _registry.served_by(function._schema.name.partition("::")[2], args[0].device)
            with self:  # its host code may run operations of PyTorch
                return op.function(*args, **(kwargs or {}))
        views = any(one.alias_info is not None and not one.alias_info.is_write for one in function._schema.returns)
        if views or "empty" in function._schema.name:
            return function(*args, **(kwargs or {}))
        assert function is not torch.ops.aten._local_scalar_dense.default, "a captured step reads nothing on the host"
        self.end()
        result = function(*args, **(kwargs or {}))
        self.begin()
        return result


def top_4():
    return Sampling([lp.TopKLogitsWarper(4)])


STEPS = [
    pytest.param("llama", BF16, GQA, "64 nodes", Greedy, [420], id="llama bf16 gqa 64 nodes"),
    pytest.param("qwen3", FP16, MHA, "chain", top_4, [20, 9], id="qwen3 fp16 mha chain sampled", marks=slow),
    pytest.param("qwen3", FP32, GQA, "root", Greedy, [20, 9], id="qwen3 fp32 gqa root", marks=slow),
]
SCHEDULES = [
    {"order": 0, "residents": 4, "burst": 30}, {"order": 2, "residents": 6, "burst": 10},
    {"order": 1, "residents": 8, "burst": 100}, {"order": 2, "residents": 16, "burst": 300},
]  # fmt: skip


@pytest.mark.parametrize(("family", "dtype", "heads", "tree", "selector", "lengths"), STEPS)
def test_overlapped_launches_of_a_step_change_no_bit(machine, family, dtype, heads, tree, selector, lengths):
    if machine.settings.sm < 90:
        pytest.skip(f"sm_{machine.settings.sm} has no programmatic launches")
    model, rows = model_of(family, dtype, heads), prompts(len(lengths), lengths)
    with MedusaModel(model, heads_for(model), TREES[tree]) as medusa, torch.no_grad():
        medusa.backbone.choose_layers = lambda captured, **_: setattr(medusa.backbone, "fuse", True)
        step, select = medusa._steps.get(TREES[tree], "eager"), selector()
        limits = Limits([NEW] * len(rows), [0] * len(rows), [VOCAB])
        state = medusa._steps.pool.acquire(Sizes(lengths, NEW), max(lengths) + NEW + 64)
        state.seeds.copy_(torch.arange(len(rows)))
        prefill(medusa.backbone, rows, state, select, limits)
        held = (*state.per_row(), state.step, state.cache.kv)
        before = [tensor.clone() for tensor in held]
        step(state, select, limits)
        expected = [tensor.clone() for tensor in held]
        assert not torch.equal(state.count, before[4]), "the step wrote nothing"
        for seed, schedule in enumerate(SCHEDULES):
            for tensor, kept in zip(held, before, strict=True):
                tensor.copy_(kept)
            captured = Captured(machine)
            with mock.patch.multiple(machine.settings, **schedule, seed=seed):
                captured.begin()
                with captured:
                    step(state, select, limits)
                captured.end()
            # The ops of both layers, seven or more each, without anything in between.
            assert captured.longest >= 14
            assert all(map(torch.equal, held, expected)), schedule
