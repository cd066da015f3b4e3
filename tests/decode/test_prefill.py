"""Long prompts in chunks, and prompts that begin with what the cache holds: the same keys, values and text."""

import functools
import itertools
import logging
import re
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from models import FAMILIES, heads_for, padded, prompts, rope, tiny, transformers_greedy
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache

from medusa_decoding import MedusaModel, Tree
from medusa_decoding.backbone import prefill_attention
from medusa_decoding.backbone.attention_swap import DecodeContext
from medusa_decoding.backbone.backbone import Backbone
from medusa_decoding.backbone.fused_layers import NativeLayers
from medusa_decoding.cli import doctor
from medusa_decoding.decode.limits import Limits
from medusa_decoding.decode.prefill import PREFILL_CHUNK, prefill
from medusa_decoding.decode.runtime.memory import Sizes
from medusa_decoding.decode.selection.greedy import Greedy
from medusa_kernels import ancestor_words, tree_attention
from medusa_kernels._native import why_missing

NEW = 12
# Around the boundaries of chunks of 1, 3 and 5 tokens per row, the shortest and the longest in the middle.
LENGTHS = [5, 10, 1, 24, 6, 15, 16, 4]
WIDTHS = (1, 3, 5)


def window(size):
    return {"use_sliding_window": True, "sliding_window": size, "max_window_layers": 1, "num_hidden_layers": 3}


YARN = rope("yarn", factor=4.0, original_max_position_embeddings=8)
VARIANTS = {
    **{family: (family, {}) for family in FAMILIES},
    **{f"mistral window {size}": ("mistral", {"sliding_window": size}) for size in (4, 23)},
    "qwen2 window 9 in some layers": ("qwen2", window(9)),
    "multi-query": ("llama", {"num_key_value_heads": 1}),
    "yarn rope": ("qwen3", YARN),
    "dynamic rope": ("llama", {"max_position_embeddings": 8, **rope("dynamic", factor=4.0)}),
}
variants = pytest.mark.parametrize(("family", "overrides"), VARIANTS.values(), ids=VARIANTS.keys())


def as_nodes(backbone, batch, tokens):
    """Takes the place of `Backbone.prefill_nodes`, before any generation has chosen how layers run."""
    backbone.native = NativeLayers(backbone.decoder)
    return min(tokens, 64 // batch)


def flash_attn_func(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1)):
    """What flash-attn's README says, in fp64: "causal" is aligned at the lower right, windows include both ends."""
    assert q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
    assert dropout_p == 0
    assert k.shape[0] == q.shape[0]
    groups, before = q.shape[2] // k.shape[2], k.shape[1] - q.shape[1]
    keys, values = (tensor.double().repeat_interleave(groups, 2) for tensor in (k, v))
    left, right = window_size[0], 0 if causal else window_size[1]
    visible = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool)
    for query, row in enumerate(visible):
        own = query + before
        row[: max(own - left, 0) if left >= 0 else 0] = False
        row[own + right + 1 if right >= 0 else len(row) :] = False
    scores = torch.einsum("bthd,bshd->bhts", q.double(), keys) * softmax_scale
    probs = scores.masked_fill(~visible, -torch.inf).softmax(-1)
    return torch.einsum("bhts,bshd->bthd", probs, values).to(q.dtype)


@pytest.fixture
def fresh():
    """What serves prefill is chosen anew, in this test and after it."""
    prefill_attention.served_by.cache_clear()
    yield
    prefill_attention.served_by.cache_clear()


def install(monkeypatch, name, **functions):
    """Put a package with these functions in the place of flash-attn's."""
    module = ModuleType(name)
    vars(module).update(functions)
    monkeypatch.setitem(sys.modules, name, module)


def chosen(dtype=torch.bfloat16, head_dim=16):
    return prefill_attention.served_by(torch.device("cpu"), dtype, head_dim)


