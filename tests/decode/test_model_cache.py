"""`custom_generate=medusa_generate` leaves the model unchanged and caches its work; suspended swaps."""

import functools
import gc
import weakref

import pytest
import torch
from calls import NEW, TREE, Recorder, attentions, kept, plain, with_heads
from models import heads_for, prompts, tiny, transformers_greedy

from medusa_decoding import MedusaModel, Tree
from medusa_decoding.backbone.attention_swap import AttentionSwap, TreeAttention


def test_the_model_is_restored_after_success_and_failure(model, heads):
    own, hooks = attentions(model), dict(vars(model))
    state = {name: value.clone() for name, value in model.state_dict().items()}
    [row] = prompts(1, [6])

    class StopError(BaseException):
        pass

    def interrupt(input_ids, scores):
        assert all(isinstance(attention, TreeAttention) for attention in attentions(model))
        raise StopError

    with_heads(model, heads, row[None])
    assert attentions(model) == own
    for processor, error in ((interrupt, StopError), (lambda ids, scores: 1 / 0, ZeroDivisionError)):
        with pytest.raises(error):
            with_heads(model, heads, row[None], logits_processor=[processor])
        assert attentions(model) == own
    assert vars(model) == hooks
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert with_heads(model, heads, row[None])[0, 6:].tolist() == transformers_greedy(model, row, NEW)


def test_the_next_call_reuses_the_cached_model(model, heads, monkeypatch):
    compiled = []

    def compile_(function, **kwargs):
        compiled.append(function)
        return function

    monkeypatch.setattr("torch.compile", compile_)
    [row] = prompts(1, [6])
    fingerprints, expected = [], transformers_greedy(model, row, NEW)
    for _ in range(3):
        assert with_heads(model, heads, row[None], backend="compiled")[0, 6:].tolist() == expected
        [medusa] = kept(model)
        fingerprints.append(medusa._steps._made_for)
    assert len(compiled) == 1
    assert len(set(fingerprints)) == 1
    # A plain step in between does not disturb it; a changed weight is noticed.
    plain(model, row[None])
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight.mul_(-1.5)
    changed = transformers_greedy(model, row, NEW)
    assert changed != expected
    assert with_heads(model, heads, row[None], backend="compiled")[0, 6:].tolist() == changed
    assert len(compiled) == 2
    assert kept(model) == [medusa]


@pytest.mark.parametrize("backend", ["eager", "compiled"])
def test_the_cache_does_not_keep_a_model_alive(heads, monkeypatch, backend):
    monkeypatch.setattr("torch.compile", functools.partial(torch.compile, backend="eager"))
    model = tiny()
    [row] = prompts(1, [6])
    for _ in range(2):
        with_heads(model, heads, row[None], backend=backend)
    weights = [weakref.ref(parameter) for parameter in model.parameters()]
    seen = weakref.ref(model)
    [medusa] = map(weakref.ref, kept(model))
    del model
    gc.collect()  # the compiler releases its work when the step is freed,
    gc.collect()  # and that work is freed after it
    assert seen() is None
    assert medusa() is None
    assert not any(weight() is not None for weight in weights)


def test_two_sets_of_heads_on_one_model(model, heads):
    other = heads_for(model, num_heads=2, seed=9)
    third = heads_for(model, num_heads=1, seed=10)
    [row] = prompts(1, [6])
    expected = transformers_greedy(model, row, NEW)
    for given in (heads, other, heads, other):
        assert with_heads(model, given, row[None])[0, 6:].tolist() == expected
    assert {id(medusa.heads) for medusa in kept(model)} == {id(heads), id(other)}
    first, second = kept(model)
    assert with_heads(model, third, row[None], tree=Tree.chain(1))[0, 6:].tolist() == expected
    assert kept(model)[0] is second
    assert not any(isinstance(attention, TreeAttention) for attention in attentions(model))
    first.undo()
    assert with_heads(model, heads, row[None])[0, 6:].tolist() == expected


