"""The loop on a GPU: captured steps write what eager steps and transformers write, and no step waits or allocates."""

import threading

import pytest
import torch
from calls import Recorder
from models import FAMILIES, MORE_FAMILIES, VOCAB, heads_for, padded, prompts, tiny, transformers_greedy
from oracles import assert_some_accepted
from transformers.generation import logits_process as lp

from benchmarks.bench_step import in_form
from benchmarks.stored_weights import FORMS
from medusa_decoding import MedusaModel, Tree
from medusa_decoding.decode.limits import Limits
from medusa_decoding.decode.prefill import prefill
from medusa_decoding.decode.runtime import runner
from medusa_decoding.decode.runtime.memory import Sizes
from medusa_decoding.decode.selection import sampling
from medusa_decoding.decode.selection.greedy import Greedy
from medusa_decoding.decode.selection.sampling import Sampling
from medusa_decoding.decode.selection.typical import TypicalAcceptance
from medusa_decoding.linears.packed import PackedLinear
from medusa_kernels import quantised

pytestmark = pytest.mark.gpu
NEW = 24
NODES_64 = Tree.optimal([[0.5, 0.2, 0.1, 0.05], [0.4, 0.2, 0.1, 0.05], [0.3, 0.2, 0.1], [0.2, 0.1]], 64)
TREES = {"plain": Tree([]), "chain": Tree.chain(4), "nodes64": NODES_64}


def on_gpu(family="llama", **overrides):
    model = tiny(family, **overrides)
    heads = heads_for(model)
    return model.cuda(), heads.cuda()


def limits_of(eos):
    """Limits of a single row on the GPU."""
    return Limits([200], [0], eos, device="cuda")


def batch(rows):
    ids, mask = padded(rows)
    return ids.cuda(), mask.cuda()


@pytest.mark.parametrize("backend", ["eager", "graph"])
@pytest.mark.parametrize("tree", TREES.values(), ids=TREES.keys())
@pytest.mark.parametrize("family", FAMILIES)
def test_text_on_a_gpu_equals_transformers(family, tree, backend):
    model, heads = on_gpu(family)
    rows = [row.cuda() for row in prompts(3, [7, 1, 19])]
    expected = [transformers_greedy(model, row, NEW) for row in rows]
    ids, mask = batch(rows)
    with MedusaModel(model, heads, tree, backend=backend) as medusa:
        output = medusa.generate(ids, mask, max_new_tokens=NEW)
        assert medusa.backbone.fuse == (backend == "graph")
    assert output.sequences[:, ids.shape[1] :].tolist() == expected
    assert [sum(a) + len(a) for a in output.accept_lengths] == [NEW - 1] * 3
    if tree.num_nodes > 1:
        assert_some_accepted(output)


@pytest.mark.parametrize("family", MORE_FAMILIES)
def test_text_of_other_families_on_a_gpu_equals_transformers(family):
    """In captured steps; experts that cannot be captured have eager ones."""
    model, heads = on_gpu(family)
    rows = [row.cuda() for row in prompts(3, [7, 1, 19])]
    expected = [transformers_greedy(model, row, NEW) for row in rows]
    ids, mask = batch(rows)
    with MedusaModel(model, heads, NODES_64) as medusa:
        output = medusa.generate(ids, mask, max_new_tokens=NEW)
        assert medusa.backbone.fuse or "mixtral" in family or "moe" in family
    assert output.sequences[:, ids.shape[1] :].tolist() == expected
    assert_some_accepted(output)


