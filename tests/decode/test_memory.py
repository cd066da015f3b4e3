"""Memory estimates, refusals of what does not fit, and caches that serve a second turn."""

import importlib
import json
import re
from dataclasses import replace

import pytest
import torch
from models import heads_for, prompts, rope, tiny
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.generation import logits_process as lp

from medusa_decoding import MedusaModel, Tree
from medusa_decoding.backbone.backbone import Backbone
from medusa_decoding.backbone.kv_cache import TreeCache, bucket
from medusa_decoding.decode.limits import Limits
from medusa_decoding.decode.loop import decode_step
from medusa_decoding.decode.prefill import prefill
from medusa_decoding.decode.runtime import memory
from medusa_decoding.decode.runtime import state_pool as pools
from medusa_decoding.decode.runtime.memory import Sizes
from medusa_decoding.decode.runtime.state_pool import StatePool
from medusa_decoding.decode.selection.greedy import Greedy
from medusa_decoding.decode.selection.sampling import Sampling
from medusa_decoding.decode.tree_tensors import TreeTensors

DYNAMIC = {"max_position_embeddings": 16, **rope("dynamic", factor=4.0)}


@pytest.fixture
def backbone():
    return Backbone(tiny())


# How large a bucket is


def test_buckets_are_few_and_waste_little():
    sizes = [bucket(size) for size in range(1, 140_000)]
    assert all(got >= size for size, got in enumerate(sizes, 1))
    assert all((got - size) / size <= 1 / 8 for size, got in enumerate(sizes, 1) if size > 4096)
    assert [got for got in sorted(set(sizes)) if got <= 4096] == [
        *(64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096)
    ]
    # Eight per doubling: 4096 to 131,072 are five doublings, and 147,456 is one more size.
    assert len(set(sizes)) == 13 + 5 * 8 + 1
    assert all(bucket(size) == size for size in set(sizes))
    assert all(size % 512 == 0 for size in set(sizes) if size > 4096)


# Estimates


def test_llama_3_8b_at_128k():
    """Closed formulas, checked on a model without weights."""
    config = LlamaConfig(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8,
        vocab_size=128256, max_position_embeddings=131072,
    )  # fmt: skip
    with torch.device("meta"):
        backbone = Backbone(LlamaForCausalLM(config).to(torch.bfloat16))
    use = memory.memory_use(backbone, Sizes([130_000], 1000, 64), 131_068)
    rows = 131_072  # the bucket of 131,068
    assert use.rows == rows
    assert use.cache == 16 * 2**30 == 32 * 2 * 8 * rows * 128 * 2
    assert use.tables == 64 * 2**20
    # Input, residual stream and its normed copy; gate, up and their product; cosines, sines and some indices.
    assert use.activations == 2048 * ((3 * 4096 + 3 * 14336 + 2 * 128) * 2 + 16)
    assert use.total == use.cache + use.tables + use.state + use.activations
    assert str(use).startswith("16.27 GiB: cache 16.00 GiB (1 x 131,072 rows), rotary tables 64.0 MiB, state ")
    assert str(use).endswith("activations 217.0 MiB")
    with_logits = memory.memory_use(backbone, Sizes([100] * 16, 1000, 64, logits=True), 1168)
    without = memory.memory_use(backbone, Sizes([100] * 16, 1000, 64), 1168)
    assert with_logits.activations - without.activations > 16 * 64 * 128256 * 4
    wider = memory.memory_use(backbone, Sizes([130_000] * 4, 1000, 64), 131_068)
    drawn = memory.memory_use(backbone, Sizes([100] * 16, 1000, 64, logits=True, noise=5), 1168)
    assert drawn.activations - with_logits.activations == 16 * 5 * 128256 * 4
    drafted = memory.memory_use(backbone, Sizes([1] * 16, 1000, 1, drafted=3 * 128256), 1168)
    assert drafted.activations == 16 * 3 * 128256 * (2 + 4 + 4)  # as the module has them, in fp32, over the temperature
    assert wider.cache == 4 * use.cache
    assert wider.activations == use.activations


