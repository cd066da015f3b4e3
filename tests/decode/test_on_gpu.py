"""The loop on a GPU: captured steps write what eager steps and transformers write, and nothing waits or allocates."""

import pytest
import torch
from models import FAMILIES, VOCAB, heads_for, padded, prompts, tiny, transformers_greedy

from medusa_decoding import MedusaModel, Tree
from medusa_decoding.decode import loop

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
NEW = 24
NODES_64 = Tree.optimal([[0.5, 0.2, 0.1, 0.05], [0.4, 0.2, 0.1, 0.05], [0.3, 0.2, 0.1], [0.2, 0.1]], 64)
TREES = {"plain": Tree([]), "chain": Tree.chain(4), "nodes64": NODES_64}


def on_gpu(family="llama", **overrides):
    model = tiny(family, **overrides)
    heads = heads_for(model)
    return model.cuda(), heads.cuda()


def batch(rows):
    ids, mask = padded(rows)
    return ids.cuda(), mask.cuda()


@pytest.mark.parametrize("backend", ["eager", "graph"])
@pytest.mark.parametrize("tree", TREES.values(), ids=TREES.keys())
@pytest.mark.parametrize("family", FAMILIES)
def test_equals_transformers(family, tree, backend):
    model, heads = on_gpu(family)
    rows = [row.cuda() for row in prompts(3, [7, 1, 19])]
    expected = [transformers_greedy(model, row, NEW) for row in rows]
    ids, mask = batch(rows)
    with MedusaModel(model, heads, tree, backend=backend) as medusa:
        output = medusa.generate(ids, mask, max_new_tokens=NEW)
        assert medusa.trunk.fuse == (backend == "graph")
    assert output.sequences[:, ids.shape[1] :].tolist() == expected
    assert [sum(a) + len(a) for a in output.accept_lengths] == [NEW - 1] * 3
    if tree.num_nodes > 1:
        assert sum(map(sum, output.accept_lengths)) > 0, "no guess was accepted: the test shows nothing"


def state_after(medusa, tree, backend, steps, prompt):
    """The tensors of a generation after some steps, driven by hand."""
    step = medusa._steps.get(tree, backend)
    rules = medusa._stop_rules([prompt], len(prompt), 200, None, [])
    state = medusa._steps.arena.lend([len(prompt)], 400, 200)
    with torch.no_grad():
        loop.prefill(medusa.trunk, [prompt], state, rules)
        for _ in range(steps):
            step(state, rules)
    rows = int(state.cache.lengths[0])
    return {
        "kv": state.cache.kv[..., :rows, :].clone(),
        **{n: getattr(state, n).clone() for n in ("root", "hidden", "output", "count", "finished", "log", "step")},
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("tree", TREES.values(), ids=TREES.keys())
def test_replay_is_bit_equal_to_the_same_step_run_eagerly(tree, dtype):
    """Not only the text: keys, values, hidden states and counters after 12 steps."""
    model, heads = on_gpu(dtype=dtype, hidden_size=64, num_attention_heads=8)
    [prompt] = [row.cuda() for row in prompts(1, [9])]
    with MedusaModel(model, heads, tree) as medusa:
        captured = state_after(medusa, tree, "graph", 12, prompt)
        medusa._steps._choose_layers = lambda _: None  # the eager step with the fused layers of the captured one
        eager = state_after(medusa, tree, "eager", 12, prompt)
    assert int(captured["step"]) == 13
    for name, tensor in eager.items():
        assert torch.equal(captured[name], tensor), name


def test_growing_past_a_bucket_keeps_the_text(monkeypatch):
    monkeypatch.setattr(loop, "HEADROOM", 8)
    model, heads = on_gpu(max_position_embeddings=512)
    rows = [row.cuda() for row in prompts(2, [30, 50])]
    expected = [transformers_greedy(model, row, 300) for row in rows]
    ids, mask = batch(rows)
    lent = []
    with MedusaModel(model, heads, NODES_64) as medusa:
        lend = medusa._steps.arena.lend
        monkeypatch.setattr(medusa._steps.arena, "lend", lambda *args: lent.append(lend(*args)) or lent[-1])
        output = medusa.generate(ids, mask, max_new_tokens=300)
    assert output.sequences[:, ids.shape[1] :].tolist() == expected
    capacities = [state.cache.capacity for state in lent]
    assert len(capacities) > 2
    assert capacities == sorted(set(capacities))


def test_graphs_are_reused_and_follow_new_rules():
    model, heads = on_gpu()
    rows = [row.cuda() for row in prompts(4, [5, 9, 2, 7])]
    with MedusaModel(model, heads, Tree.cartesian([4, 2])) as medusa:
        seen = []
        for row, eos in zip(rows, (3, 5, 1, 0), strict=True):
            output = medusa.generate(row[None], max_new_tokens=40, eos_token_id=eos)
            expected = transformers_greedy(model, row, 40, eos_token_id=eos)
            assert output.sequences[0, len(row) :].tolist() == expected
            [state] = medusa._steps.arena._idle
            seen.append([captured.graph for captured in state.captured.values()])
        assert all(len(graphs) == 1 and graphs[0] is seen[0][0] for graphs in seen)
        medusa.free()
        assert medusa._steps.arena._idle == []


def test_plain_and_tree_steps_share_a_state():
    model, heads = on_gpu()
    [row] = [row.cuda() for row in prompts(1, [9])]
    expected = transformers_greedy(model, row, 30)
    with MedusaModel(model, heads, Tree.chain(3)) as medusa:
        for tree in (Tree.chain(3), Tree([]), Tree.chain(2), Tree.chain(3), Tree([])):
            assert medusa.generate(row[None], max_new_tokens=30, tree=tree).sequences[0, 9:].tolist() == expected


def test_changed_weights_are_followed():
    model, heads = on_gpu()
    [row] = [row.cuda() for row in prompts(1, [9])]
    with MedusaModel(model, heads, Tree.chain(2)) as medusa:
        before = medusa.generate(row[None], max_new_tokens=16).sequences[0, 9:].tolist()
        with torch.no_grad():
            model.model.layers[0].mlp.down_proj.weight.mul_(-1.5)
            model.model.layers[1].mlp.up_proj.weight = torch.nn.Parameter(
                model.model.layers[1].mlp.up_proj.weight.flip(0).clone()
            )
        expected = transformers_greedy(model, row, 16)
        assert expected != before
        assert medusa.generate(row[None], max_new_tokens=16).sequences[0, 9:].tolist() == expected


class Streamer:
    def __init__(self):
        self.got, self.ended = [], 0

    def put(self, value):
        self.got.append(value.flatten().tolist())

    def end(self):
        self.ended += 1


@pytest.mark.parametrize("new", [1, 2, 30])
def test_streaming_sees_every_token_once_in_order(new):
    model, heads = on_gpu()
    [row] = [row.cuda() for row in prompts(1, [9])]
    streamer = Streamer()
    with MedusaModel(model, heads, Tree.cartesian([4, 3])) as medusa:
        output = medusa.generate(row[None], max_new_tokens=new, streamer=streamer)
    assert streamer.got[0] == row.tolist()
    assert all(len(tokens) == 1 for tokens in streamer.got[1:])
    assert [token for [token] in streamer.got[1:]] == output.sequences[0, 9:].tolist()
    assert streamer.ended == 1


def test_a_captured_step_neither_allocates_nor_synchronises():
    model, heads = on_gpu()
    [prompt] = [row.cuda() for row in prompts(1, [9])]
    with MedusaModel(model, heads, NODES_64) as medusa, torch.no_grad():
        step = medusa._steps.get(NODES_64, "graph")
        rules = medusa._stop_rules([prompt], 9, 200, None, [VOCAB])
        state = medusa._steps.arena.lend([9], 400, 200)
        loop.prefill(medusa.trunk, [prompt], state, rules)
        step(state, rules)
        torch.cuda.synchronize()
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=kinds) as profile:
            for _ in range(10):
                step(state, rules)
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
        calls = [event.key for event in profile.key_averages() if event.key.startswith(("cuda", "cu", "aten::"))]
        assert "cudaGraphLaunch" in calls
        # PyTorch asks whether a capture is under way, and the profiler waits for the device when it is stopped.
        assert set(calls) <= {"cudaGraphLaunch", "cudaStreamIsCapturing", "cudaDeviceSynchronize"}, calls
        launches = [event for event in profile.events() if event.name == "cudaGraphLaunch"]
        waits = [event for event in profile.events() if event.name == "cudaDeviceSynchronize"]
        assert len(launches) == 10
        last = max(event.time_range.start for event in launches)
        assert all(event.time_range.start >= last for event in waits)