@pytest.mark.parametrize("form", FORMS)
def test_text_with_stored_weights_on_a_gpu_is_that_of_the_numbers_they_stand_for(form):
    model, heads = on_gpu(hidden_size=128, intermediate_size=256, head_dim=32, initializer_range=0.2)
    rows = [row.cuda() for row in prompts(3, [7, 1, 19])]
    exact = [transformers_greedy(model, row, NEW) for row in rows]
    stored = in_form(model, form)
    for name, packed in stored.named_modules():
        if isinstance(packed, PackedLinear):
            wide = quantised.dequantised(packed.weight, packed.scale, codes=packed.codes)
            model.get_submodule(name).weight.data.copy_(wide)
    expected = [transformers_greedy(model, row, NEW) for row in rows]
    assert expected != exact, "quantising changes nothing: the test shows nothing"
    ids, mask = batch(rows)
    with MedusaModel(stored, heads) as medusa:
        for tree in TREES.values():
            output = medusa.generate(ids, mask, max_new_tokens=NEW, tree=tree)
            assert medusa.backbone.fuse
            assert output.sequences[:, ids.shape[1] :].tolist() == expected
    assert_some_accepted(output)


def state_after(medusa, tree, backend, steps, prompt):
    """The tensors of a generation after some steps, run one by one."""
    step = medusa._steps.get(tree, backend)
    selector, limits = Greedy(), limits_of([])
    state = medusa._steps.pool.acquire(Sizes([len(prompt)], 200), 400)
    with torch.no_grad():
        prefill(medusa.backbone, [prompt], state, selector, limits)
        for _ in range(steps):
            step(state, selector, limits)
    rows = int(state.cache.lengths[0])
    return {
        "kv": state.cache.kv[..., :rows, :].clone(),
        **{n: getattr(state, n).clone() for n in ("root", "hidden", "output", "count", "finished", "log", "step")},
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("tree", TREES.values(), ids=TREES.keys())
def test_replay_is_bit_equal_to_the_same_step_run_eagerly(tree, dtype):
    """Not only the text: keys, values, hidden states and counts after 12 steps."""
    model, heads = on_gpu(dtype=dtype, hidden_size=64, num_attention_heads=8)
    [prompt] = [row.cuda() for row in prompts(1, [9])]
    with MedusaModel(model, heads, tree) as medusa:
        captured = state_after(medusa, tree, "graph", 12, prompt)
        # The eager step has the fused layers of the captured one.
        medusa.backbone.choose_layers = lambda captured, **_: False
        eager = state_after(medusa, tree, "eager", 12, prompt)
    assert int(captured["step"]) == 13
    for name, tensor in eager.items():
        assert torch.equal(captured[name], tensor), name


def test_graphs_are_reused_and_follow_new_limits():
    model, heads = on_gpu()
    rows = [row.cuda() for row in prompts(4, [5, 9, 2, 7])]
    with MedusaModel(model, heads, Tree.cartesian([4, 2])) as medusa:
        seen = []
        for row, eos in zip(rows, (3, 5, 1, 0), strict=True):
            output = medusa.generate(row[None], max_new_tokens=40, eos_token_id=eos)
            expected = transformers_greedy(model, row, 40, eos_token_id=eos)
            assert output.sequences[0, len(row) :].tolist() == expected
            [state] = medusa._steps.pool._idle
            seen.append([captured.graphs[0] for captured in state.captured.values()])
        assert all(len(graphs) == 1 and graphs[0] is seen[0][0] for graphs in seen)
        medusa.free()
        assert medusa._steps.pool._idle == []


def test_captured_steps_use_changed_weights():
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


@pytest.mark.parametrize("objects", [1, 2])
def test_threads_on_streams_of_their_own_replay_in_turn(objects):
    """Graphs of one step share memory: no two run at once, and one thread's work ends before the next begins."""
    model, heads = on_gpu(max_position_embeddings=256)
    rows = [row.cuda() for row in prompts(2, [9])]
    expected = [transformers_greedy(model, row, 100) for row in rows]
    medusas = [MedusaModel(model, heads, NODES_64) for _ in range(objects)]
    settings = [{}, {"tree": "auto"}, {"logits_processor": [lambda ids, scores: scores], "streamer": True}]
    torch.cuda.synchronize()
    got, errors = [], []

    def write(thread):
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                for turn in range(9):
                    given = dict(settings[(thread + turn) % 3])
                    if given.pop("streamer", False):
                        given["streamer"] = Recorder()
                    medusa = medusas[(thread + turn) % objects]
                    output = medusa.generate(rows[thread % 2][None], max_new_tokens=100, **given)
                    got.append((thread % 2, output.sequences[0, 9:].tolist()))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=write, args=(thread,)) for thread in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert len(got) == 36
    assert all(text == expected[row] for row, text in got)