@pytest.fixture(params=["here", "as on a GPU", "flash on a GPU", "as nodes"])
def way(request, monkeypatch):
    """All ways to attend after the first chunk and to run the last layer, on this machine's CPU."""
    if request.param == "as nodes" and why_missing("cpu"):
        pytest.skip(f"no C++ ops: {why_missing('cpu')}")
    nodes = as_nodes if request.param == "as nodes" else lambda backbone, batch, tokens: 0
    monkeypatch.setattr(Backbone, "prefill_nodes", nodes)
    if request.param == "as on a GPU":
        monkeypatch.setattr(Backbone, "can_hold_last", False)
        monkeypatch.setattr(prefill_attention, "_prefill_by_mask", prefill_attention._prefill_by_chains)
    if request.param == "flash on a GPU":
        request.getfixturevalue("fresh")
        monkeypatch.setattr(Backbone, "can_hold_last", False)
        install(monkeypatch, "flash_attn", flash_attn_func=flash_attn_func)
        monkeypatch.setattr(prefill_attention, "flash_kernel", lambda q: chosen(q.dtype, q.shape[-1]).flash)
        assert chosen(torch.float32).name == "flash-attn 2"


def greedy(batch, new=NEW):
    return Greedy(), Limits([new] * batch, [0] * batch, [])


def acquire(medusa, lengths, rows=64, new=NEW):
    """A state whose cache is filled with NaN, so that reading before writing is noticed."""
    state = medusa._steps.pool.acquire(Sizes(lengths, new), rows)
    state.cache.kv.fill_(torch.nan)
    return state


def forward(make, rows):
    """Each row alone through transformers in one pass: last hidden state [H], keys and values [L, 2, Hkv, T, D]."""
    found = []
    for row in rows:
        model, cache = make(), DynamicCache()  # without a config, sliding layers also keep everything
        with torch.no_grad():
            out = model.model(row[None].to(model.device), None, None, cache, use_cache=True)
        kv = torch.stack([torch.stack([layer.keys[0], layer.values[0]]) for layer in cache.layers])
        found.append((out.last_hidden_state[0, -1].cpu(), kv.cpu()))
    return found


def distance(ones, others):
    """The largest difference of hidden states, and of keys and values."""
    return tuple(
        max((a[i].double() - b[i]).abs().max().item() for a, b in zip(ones, others, strict=True)) for i in (0, 1)
    )


def agreement(make, rows, dtype=torch.float32, device="cpu"):
    """A check of a state's rows: at most twice as far from fp64 as transformers' own forward, plus one rounding."""
    exact, theirs = forward(lambda: make().double(), rows), forward(lambda: make().to(device), rows)
    bounds = distance(theirs, exact)
    largest = [max(found[i].abs().max().item() for found in exact) for i in (0, 1)]

    def check(state):
        kv = state.cache.kv.cpu()
        got = [(state.hidden[b].cpu(), kv[:, :, b, :, : len(row)]) for b, row in enumerate(rows)]
        for error, bound, most in zip(distance(got, exact), bounds, largest, strict=True):
            assert error <= 2 * bound + torch.finfo(dtype).eps * most

    return check


@variants
def test_chunks_write_the_same_cache_as_one_pass(family, overrides, way):
    rows = prompts(len(LENGTHS), LENGTHS)
    make = functools.partial(tiny, family, **overrides)
    agrees = agreement(make, rows)
    with MedusaModel(make()) as medusa, torch.no_grad():
        for width in WIDTHS:
            state = acquire(medusa, LENGTHS)
            prefill(medusa.backbone, rows, state, *greedy(len(rows)), chunk=width * len(rows))
            assert state.cache.lengths.tolist() == LENGTHS
            assert state.cache.kv[..., max(LENGTHS) :, :].isnan().all()
            agrees(state)


@pytest.mark.parametrize(
    ("chunk", "passes"),
    [(100, [(3, 7, 0)]), (21, [(3, 7, 0)]), (20, [(3, 6, 0), (3, 1, 6)]), (2, [(3, 1, i) for i in range(7)])],
)
def test_rows_share_a_chunk(monkeypatch, chunk, passes):
    rows, seen = prompts(3, [7, 2, 6]), []
    with MedusaModel(tiny()) as medusa, torch.no_grad():
        forward = medusa.backbone.forward

        def recorded(tokens, context):
            seen.append((*tokens.shape, context.offset))
            assert context.cache.lengths.tolist() == [context.offset] * 3
            return forward(tokens, context)

        monkeypatch.setattr(medusa.backbone, "forward", recorded)
        prefill(medusa.backbone, rows, acquire(medusa, [7, 2, 6]), *greedy(3), chunk=chunk)
    assert seen == passes