def test_a_call_within_a_call_and_a_medusa_model_of_the_same_base(model, heads):
    rows = prompts(2, [6])
    expected = [transformers_greedy(model, row, NEW) for row in rows]
    own, inner = attentions(model), []

    def write(seen):
        if seen == 5:
            inner.append(with_heads(model, heads, rows[1][None])[0, 6:].tolist())

    assert with_heads(model, heads, rows[0][None], streamer=Recorder(write))[0, 6:].tolist() == expected[0]
    assert inner == [expected[1]]
    assert attentions(model) == own
    with MedusaModel(model, heads, TREE) as medusa:
        assert with_heads(model, heads, rows[0][None])[0, 6:].tolist() == expected[0]
        assert medusa.generate(rows[1][None], max_new_tokens=NEW).sequences[0, 6:].tolist() == expected[1]
        assert all(isinstance(attention, TreeAttention) for attention in attentions(model))
    assert attentions(model) == own


def test_a_changed_model_is_wrapped_again(model, heads):
    [row] = prompts(1, [6])
    with_heads(model, heads, row[None])
    [before] = kept(model)
    model.model.layers = model.model.layers[:1]
    assert with_heads(model, heads, row[None])[0, 6:].tolist() == transformers_greedy(model, row, NEW)
    [after] = kept(model)
    assert after is not before
    model.to(torch.bfloat16)
    with pytest.raises(
        ValueError, match=r"heads: expected torch.bfloat16 on cpu like the base model, got torch.float32"
    ):
        with_heads(model, heads, row[None])
    assert not any(isinstance(attention, TreeAttention) for attention in attentions(model))


def test_a_swap_resumes_with_the_same_modules(model):
    own = attentions(model)
    swap = AttentionSwap(model.model.layers)
    stand_ins = attentions(model)
    for _ in range(2):
        swap.suspend()
        swap.suspend()
        assert (attentions(model), swap.active) == (own, False)
        swap.resume()
        swap.resume()
        assert (attentions(model), swap.active) == (stand_ins, True)
    assert [attention.users for attention in stand_ins] == [1, 1]
    swap.suspend()
    swap.undo()
    assert (attentions(model), swap.active) == (own, False)
    with pytest.raises(ValueError, match="after undo"):
        swap.resume()
    assert attentions(model) == own


def test_a_suspended_swap_does_not_disturb_other_swaps(model):
    own = attentions(model)
    first = AttentionSwap(model.model.layers)
    first.suspend()
    second = AttentionSwap(model.model.layers)
    theirs = attentions(model)
    first.undo()
    assert attentions(model) == theirs
    third = AttentionSwap(model.model.layers)
    third.suspend()
    assert attentions(model) == theirs
    third.resume()
    second.undo()
    assert attentions(model) == theirs
    del third
    gc.collect()
    assert attentions(model) == own


def test_training_mode_set_while_suspended_is_applied(model):
    swap = AttentionSwap(model.model.layers)
    swap.suspend()
    model.train()
    swap.resume()
    assert all(attention.training for attention in attentions(model))
    model.eval()
    assert not any(attention.training or attention.original.training for attention in attentions(model))


def test_an_attention_replaced_while_suspended_is_swapped_itself_or_refused(model):
    swap = AttentionSwap(model.model.layers)
    swap.suspend()
    model.model.layers[0].self_attn = new = tiny(seed=5).model.layers[0].self_attn
    swap.resume()
    assert model.model.layers[0].self_attn.original is new
    swap.suspend()
    model.model.layers[1].self_attn = torch.nn.Identity()
    with pytest.raises(ValueError, match=r"layer 1: expected an attention of .* got Identity"):
        swap.resume()
    assert model.model.layers[0].self_attn is new


def test_a_suspended_model_says_so_and_outlives_its_base(model, heads):
    medusa = MedusaModel(model, heads, TREE)
    [row] = prompts(1, [6])
    medusa.suspend()
    with pytest.raises(ValueError, match="got a model after suspend"):
        medusa.generate(row[None])
    medusa.resume()
    expected = transformers_greedy(model, row, NEW)
    assert medusa.generate(row[None], max_new_tokens=NEW).sequences[0, 6:].tolist() == expected
    medusa.suspend()
    seen = weakref.ref(model)
    del model
    # The fixture still holds the model, so references are checked on a model that nothing else holds.
    assert seen() is not None
    lonely = MedusaModel(tiny(), heads, TREE)
    lonely.suspend()
    with pytest.raises(ValueError, match="expected the base model still in use, got one that was deleted"):
        lonely.resume()