def test_a_captured_step_neither_allocates_nor_synchronises():
    model, heads = on_gpu()
    [prompt] = [row.cuda() for row in prompts(1, [9])]
    with MedusaModel(model, heads, NODES_64) as medusa, torch.no_grad():
        step = medusa._steps.get(NODES_64, "graph")
        selector, limits = Greedy(), limits_of([VOCAB])
        state = medusa._steps.pool.acquire(Sizes([9], 200), 400)
        prefill(medusa.backbone, [prompt], state, selector, limits)
        step(state, selector, limits)
        torch.cuda.synchronize()
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=kinds) as profile:
            for _ in range(10):
                step(state, selector, limits)
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


WARPERS = [lp.TemperatureLogitsWarper(0.8), lp.TopKLogitsWarper(6), lp.TopPLogitsWarper(0.9), lp.MinPLogitsWarper(0.01)]
WARPERS += [lp.TypicalLogitsWarper(0.9), lp.EpsilonLogitsWarper(1e-4), lp.LogitNormalization()]
SELECTORS = {
    "greedy": Greedy(),
    "sampled": Sampling(WARPERS),
    "sampled at a temperature": Sampling(WARPERS[:1]),
    "sampled at once": Sampling(WARPERS[:4]),
    "typical": TypicalAcceptance(),
    "typical hot": TypicalAcceptance(temperature=2.0),
}


@pytest.mark.parametrize("selector", SELECTORS.values(), ids=SELECTORS)
def test_no_host_reads_within_an_eager_step(selector):
    model, heads = on_gpu()
    [prompt] = [row.cuda() for row in prompts(1, [9])]
    with MedusaModel(model, heads, NODES_64) as medusa, torch.no_grad():
        step = medusa._steps.get(NODES_64, "eager")
        limits = limits_of([VOCAB])
        state = medusa._steps.pool.acquire(Sizes([9], 200), 400)
        prefill(medusa.backbone, [prompt], state, selector, limits)
        step(state, selector, limits)
        try:
            torch.cuda.set_sync_debug_mode("error")
            step(state, selector, limits)
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


@pytest.mark.compiled
def test_the_compiled_backend_is_captured(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    model, heads = on_gpu(num_hidden_layers=1)
    rows = [row.cuda() for row in prompts(2, [5, 9])]
    ids, mask = batch(rows)
    with MedusaModel(model, heads, Tree.cartesian([3, 2]), backend="compiled") as medusa:
        output = medusa.generate(ids, mask, max_new_tokens=20)
        [state] = medusa._steps.pool._idle
        assert len(state.captured) == 1
    assert output.sequences[:, ids.shape[1] :].tolist() == [transformers_greedy(model, row, 20) for row in rows]


SETTINGS = {
    "sampling": {"do_sample": True, "seed": 1},
    "warpers": {"do_sample": True, "seed": 1, "temperature": 0.7, "top_p": 0.9, "top_k": 6, "min_p": 0.02},
    "processors": {"repetition_penalty": 1.2, "no_repeat_ngram_size": 3},
    "sampling with processors": {"do_sample": True, "seed": 2, "repetition_penalty": 1.2, "top_p": 0.9},
    "scores": {"output_scores": True, "output_logits": True},
    "typical": {"acceptance": "typical"},
    "typical hot": {"acceptance": "typical", "temperature": 1.5, "min_new_tokens": 5, "eos_token_id": 3},
    "late end": {"min_new_tokens": 9, "eos_token_id": [3, 5]},
}


@pytest.mark.parametrize("tree", [Tree([]), Tree.cartesian([3, 2, 2]), Tree.chain(2).with_lookup(5)], ids=repr)
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_every_token_selection_is_captured(settings, tree):
    """Replayed text equals eager text; twice, so that a second generation replays what the first one captured."""
    model, heads = on_gpu(max_position_embeddings=256)
    ids, mask = batch([row.cuda() for row in prompts(3, [7, 1, 19])])
    with MedusaModel(model, heads, tree) as medusa:
        captured = [medusa.generate(ids, mask, max_new_tokens=40, **settings) for _ in range(2)]
        [state] = medusa._steps.pool._idle
        graphs = [len(kept.graphs) for kept in state.captured.values()]
        medusa.backend = "eager"
        eager = medusa.generate(ids, mask, max_new_tokens=40, **settings)
    on_host = "repetition_penalty" in settings or "output_scores" in settings
    assert graphs == [2 if on_host else 1]
    for output in captured:
        assert output.sequences.tolist() == eager.sequences.tolist()
        assert output.accept_lengths == eager.accept_lengths
    if "output_scores" in settings:
        for ours, theirs in zip(captured[1].scores, eager.scores, strict=True):
            # Logits of up to 9, whose sums are taken in another order: tens of roundings of 5e-7 each.
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)