@variants
def test_the_last_layer_runs_for_the_last_tokens_alone(family, overrides, monkeypatch):
    """Where all rows end in one chunk; the one before it only appends."""
    rows, seen = prompts(3, [7, 5, 6]), []
    make = functools.partial(tiny, family, **overrides)
    agrees = agreement(make, rows)
    with MedusaModel(make()) as medusa, torch.no_grad():
        last = medusa.backbone.decoder.layers[-1]
        forward = type(last.mlp).forward

        def recorded(mlp, hidden):
            if mlp is last.mlp:
                seen.append(hidden.shape[:2])
            return forward(mlp, hidden)

        monkeypatch.setattr(type(last.mlp), "forward", recorded)
        state = acquire(medusa, [7, 5, 6])
        prefill(medusa.backbone, rows, state, *greedy(3), chunk=12)
        assert seen == [(3, 1)]
        agrees(state)


@pytest.mark.parametrize(
    ("dtype", "supported", "rows", "tokens", "passes"),
    [
        (torch.float32, True, 1, 128, [(1, 128, "nodes")]),
        (torch.float32, True, 3, 43, [(3, 43, "modules")]),
        (torch.float32, True, 1, 1010, [(1, 1000, "modules"), (1, 10, "nodes")]),
        (torch.bfloat16, True, 1, 130, [(1, 130, "modules")]),
        (torch.bfloat16, False, 3, 130, [(3, 42, "nodes")] * 3 + [(3, 4, "nodes")]),
        (torch.bfloat16, False, 129, 8, [(129, 7, "modules"), (129, 1, "modules")]),
    ],
)
def test_few_tokens_run_as_nodes(dtype, supported, rows, tokens, passes, monkeypatch):
    """In bfloat16 without PyTorch's instructions for it, many tokens run in pieces of as many."""
    seen = []
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: supported)
    with MedusaModel(tiny(max_position_embeddings=2048).to(dtype)) as medusa, torch.no_grad():
        medusa.backbone.choose_layers(captured=False)
        if medusa.backbone.native is None:
            pytest.skip(f"no C++ ops: {why_missing('cpu')}")
        forward = medusa.backbone.forward

        def recorded(piece, context):
            seen.append((*piece.shape, "modules" if context.ancestors is None else "nodes"))
            return forward(piece, context)

        monkeypatch.setattr(medusa.backbone, "forward", recorded)
        state = acquire(medusa, [tokens] * rows, tokens + 30)
        prefill(medusa.backbone, prompts(rows, [tokens] * rows), state, *greedy(rows), chunk=1000)
    assert seen == passes


@pytest.mark.parametrize("name", ["self_attn.k_proj", "", "subclass"])
def test_hooks_and_other_classes_of_the_last_layer_see_every_token(name):
    rows, seen = prompts(3, [7, 2, 6]), []
    model = tiny()
    last = model.model.layers[-1]

    class Other(type(last)):
        def forward(self, hidden_states, *args, **kwargs):
            seen.append(hidden_states.shape[:2])
            return super().forward(hidden_states, *args, **kwargs)

    if name == "subclass":
        last.__class__ = Other
    else:
        last.get_submodule(name).register_forward_hook(lambda module, args, out: seen.append(args[0].shape[:2]))
    with MedusaModel(model) as medusa, torch.no_grad():
        state = acquire(medusa, [7, 2, 6])
        prefill(medusa.backbone, rows, state, *greedy(3), chunk=12)
    assert seen == [(3, 4), (3, 3)]
    agreement(tiny, rows)(state)


# With dynamic scaling, keys of another length have other frequencies: see test_memory.py.
@pytest.mark.parametrize("name", ["qwen3", "mistral window 4", "multi-query"])
@pytest.mark.parametrize("reuse", [1, 5])
def test_only_new_tokens_run_through_the_model(name, reuse, way, monkeypatch):
    (family, overrides), lengths, batches, states = VARIANTS[name], [6, 17, 9], [], []
    make = functools.partial(tiny, family, **overrides)
    with MedusaModel(make()) as medusa, torch.no_grad():
        forward = medusa.backbone.forward
        for seed in range(11):  # a thousand numbers: the largest errors of a few are compared by chance
            rows, seen = prompts(3, lengths, seed=2 + seed), []
            state = acquire(medusa, lengths)
            prefill(medusa.backbone, [row[:reuse] for row in rows], state, *greedy(3))
            before = state.cache.kv[..., :reuse, :].clone()
            state.cache.kv[..., reuse:, :] = torch.nan
            state.clear()
            with monkeypatch.context() as patch:
                patch.setattr(
                    medusa.backbone, "forward", lambda t, c, seen=seen: seen.append(t.clone()) or forward(t, c)
                )
                prefill(medusa.backbone, rows, state, *greedy(3), reuse=reuse, chunk=15)
            assert torch.cat(seen, 1).tolist() == padded(rows, "right")[0][:, reuse:].tolist()
            assert torch.equal(state.cache.kv[..., :reuse, :], before)
            batches, states = batches + rows, [*states, state]
    kv = torch.cat([state.cache.kv for state in states], 2)
    together = SimpleNamespace(hidden=torch.cat([state.hidden for state in states]), cache=SimpleNamespace(kv=kv))
    agreement(make, batches)(together)