@pytest.mark.parametrize("lengths", [[5], [5, 30, 11]])
@pytest.mark.parametrize("overrides", [{}, DYNAMIC], ids=["", "dynamic"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_an_acquired_state_takes_the_memory_that_was_estimated(lengths, overrides, dtype):
    backbone = Backbone(tiny(dtype=dtype, **overrides))
    state = StatePool(backbone, keep=0).acquire(Sizes(lengths, 70), 300)
    use = memory.memory_use(backbone, Sizes(lengths, 70), 300)
    assert use.rows == state.cache.capacity
    assert use.cache == state.cache.kv.nbytes
    assert use.tables == state.cache.cos.nbytes + state.cache.sin.nbytes
    carried = [t for t in vars(state).values() if isinstance(t, torch.Tensor)]
    assert 0.5 * sum(t.nbytes for t in carried) < use.state < 2 * sum(t.nbytes for t in carried)


def peak_of(run, path):
    """The peak bytes that PyTorch's CPU allocator held for tensors made by `run`, from its own records."""
    # A mask that an earlier test has left could serve again, uncounted.
    importlib.import_module("medusa_kernels.tree_attention")._last_bias.forget()
    kinds = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=kinds, profile_memory=True) as profile:
        run()
    profile.export_chrome_trace(str(path))
    events = [event for event in json.loads(path.read_text())["traceEvents"] if event.get("name") == "[memory]"]
    peak, held = 0, {}
    for change in (event["args"] for event in sorted(events, key=lambda event: event["ts"])):
        if change["Bytes"] > 0:
            held[change["Addr"]] = change["Bytes"]
        else:  # what an earlier test has left may be freed meanwhile
            held.pop(change["Addr"], None)
        peak = max(peak, sum(held.values()))
    return peak


SHAPES = {
    "wide MLP": {"hidden_size": 32, "intermediate_size": 512},
    "window": {"hidden_size": 64, "num_attention_heads": 8, "sliding_window": 700},
    "large vocabulary": {"hidden_size": 32, "vocab_size": 4096},
}


SELECTORS = {"greedy": Greedy(), "drawn": Sampling([lp.TemperatureLogitsWarper(0.8)])}


@pytest.mark.parametrize("overrides", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("selector", SELECTORS.values(), ids=SELECTORS.keys())
@pytest.mark.parametrize(
    ("batch", "tree"),
    [(1, Tree.cartesian([4, 3, 2])), (3, Tree.cartesian([4, 3, 2])), (3, Tree.dynamic(41, 3, 8))],
    ids=["1", "3", "3, dynamic"],
)
def test_activations_take_the_memory_that_was_estimated(overrides, dtype, batch, tree, selector, tmp_path):
    """The peak next to the state, during a prefill in several chunks and a step."""
    model = tiny("mistral", dtype=dtype, **overrides)
    lengths, chunk = [1500] * batch, 600
    with MedusaModel(model, heads_for(model, shared=True), tree) as medusa, torch.no_grad():
        state = medusa._steps.pool.acquire(Sizes(lengths, 8), 1600)
        shape = TreeTensors.from_tree(tree, model.device)
        rows, limits = prompts(batch, lengths), Limits([8] * batch, [0] * batch, [])

        def run():
            prefill(medusa.backbone, rows, state, selector, limits, chunk=chunk)
            decode_step(medusa.backbone, medusa.heads, shape, state, selector, limits)

        noise = 0 if selector.draw_temperature is None else 4  # the heads, and one more than the tree's depth
        sizes = Sizes.for_trees(lengths, 8, [tree], selector.makes_logits, noise)
        use = memory.memory_use(medusa.backbone, sizes, 1500 + 8 + sizes.spare, chunk)
        peak = peak_of(run, tmp_path / "trace.json")
    # The padded prompts are not activations.
    peak -= 1500 * batch * 8
    assert peak <= use.activations <= 2 * peak


@pytest.mark.parametrize("settings", [{}, {"do_sample": True, "seed": 1}], ids=["greedy", "drawn"])
def test_logits_are_counted_exactly_where_no_fused_op_replaces_them(settings, monkeypatch):
    counted, of_trees = [], Sizes.for_trees
    monkeypatch.setattr(Sizes, "for_trees", lambda *a: counted.append(a[3]) or of_trees(*a))
    model, [row] = tiny(), prompts(1, [5])
    with MedusaModel(model, heads_for(model), Tree.chain(2)) as medusa:
        medusa.generate(row[None], max_new_tokens=6, **settings)
        medusa.generate(row[None], max_new_tokens=6, min_new_tokens=3, eos_token_id=5, **settings)
        model.lm_head.register_forward_hook(lambda *_: None)
        medusa.generate(row[None], max_new_tokens=6, **settings)
    assert counted == [False, True, True]


# Free memory of a device


def v2(folder, limit, current):
    return {f"{folder}memory.max": limit, f"{folder}memory.current": current}


STAT = "anon 1\ninactive_file 7000\nactive_file 500\n"
HOSTS = {
    # the process's control groups, their files, and what is left if the kernel reports 80 kB
    "no groups": ("", {}, 80 * 1024),
    "files to give up": ("0::/a\n", v2("a/", "50000", "20000") | {"a/memory.stat": STAT}, 37000),
    "a limit above": ("1:cpu:/x\n0::/a\n", v2("a/", "60000", "2") | v2("", "700", "200"), 500),
}


@pytest.mark.parametrize(("groups", "files", "expected"), HOSTS.values(), ids=HOSTS.keys())
def test_free_host_memory_is_limited_by_control_groups(tmp_path, groups, files, expected):
    files = {f"groups/{name}": text for name, text in files.items()}
    files["proc/meminfo"] = "MemTotal:  999 kB\nMemFree:  1 kB\nMemAvailable:  80 kB\n"
    files["proc/self/cgroup"] = groups
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert memory.host_memory(tmp_path / "proc", tmp_path / "groups") == expected


# Refusals, and freeing cached states to make room


@pytest.fixture
def room(monkeypatch):
    """A device with as many free bytes as the test sets, queried for every allocation."""

    class Room:
        free, asked = 0, 0

        def __call__(self, device):
            self.asked += 1
            return self.free(device) if callable(self.free) else self.free

    room = Room()
    monkeypatch.setattr(pools, "available", room)
    monkeypatch.setattr(pools, "UNCHECKED", 0)
    return room


@pytest.fixture
def nothing_made(monkeypatch):
    """Fails the test if a cache or rotary tables are made."""

    def made(*args, **kwargs):
        raise AssertionError("allocated before it was refused")

    monkeypatch.setattr(TreeCache, "allocate", made)
    monkeypatch.setattr(Backbone, "rope", made)


def figure(pattern, error):
    """The number that a message names."""
    return int(re.search(pattern, str(error.value)).group(1).replace(",", ""))


def test_a_request_that_does_not_fit_is_refused_with_one_that_would(backbone, room, nothing_made):
    use = memory.memory_use(backbone, Sizes([5, 3], 100), 50_000)
    room.free = use.total - 1
    with pytest.raises(MemoryError, match=r"expected at most .* \(free on cpu\), got .* MiB: cache 26.0 MiB") as error:
        StatePool(backbone, keep=0).acquire(Sizes([5, 3], 100), 50_000)
    fits = figure(r"of 50,000 tokens per row .* ([\d,]+) would fit", error)
    assert fits == 49_152, "the largest bucket below that of 50,000"
    room.free = 100_000
    with pytest.raises(MemoryError) as error:
        StatePool(backbone, keep=0).acquire(Sizes([5, 3], 100), 50_000)
    fits = figure(r"([\d,]+) would fit", error)
    assert memory.memory_use(backbone, Sizes([5, 3], 100), fits).total <= 100_000
    assert memory.memory_use(backbone, Sizes([5, 3], 100), fits + 1).total > 100_000
    room.free = 10
    with pytest.raises(MemoryError, match="0 would fit"):
        StatePool(backbone, keep=0).acquire(Sizes([5, 3], 100), 50_000)


def test_cached_states_are_dropped_before_a_request_is_refused(backbone, room):
    pool = StatePool(backbone, keep=3)
    room.free = 10**9
    states = [pool.acquire(Sizes([5], 10), rows) for rows in (100, 300)]
    kept = sum(state.cache.nbytes for state in states)
    need = memory.memory_use(backbone, Sizes([5], 10), 2000).total
    for state in states:
        pool.release(state)
    room.free = lambda device: need - 1 if pool._idle else need
    assert pool.acquire(Sizes([5], 10), 2000).cache.capacity == 2048
    assert pool._idle == []
    # Cached states also count as free at the start of a generation, which drops none of them.
    for state in states:
        pool.release(state)
    sizes = Sizes([5], 1985, spare=10)
    whole = memory.memory_use(backbone, sizes, 5 + 1985 + 10).total
    room.free = whole - kept
    assert pool.first_capacity(sizes, 20) == 2000
    assert pool._idle == states
    room.free -= 1
    with pytest.raises(MemoryError):
        pool.first_capacity(sizes, 20)
    # So does the state of a session.
    pool.clear()
    room.free = whole - states[1].cache.nbytes
    with pytest.raises(MemoryError):
        pool.first_capacity(sizes, 20)
    assert pool.first_capacity(sizes, 20, held=states[1]) == 2000


def test_more_states_are_kept_if_they_are_small(backbone, room, monkeypatch):
    room.free = 10**9
    pool, sizes = StatePool(backbone, keep=2), Sizes([5], 10)
    states = [pool.acquire(sizes, rows) for rows in (64, 128, 256, 512)]
    for state in states:
        pool.release(state)
    assert pool._idle == states
    monkeypatch.setattr(pools, "SMALL_STATES", sum(state.cache.nbytes for state in states[1:]))
    assert pool.acquire(sizes, 512) is states[3]
    pool.release(states[3])
    assert pool._idle == states[1:], "the oldest one went"
    larger = pool.acquire(sizes, 1024)
    assert pool._idle == states[3:], "a new one needs room"
    pool.release(larger)
    assert pool._idle == [states[3], larger], "as many as were asked for are kept, however large"


def test_the_first_cache_is_as_small_as_growth_allows(backbone, room):
    """Small and growing if the last move fits, full size if only the last cache does, refused if neither does."""
    pool, sizes = StatePool(backbone, keep=0), Sizes([40, 3000], 7000, spare=70)
    whole = memory.memory_use(backbone, sizes, 3000 + 7000 + 70)
    before_last = memory.memory_use(backbone, sizes, 9216)
    assert whole.rows == 10_240
    room.free = whole.total + before_last.lasting
    assert pool.first_capacity(sizes, 1024) == 3000 + 1024 + 70
    room.free -= 1
    assert pool.first_capacity(sizes, 1024) == 3000 + 7000 + 70
    room.free = whole.total
    assert pool.first_capacity(sizes, 1024) == 3000 + 7000 + 70
    assert pool.first_capacity(replace(sizes, budget=500), 1024) == 3000 + 500 + 70
    room.free = memory.memory_use(backbone, replace(sizes, budget=6146), 9216).total
    with pytest.raises(MemoryError, match=r"\(2 x 10,240 rows\).*of 7,000 new tokens per row 6,146 would fit"):
        pool.first_capacity(sizes, 1024)
    room.free = memory.memory_use(backbone, replace(sizes, budget=1), 3071).total - 1
    with pytest.raises(MemoryError, match="of 7,000 new tokens per row not one would fit after the prompt"):
        pool.first_capacity(sizes, 1024)
    room.free = None
    assert pool.first_capacity(sizes, 1024) == 3000 + 1024 + 70


# A cache for a second turn


def filled(state, lengths):
    """As after a generation: keys and values up to the lengths, and a step captured."""
    state.cache.lengths.copy_(torch.tensor(lengths))
    state.cache.kv.normal_(generator=torch.Generator().manual_seed(0))
    state.count.fill_(7)
    state.captured["step", "key"] = "graph"
    return state.cache.kv.clone()


def test_a_state_that_is_large_enough_is_reused(backbone):
    pool = StatePool(backbone, keep=1)
    state = pool.acquire(Sizes([5, 9], 40), 100)
    kv = filled(state, [30, 44])
    again, usable = pool.enlarge(state, Sizes([60, 50], 63), 128)
    assert again is state
    assert usable == 30
    assert torch.equal(state.cache.kv, kv)
    assert int(state.count.sum()) == int(state.cache.lengths.sum()) == 0
    assert state.captured, "what was captured over these tensors is still right"
    assert pool._idle == []


def test_a_larger_cache_copies_keys_and_values(backbone):
    pool = StatePool(backbone, keep=1)
    state = pool.acquire(Sizes([5, 9], 40), 100)
    kv = filled(state, [30, 44])
    larger, usable = pool.enlarge(state, Sizes([60, 150], 40), 200)
    assert larger.cache.capacity == 256
    assert usable == 30
    assert torch.equal(larger.cache.kv[..., :30, :], kv[..., :30, :])
    assert int(larger.count.sum()) == int(larger.cache.lengths.sum()) == 0
    assert pool._idle == [state]
    exact = backbone.rope([60, 150], 256)
    assert torch.equal(larger.cache.cos, exact[0])
    assert torch.equal(larger.cache.sin, exact[1])


def test_a_refused_enlargement_leaves_the_state_unchanged(backbone, room):
    pool = StatePool(backbone, keep=1)
    room.free = 10**9
    state = pool.acquire(Sizes([5, 9], 40), 100)
    kv = filled(state, [30, 44])
    room.free = memory.memory_use(backbone, Sizes([60, 150], 40), 200).total - state.cache.nbytes - 1
    with pytest.raises(MemoryError):
        pool.enlarge(state, Sizes([60, 150], 40), 200)
    assert torch.equal(state.cache.kv, kv)
    assert state.cache.lengths.tolist() == [30, 44]
    assert pool._idle == []


def test_a_larger_cache_may_reuse_the_memory_of_the_old_one(backbone, room):
    pool = StatePool(backbone, keep=1)
    room.free = 10**9
    state = pool.acquire(Sizes([5, 9], 40), 100)
    filled(state, [30, 44])
    need = memory.memory_use(backbone, Sizes([60, 150], 40), 200).total
    room.free = lambda device: need - held if state.cache.kv.numel() else need
    held = state.cache.nbytes
    larger, usable = pool.enlarge(state, Sizes([60, 150], 40), 200)
    assert larger.cache.capacity == 256
    assert usable == 0
    assert state.cache.nbytes == 0
    assert pool._idle == []


@pytest.mark.parametrize(
    ("first", "second", "usable"),
    [
        *(([5], [12], 12), ([30], [30], 30), ([30], [31], 1)),
        *(([5, 6], [14, 40], 1), ([6, 6], [14, 15], 12), ([5, 6], [14, 14], 12)),
    ],
)
def test_tables_of_dynamic_scaling_follow_the_prompt(first, second, usable):
    """Trained on 16 positions: up to there nothing depends on the length, beyond it all but position 0 does.

    Tables of a ragged batch have one more axis.
    """
    backbone = Backbone(tiny(**DYNAMIC))
    pool = StatePool(backbone, keep=0)
    state = pool.acquire(Sizes(first, 20), 60)
    filled(state, [max(12, n) for n in first])
    again, got = pool.enlarge(state, Sizes(second, 20), 60)
    exact = backbone.rope(second, state.cache.capacity)
    assert again is state
    assert torch.equal(state.cache.cos, exact[0])
    assert torch.equal(state.cache.sin, exact[1])
    assert got == usable
    assert bool(state.captured) == (backbone.rope(first, 64)[0].shape == exact[0].shape), "captured over other tables"
