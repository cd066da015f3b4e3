"""What is cached between generations: states and steps, and when they are rebuilt."""

import pytest
import torch
from models import heads_for, prompts, tiny, transformers_greedy
from peft import LoraConfig, get_peft_model

from medusa_decoding import MedusaModel, Tree
from medusa_decoding.decode.runtime import state_pool
from medusa_decoding.decode.runtime.memory import Sizes
from medusa_decoding.decode.runtime.state_pool import StatePool


@pytest.fixture
def medusa():
    model = tiny()
    with MedusaModel(model, heads_for(model), Tree.chain(2)) as medusa:
        yield medusa


def test_cached_states_are_found_by_shape_and_cleared(medusa, monkeypatch):
    monkeypatch.setattr(state_pool, "SMALL_STATES", 0)
    pool = StatePool(medusa.backbone, keep=2)
    small, large = pool.acquire(Sizes([5], 10), 60), pool.acquire(Sizes([5], 10), 200)
    wide = pool.acquire(Sizes([5], 500), 60)
    assert wide is not small
    for state in (small, large):
        state.count.fill_(7)
        state.captured["step", "key"] = "graph"
        pool.release(state)
    assert pool.acquire(Sizes([9], 10), 250) is large
    assert int(large.count) == 0
    pool.release(large)
    assert pool.acquire(Sizes([9], 10), 250) is large
    pool.release(large)
    pool.forget("step")
    assert small.captured == large.captured == {}
    pool.release(wide)  # two are kept: the most recent ones
    assert pool.acquire(Sizes([5], 10), 60) is not small
    assert pool.acquire(Sizes([5], 500), 60) is wide


def test_graphs_over_acquired_states_are_dropped_with_their_step(medusa):
    """A session holds its state between calls; a step that is dropped meanwhile must also free its graphs there."""
    pool = StatePool(medusa.backbone, keep=2)
    state = pool.acquire(Sizes([5], 10), 60)
    state.captured |= {("dropped", "key"): "graph", ("kept", "key"): "graph"}
    pool.forget("dropped")
    assert state.captured == {("kept", "key"): "graph"}
    wider, _ = pool.enlarge(state, Sizes([5], 500), 60)
    assert wider is not state
    wider.captured |= {("dropped", "key"): "graph", ("kept", "key"): "graph"}
    pool.forget("dropped")
    assert wider.captured == {("kept", "key"): "graph"}
    pool.clear()
    assert wider.captured == {}


def changes(model):
    linear = model.base_model.model.model.layers[0].self_attn.q_proj
    handle = []
    yield "adapter off", model.base_model.disable_adapter_layers
    yield "adapter on", model.base_model.enable_adapter_layers
    yield "other adapter", lambda: model.set_adapter("other")
    yield "scaled", lambda: linear.scaling.update(other=0.5)
    yield "merged", model.merge_adapter
    yield "hook", lambda: handle.append(linear.register_forward_hook(lambda *_: None))
    yield "hook removed", lambda: handle.pop().remove()
    yield "training", model.train
    yield "weight in place", lambda: linear.base_layer.weight.data.__class__ and linear.base_layer.weight.mul_(2)
    yield "weight replaced", lambda: setattr(linear.base_layer, "weight", torch.nn.Parameter(torch.ones(32, 32)))


def test_steps_are_rebuilt_when_the_model_would_compute_something_else():
    model = get_peft_model(tiny(), LoraConfig(target_modules=["q_proj"], r=2, lora_dropout=0.1))
    model.add_adapter("other", LoraConfig(target_modules=["q_proj"], r=2))
    with MedusaModel(model.eval()) as medusa, torch.no_grad():
        before = medusa._steps.fingerprint()
        assert medusa._steps.fingerprint() == before
        for name, change in changes(model):
            change()
            after = medusa._steps.fingerprint()
            assert after != before, name
            before = after


def test_models_and_calls_of_inference_mode(medusa):
    [row] = prompts(1, [9])
    expected = transformers_greedy(medusa.base, row, 12)
    medusa._steps.pool.keep = 2
    for backend in ("eager", "compiled"):
        assert medusa._steps.fingerprint()
        with torch.inference_mode():
            inside = medusa.generate(row[None].clone(), max_new_tokens=12).sequences[0, 9:].tolist()
        assert inside == expected, backend
        assert medusa.generate(row[None], max_new_tokens=12).sequences[0, 9:].tolist() == expected
    with torch.inference_mode():
        model = tiny()
        with MedusaModel(model, heads_for(model), Tree.chain(2)) as loaded:
            assert loaded._steps.fingerprint()
            assert loaded.generate(row[None].clone(), max_new_tokens=12).sequences[0, 9:].tolist() == expected