@pytest.mark.parametrize("reuse", [-1, 4])
def test_reuse_leaves_at_least_one_token_per_row_to_run(reuse):
    with MedusaModel(tiny()) as medusa, torch.no_grad():
        state = acquire(medusa, [4, 9])
        with pytest.raises(ValueError, match=rf"reuse: expected 0 to 3 .*, got {reuse}"):
            prefill(medusa.backbone, prompts(2, [4, 9]), state, *greedy(2), reuse=reuse)
        with pytest.raises(ValueError, match="chunk: expected at least 1, got 0"):
            prefill(medusa.backbone, prompts(2, [4, 9]), state, *greedy(2), chunk=0)
    assert state.cache.kv.isnan().all()
    assert int(state.step) == 0


def brute_force(q, keys, values, offset, scale, window):
    """Attention of a chunk with everything in memory, in fp64."""
    q, keys, values = q.double(), keys.double(), values.double()
    length, groups = q.shape[1], q.shape[2] // keys.shape[1]
    keys, values = keys.repeat_interleave(groups, 1), values.repeat_interleave(groups, 1)
    age = offset + torch.arange(length)[:, None] - torch.arange(offset + length)
    visible = (age >= 0) & (age < (window or torch.inf))
    scores = torch.einsum("bthd,bhsd->bhts", q, keys[:, :, : offset + length]) * scale
    probs = scores.masked_fill(~visible, -torch.inf).softmax(-1)
    return torch.einsum("bhts,bhsd->bthd", probs, values[:, :, : offset + length])


@pytest.mark.parametrize(
    "attend", [prefill_attention._prefill_by_mask, prefill_attention._prefill_by_chains], ids=["mask", "chains"]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [None, 40, 300])
@pytest.mark.parametrize(("length", "offset"), [(1, 1), (600, 37), (257, 1), (600, 0)])
def test_attention_after_a_prefix_equals_fp64(attend, dtype, size, length, offset):
    """Windows smaller and larger than the chunk, chunks of several pieces; at most twice PyTorch's error."""
    generator = torch.Generator().manual_seed(length)
    draw = functools.partial(torch.randn, generator=generator)
    q = draw(2, length, 6, 16).to(dtype)
    k, v = draw(2, 2, 2, offset + length + 9, 16).to(dtype)
    k[:, :, offset + length :] = v[:, :, offset + length :] = torch.nan
    exact = brute_force(q, k, v, offset, 0.3, size)
    lens = torch.full((2,), offset, dtype=torch.int32)
    got = attend(q, k, v, lens, offset, 0.3, size)
    age = offset + torch.arange(length)[:, None] - torch.arange(offset + length)
    keys, values = (t[:, :, : offset + length].repeat_interleave(3, 1) for t in (k, v))
    mask = (age >= 0) & (age < (size or torch.inf))
    theirs = torch.nn.functional.scaled_dot_product_attention(q.transpose(1, 2), keys, values, mask, scale=0.3)
    error, bound = ((out.double() - exact).abs().max() for out in (got, theirs.transpose(1, 2)))
    assert error <= 2 * bound + torch.finfo(dtype).eps * exact.abs().max()


def with_lse(*args, **kwargs):
    return flash_attn_func(*args, **kwargs), torch.empty(0)


def upper_left(q, k, v, **kwargs):
    """As before flash-attn 2.1: the first query is at the position of the first key."""
    return flash_attn_func(q, k[:, : q.shape[1]], v[:, : q.shape[1]], **kwargs)


def window_less_one(q, k, v, *, window_size, **kwargs):
    return flash_attn_func(q, k, v, window_size=(window_size[0] - (window_size[0] > 0), window_size[1]), **kwargs)