def test_no_host_reads_within_an_eager_step():
    model, heads = on_gpu()
    [prompt] = [row.cuda() for row in prompts(1, [9])]
    with MedusaModel(model, heads, NODES_64) as medusa, torch.no_grad():
        step = medusa._steps.get(NODES_64, "eager")
        rules = medusa._stop_rules([prompt], 9, 200, None, [VOCAB])
        state = medusa._steps.arena.lend([9], 400, 200)
        loop.prefill(medusa.trunk, [prompt], state, rules)
        step(state, rules)
        try:
            torch.cuda.set_sync_debug_mode("error")
            step(state, rules)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert int(state.step) == 3


def test_a_step_that_cannot_be_captured_is_refused_and_nothing_is_lost():
    model, heads = on_gpu()
    [row] = [row.cuda() for row in prompts(1, [9])]
    expected = transformers_greedy(model, row, 12)
    handle = model.lm_head.register_forward_hook(lambda module, args, out: out + out.sum().item() * 0)
    with MedusaModel(model, heads, Tree.chain(2)) as medusa:
        with pytest.raises(RuntimeError, match="use backend='eager'"):
            medusa.generate(row[None], max_new_tokens=12)
        medusa.backend = "eager"
        assert medusa.generate(row[None], max_new_tokens=12).sequences[0, 9:].tolist() == expected
        handle.remove()
        medusa.backend = "graph"
        assert medusa.generate(row[None], max_new_tokens=12).sequences[0, 9:].tolist() == expected


def test_torch_compile_of_a_swapped_model(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    model, heads = on_gpu()
    ids = torch.stack([row.cuda() for row in prompts(2, [9])])
    with torch.no_grad():
        expected = model(ids).logits
        with MedusaModel(model, heads, Tree.chain(2)) as medusa:
            compiled = torch.compile(model, dynamic=False)
            torch.testing.assert_close(compiled(ids).logits, expected, rtol=1e-4, atol=1e-4)
            text = medusa.generate(ids[:1], max_new_tokens=12).sequences[0, 9:].tolist()
    assert text == transformers_greedy(model, ids[0], 12)


def test_compiled_backend_is_captured_too(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    model, heads = on_gpu(num_hidden_layers=1)
    rows = [row.cuda() for row in prompts(2, [5, 9])]
    ids, mask = batch(rows)
    with MedusaModel(model, heads, Tree.cartesian([3, 2]), backend="compiled") as medusa:
        output = medusa.generate(ids, mask, max_new_tokens=20)
        [state] = medusa._steps.arena._idle
        assert len(state.captured) == 1
    assert output.sequences[:, ids.shape[1] :].tolist() == [transformers_greedy(model, row, 20) for row in rows]