@pytest.mark.parametrize("settings", ["processors", "warpers", "typical"])
def test_lm_head_runs_on_the_captures_stream_before_it_is_captured(settings):
    model, heads = on_gpu()
    [row] = [row.cuda() for row in prompts(1, [9])]
    calls = []

    def note(*_):
        calls.append((torch.cuda.is_current_stream_capturing(), torch.cuda.current_stream().cuda_stream))

    with MedusaModel(model, heads, Tree.chain(2)) as medusa:
        handle = model.lm_head.register_forward_hook(note)  # with a hook, token selection calls the module itself
        medusa.generate(row[None], max_new_tokens=12, **SETTINGS[settings])
        handle.remove()
    capture = next(number for number, (capturing, _) in enumerate(calls) if capturing)
    assert (False, calls[capture][1]) in calls[:capture]


def test_sampling_over_a_large_vocabulary_is_captured(monkeypatch):
    """At once, and by the processors, for which PyTorch sorts long rows by other kernels than the tests' short ones."""
    model = tiny(vocab_size=32000)
    with torch.no_grad():
        model.lm_head.weight[:-VOCAB] = 0  # few tokens are likely, so that some drafts are right
    model, heads = model.cuda(), heads_for(model).cuda()
    [row] = [row.cuda() for row in prompts(1, [9], vocab=32000)]
    with MedusaModel(model, heads, Tree.cartesian([3, 2, 2])) as medusa:
        captured = medusa.generate(row[None], max_new_tokens=40, **SETTINGS["warpers"])
        medusa.backend = "eager"
        eager = medusa.generate(row[None], max_new_tokens=40, **SETTINGS["warpers"])
        monkeypatch.setattr(sampling, "DRAW_AT_ONCE", False)
        medusa.backend = "graph"
        at_each_depth = medusa.generate(row[None], max_new_tokens=40, **SETTINGS["warpers"])
    for output in (captured, at_each_depth):
        assert output.sequences.tolist() == eager.sequences.tolist()
        assert output.accept_lengths == eager.accept_lengths
    assert_some_accepted(eager)


def test_a_step_in_two_graphs_is_captured_again_after_growth(monkeypatch):
    """Growth drops the graphs that were bound to the text: nothing of their memory pool is left."""
    monkeypatch.setattr(runner, "HEADROOM", 4)
    model, heads = on_gpu(max_position_embeddings=512)
    [row] = [row.cuda() for row in prompts(1, [20])]
    with MedusaModel(model, heads, Tree.chain(2).with_lookup(5)) as medusa:
        for tree in (Tree.chain(2).with_lookup(5), Tree.chain(2), Tree.chain(2).with_lookup(5)):
            output = medusa.generate(row[None], max_new_tokens=200, repetition_penalty=1.2, tree=tree)
            expected = transformers_greedy(model, row, 200, repetition_penalty=1.2)
            assert output.sequences[0, 20:].tolist() == expected