def of_pytorch(q, k, v, cu_q, cu_k, max_q, max_k, dropout_p, causal, debug, **options):
    """The documented meaning of the operation under PyTorch's flash kernel, in its place on a CPU."""
    assert (cu_q, cu_k, max_q, max_k, debug) == (None, None, q.shape[1], k.shape[1], False)
    window = options["window_size_left"], options["window_size_right"]
    out = flash_attn_func(q, k, v, dropout_p, options["scale"], causal, window)
    return out, *(torch.empty(0) for _ in range(4))


@pytest.fixture(params=["flash-attn 3", "flash-attn 3 with log-sum-exp", "flash-attn 2", "PyTorch's flash kernel"])
def flash(request, monkeypatch, fresh):
    """Each flash kernel, chosen as on a GPU."""
    library = None
    if request.param == "PyTorch's flash kernel":
        monkeypatch.setitem(sys.modules, "flash_attn", None)
        library = torch.library.Library("aten", "IMPL")
        library.impl("_flash_attention_forward", of_pytorch, "CPU")
    elif request.param == "flash-attn 2":
        install(monkeypatch, "flash_attn", flash_attn_func=flash_attn_func)
    else:
        kernel = with_lse if "with" in request.param else flash_attn_func
        install(monkeypatch, "flash_attn_interface", flash_attn_func=kernel)
        load = functools.partial(prefill_attention._from_package, "flash_attn_interface")
        monkeypatch.setattr(prefill_attention, "_candidates", lambda device: {"flash-attn 3": load})
    assert request.param.startswith(chosen().name)
    monkeypatch.setattr(prefill_attention, "flash_kernel", lambda q: chosen(q.dtype, q.shape[-1]).flash)
    yield
    if library is not None:
        library._destroy()


@pytest.mark.usefixtures("flash")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("length", "offset"), [(1, 1), (200, 37), (200, 0)])
def test_flash_kernels_attend_over_the_cache(dtype, length, offset):
    """First and later chunks, windows, grouped heads, over caches that have other layers' rows between their own."""
    generator = torch.Generator().manual_seed(length)
    draw = functools.partial(torch.randn, generator=generator)
    q = draw(2, length, 6, 16).to(dtype)
    lens = torch.full((2,), offset, dtype=torch.int32)
    for kv_heads, size in ((1, None), (2, 1), (6, 40)):
        cache = draw(3, 2, 2, kv_heads, offset + length + 9, 16).to(dtype)
        k, v = cache[1]
        k[:, :, offset + length :] = v[:, :, offset + length :] = torch.nan
        settings = {"scale": 0.3, "window": size}
        got = prefill_attention.prefill_attention(q, k, v, lens, offset, **settings)
        exact = brute_force(q, k, v, offset, 0.3, size)
        # The stand-in computes in fp64, so that results are rounded once.
        assert (got.double() - exact).abs().max() <= torch.finfo(dtype).eps * exact.abs().max()
        assert got.dtype == dtype
        for places in ([1, 2], [3, 0]):  # neighbours in a larger cache, and others
            larger = torch.full((2, 4, *k.shape[1:]), torch.nan, dtype=dtype)
            larger[0, places], larger[1, places] = k, v
            attended = prefill_attention.prefill_attention(q, *larger, lens, offset, places=places, **settings)
            assert torch.equal(attended, got)


BROKEN = {
    "not there": ({"flash_attn": None}, "ModuleNotFoundError: "),
    "aligned at the upper left": ({"flash_attn": {"flash_attn_func": upper_left}}, "RuntimeError: wrong by"),
    "another window": ({"flash_attn": {"flash_attn_func": window_less_one}}, "wrong by .* with a window"),
}


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("name", BROKEN)
def test_a_flash_attn_that_does_not_work_is_named_and_passed_over(name, monkeypatch, caplog):
    packages, why = BROKEN[name]
    monkeypatch.delitem(sys.modules, "flash_attn", raising=False)
    for package, functions in packages.items():
        if functions is None:
            monkeypatch.setitem(sys.modules, package, None)
        else:
            install(monkeypatch, package, **functions)
    with caplog.at_level(logging.INFO, logger="medusa_decoding"):
        served = chosen()
        assert chosen() is served
    # This machine's PyTorch has no flash kernel for a CPU, so nothing is left.
    assert (served.name, served.flash) == ("tree_attention", None)
    [record] = caplog.records
    line = record.getMessage()
    assert line.startswith("prefill attention on cpu, bfloat16, heads of 16: tree_attention (not flash-attn 2: ")
    assert re.search(why, line), line
    assert "not PyTorch's flash kernel: NotImplementedError" in line


@pytest.mark.usefixtures("fresh")
def test_the_best_kernel_that_works_serves(monkeypatch):
    install(monkeypatch, "flash_attn_interface", flash_attn_func=upper_left)
    install(monkeypatch, "flash_attn", flash_attn_func=flash_attn_func)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    hopper = list(prefill_attention._candidates(torch.device("cuda", 0)))
    assert hopper == ["flash-attn 3", "flash-attn 2", "PyTorch's flash kernel"]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert list(prefill_attention._candidates(torch.device("cuda", 0))) == hopper[1:]
    served = chosen()
    assert served.name == "flash-attn 2"
    assert served.reason == "right on a small case"
    assert doctor.prefill("cpu") == {"implementation": "flash-attn 2", "reason": served.reason}


class Largest(TorchDispatchMode):
    """Records the largest tensor made, by the elements that it has in memory."""

    def __init__(self):
        super().__init__()
        self.elements, self.shape = 0, ()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, torch.Tensor) and not func.is_view:
                elements = tensor.untyped_storage().nbytes() // tensor.itemsize
                if elements > self.elements:
                    self.elements, self.shape = elements, (str(func), tuple(tensor.shape))
        return out


@pytest.mark.parametrize("size", [None, 3000], ids=["", "window"])
def test_prefill_memory_does_not_grow_with_the_square_of_the_prompt(size):
    length = 8192
    # Two layers: the last one runs for the last token alone.
    model = tiny("mistral", num_hidden_layers=2, max_position_embeddings=2 * length, sliding_window=size)
    [row] = prompts(1, [length])
    with MedusaModel(model) as medusa, torch.no_grad():
        state = medusa._steps.pool.acquire(Sizes([length], 4), length + 10)
        with Largest() as largest:
            prefill(medusa.backbone, [row], state, *greedy(1, 4))
        assert largest.elements < 100 * 2048, largest.shape  # 48 is the widest layer
        assert largest.elements >= 48 * 2048, "the pass itself was not seen"
        # The last position attends to all others: same as one pass of that token over the cache.
        positions = torch.zeros(1, dtype=torch.int32)
        last, cache = state.hidden.clone(), state.cache
        cache.lengths.fill_(length - 1)
        words = torch.ones(1, 1, dtype=torch.int64)
        again = medusa.backbone.forward(row[-1:][None], DecodeContext(cache, positions, words))[0][:, 0]
    torch.testing.assert_close(last, again, rtol=1e-4, atol=1e-4)


def test_a_prompt_of_several_chunks_equals_transformers():
    """With the default chunk size, and rows that end in different chunks."""
    length = 2 * PREFILL_CHUNK + 77
    model = tiny("qwen3", num_hidden_layers=1, max_position_embeddings=2 * length)
    rows = prompts(3, [length, 900, PREFILL_CHUNK])
    ids, mask = padded(rows)
    with MedusaModel(model, heads_for(model), Tree.cartesian([3, 2])) as medusa:
        output = medusa.generate(ids, mask, max_new_tokens=NEW)
    expected = [transformers_greedy(model, row, NEW) for row in rows]
    assert output.sequences[:, ids.shape[1] :].tolist() == expected


def test_a_tree_after_more_than_131_072_rows():
    """A full context and the spare rows after it, which a bucket rounds up to 147,456."""
    rows, nodes, length = 131_072 + 400, 20, 131_072 + 311
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(1, nodes, 2, 16, generator=generator)
    k, v = torch.randn(2, 1, 1, rows, 16, generator=generator)
    chain = ancestor_words(torch.ones(nodes, nodes, dtype=torch.bool).tril())
    lens = torch.tensor([length], dtype=torch.int32)
    got = tree_attention(q, k, v, lens, chain, scale=0.3, window=300)
    exact = brute_force(q, k, v, length, 0.3, 300)
    torch.testing.assert_close(got.double(), exact, rtol=1e-5, atol=1e-6)


def on_this_gpu():
    """The flash kernels that work here, in bf16 with heads of 128; each name with its function or what it lacks."""
    found = {}
    for name, load in prefill_attention._candidates(torch.device("cuda", 0)).items():
        try:
            found[name] = load()
        except ImportError as error:
            found[name] = str(error)
    return found


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["flash-attn 3", "flash-attn 2", "PyTorch's flash kernel"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_flash_kernels_on_a_gpu(name, dtype, monkeypatch):
    """First and later chunks and windows over a cache as models have it; at most twice PyTorch's error with a mask."""
    kernel = on_this_gpu().get(name, "not for this GPU")
    if isinstance(kernel, str):
        pytest.skip(kernel)
    monkeypatch.setattr(prefill_attention, "flash_kernel", lambda q: kernel)
    generator = torch.Generator().manual_seed(0)
    draw = functools.partial(torch.randn, generator=generator)
    for (length, offset), size in itertools.product([(1500, 700), (1, 900), (600, 0)], (None, 1, 400)):
        q, cache = draw(2, length, 8, 128).to(dtype), draw(2, 2, 2, 2, offset + length + 9, 128).to(dtype)
        exact = brute_force(q, *cache[1], offset, 0.09, size)
        lens = torch.full((2,), offset, dtype=torch.int32, device="cuda")
        on_gpu = cache.cuda()[1]
        got = prefill_attention.prefill_attention(q.cuda(), *on_gpu, lens, offset, scale=0.09, window=size)
        age = offset + torch.arange(length)[:, None] - torch.arange(offset + length)
        mask = (age >= 0) & (age < (size or torch.inf))
        keys, values = (tensor[:, :, : offset + length] for tensor in cache[1])
        theirs = torch.nn.functional.scaled_dot_product_attention(
            q.transpose(1, 2), keys, values, mask, scale=0.09, enable_gqa=True
        )
        error, bound = ((out.cpu().double() - exact).abs().max() for out in (got, theirs.transpose(1, 2)))
        assert error <= 2 * bound + torch.finfo(dtype).eps * exact.abs().max()


@pytest.mark.gpu
def test_prefill_on_a_gpu_makes_no_mask():
    """Attention of a chunk of 2,048 at 14,336 rows: a mask of booleans alone would be 32 MiB."""
    length, rows = 2048, 16384
    q = torch.randn(1, length, 8, 128, dtype=torch.bfloat16, device="cuda")
    k, v = torch.randn(2, 1, 2, rows, 128, dtype=torch.bfloat16, device="cuda")
    lens = torch.full((1,), rows - length, dtype=torch.int32, device="cuda")
    for size in (None, 4096):
        attend = functools.partial(
            prefill_attention.prefill_attention, q, k, v, lens, rows - length, scale=0.09, window=size
        )
        attend()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        attend()
        assert torch.cuda.max_memory_allocated() - before < 24 * 2**20, size


@pytest.mark.gpu
@pytest.mark.parametrize(("family", "overrides"), [("llama", {}), ("mistral", {"sliding_window": 300})])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_chunks_on_a_gpu(family, overrides, dtype):
    """Chunks of several pieces."""
    lengths = [1300, 900]
    shape = {"hidden_size": 64, "num_attention_heads": 8, "max_position_embeddings": 2048}
    make = functools.partial(tiny, family, dtype=dtype, **shape, **overrides)
    rows = prompts(2, lengths)
    with MedusaModel(make().cuda()) as medusa, torch.no_grad():
        state = medusa._steps.pool.acquire(Sizes(lengths, NEW), 1400)
        limits = Limits([NEW] * 2, [0] * 2, [], device="cuda")
        prefill(medusa.backbone, [row.cuda() for row in rows], state, Greedy(), limits, chunk=2 * 520)
    agreement(make, rows, dtype, "cuda")(state)


@pytest.mark.parametrize(("stored", "most"), [(torch.uint8, 1024), (torch.int8, 256), (torch.bfloat16, 128)], ids=str)
def test_short_prompts_of_quantised_models_run_in_pieces(monkeypatch, stored, most):
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: True)
    weights = [torch.ones(1, dtype=torch.bfloat16), torch.ones(1).to(stored)]
    backbone = SimpleNamespace(native=SimpleNamespace(weights=weights), dtype=torch.bfloat16)
    for batch in (1, 2):
        assert Backbone.prefill_nodes(backbone, batch, most // batch) == 128 // batch
        assert Backbone.prefill_nodes(backbone, batch, most // batch + 1) == 0
    backbone.dtype = torch.float32
    assert Backbone.prefill_nodes(backbone, 1, 129) == 0
