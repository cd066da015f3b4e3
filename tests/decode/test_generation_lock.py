"""Several threads share one model; what a generation's own callbacks may and may not do.

Threads that have a model each: test_robustness.py.
"""

import functools
import threading

import pytest
import torch
from calls import TREE, Recorder, attentions, with_heads
from models import heads_for, prompts, tiny, transformers_greedy
from oracles import new_tokens
from test_robustness import in_threads

from medusa_decoding import MedusaModel, Session, Tree
from medusa_decoding.backbone.attention_swap import TreeAttention
from medusa_decoding.decode import loop

NEW = 16
SETTINGS = [
    {},
    {"tree": "auto"},
    {"tree": Tree.chain(4)},
    {"tree": Tree.cartesian([2, 2]).with_lookup(3)},
    {"tree": "auto", "do_sample": True, "seed": 3},
    {"tree": Tree([]), "do_sample": True, "seed": 4, "temperature": 0.8, "top_k": 5},
    {"repetition_penalty": 1.2},
    {"tree": "auto", "repetition_penalty": 1.2, "stopping_criteria": [lambda ids, scores: ids.shape[1] > 20]},
]


@pytest.fixture
def in_one_call_at_a_time(monkeypatch):
    """Fail if two threads run the model at once."""
    inside, forward = [], loop.Backbone.forward

    def alone(*args):
        inside.append(threading.get_ident())
        out = forward(*args)
        assert set(inside) == {threading.get_ident()}
        inside.pop()
        return out

    monkeypatch.setattr(loop.Backbone, "forward", alone)


def text(medusa, row, **settings):
    return new_tokens(medusa.generate(row[None], **{"max_new_tokens": NEW} | settings), len(row))[0]


def calling(function, place):
    """Settings of `generate` with which a streamer, a criterion or a processor calls a function for each token."""
    return {
        "streamer": {"streamer": Recorder(function)},
        "criterion": {"stopping_criteria": [function]},
        "processor": {"logits_processor": [function]},
    }[place]


@pytest.mark.parametrize("objects", [1, 2])
def test_threads_share_a_model(model, in_one_call_at_a_time, objects):
    """Each text, with its own prompt, tree, processors and seed, equals the text generated alone, in any order."""
    rows = prompts(len(SETTINGS), [6, 9, 4, 7])
    medusas = [MedusaModel(model, heads_for(model, seed=1 + index), TREE) for index in range(objects)]
    expected = [text(medusas[0], row, **settings) for row, settings in zip(rows, SETTINGS, strict=True)]
    assert expected[:4] == [transformers_greedy(model, row, NEW) for row in rows[:4]]
    got = {}

    def write(thread):
        for turn in range(len(SETTINGS)):
            index = (turn + 3 * thread) % len(SETTINGS)
            streamer = Recorder() if turn % 2 else None
            medusa = medusas[(thread + turn) % objects]
            got[thread, index] = text(medusa, rows[index], streamer=streamer, **SETTINGS[index])
            assert streamer is None or [token for [token] in streamer.values[1:]] == expected[index]

    in_threads(*(functools.partial(write, thread) for thread in range(5)))
    assert got == {(thread, index): expected[index] for thread in range(5) for index in range(len(SETTINGS))}
    for medusa in medusas:
        assert not medusa._under_way
        medusa.undo()
    assert not any(isinstance(attention, TreeAttention) for attention in attentions(model))


def test_threads_share_a_model_through_transformers(model, in_one_call_at_a_time):
    rows = prompts(4, [6, 8])
    own, got = attentions(model), {}
    sets = [heads_for(model), heads_for(model, num_heads=2, seed=7), heads_for(model, seed=9)]
    expected = [transformers_greedy(model, row, NEW) for row in rows]

    def write(index):
        for turn in range(4):
            tree = "auto" if turn % 2 else Tree.chain(2)
            ids = with_heads(model, sets[(index + turn) % 3], rows[index][None], tree=tree)
            got[index, turn] = ids[0, len(rows[index]) :].tolist()

    in_threads(*(functools.partial(write, index) for index in range(4)))
    assert got == {(index, turn): expected[index] for index in range(4) for turn in range(4)}
    assert attentions(model) == own


def test_an_error_in_one_thread_does_not_affect_the_others(model):
    [row] = prompts(1, [6])
    expected = transformers_greedy(model, row, NEW)
    with MedusaModel(model, heads_for(model), "auto") as medusa:

        def fail():
            for count in range(1, 6):
                calls = []

                def stop(ids, scores, calls=calls, count=count):
                    calls.append(1)
                    return len(calls) == count and 1 / 0

                with pytest.raises(ZeroDivisionError):
                    text(medusa, row, stopping_criteria=[stop])

        def write():
            for _ in range(5):
                assert text(medusa, row) == expected

        in_threads(fail, write, fail, write)
        assert text(medusa, row) == expected


def test_two_threads_take_turns_with_a_session(model):
    [row] = prompts(1, [6])
    expected, session = transformers_greedy(model, row, NEW), Session()
    with MedusaModel(model, heads_for(model), TREE) as medusa:

        def write():
            for _ in range(4):
                assert text(medusa, row, session=session) == expected

        in_threads(write, write, write)


@pytest.mark.parametrize("tree", [TREE, "auto"], ids=["tree", "auto"])
def test_a_generation_within_a_generation(model, tree):
    rows = prompts(3, [6])
    expected = [transformers_greedy(model, row, NEW) for row in rows]
    got = []
    with MedusaModel(model, heads_for(model), tree) as medusa:

        def innermost(*args):
            if len(got) < 4:
                got.append(text(medusa, rows[2]))
            return args[-1]

        within = Recorder(lambda seen: got.append(text(medusa, rows[1], logits_processor=[innermost])))
        assert text(medusa, rows[0], streamer=within, max_new_tokens=4) == expected[0][:4]
        assert text(medusa, rows[0]) == expected[0]
    assert got == [expected[2]] * 4 + [expected[1]] * 5


@pytest.mark.parametrize(("what", "place"), [("undo", "streamer"), ("suspend", "criterion"), ("undo", "processor")])
def test_undo_within_a_generation_is_refused(model, what, place):
    [row] = prompts(1, [6])
    expected = transformers_greedy(model, row, NEW)
    with MedusaModel(model, heads_for(model), TREE) as medusa:

        def call(*args):
            medusa.free()  # frees memory only
            with pytest.raises(ValueError, match=rf"expected {what}\(\) between generations, got it during one"):
                getattr(medusa, what)()
            return args[-1] if place == "processor" else False

        assert text(medusa, row, **calling(call, place)) == expected


def test_undo_by_another_thread_waits(model):
    [row] = prompts(1, [6])
    expected = transformers_greedy(model, row, NEW)
    for _ in range(3):
        medusa, got = MedusaModel(model, heads_for(model), TREE), []
        begun = threading.Event()
        streamer = Recorder(lambda seen, begun=begun: begun.set())
        writer = threading.Thread(
            target=lambda medusa=medusa, got=got, streamer=streamer: got.append(text(medusa, row, streamer=streamer))
        )
        writer.start()
        begun.wait(timeout=60)
        medusa.undo()
        writer.join(timeout=60)
        assert got == [expected]
        with pytest.raises(ValueError, match=r"after undo\(\)"):
            text(medusa, row)
    assert not any(isinstance(attention, TreeAttention) for attention in attentions(model))


# Weights that change


def test_a_model_cast_after_it_was_wrapped_is_refused_until_its_heads_are(model):
    [row] = prompts(1, [6])
    heads = heads_for(model)
    with MedusaModel(model, heads, TREE) as medusa:
        expected = text(medusa, row)
        model.to(torch.float16)
        wanted = r"heads: expected torch\.float16 on cpu like the base model, got torch\.float32 on cpu; convert both"
        with pytest.raises(ValueError, match=wanted):
            text(medusa, row)
        heads.to(torch.float16)
        assert text(medusa, row) == text(medusa, row, tree=Tree([]))
        model.double()
        with pytest.raises(ValueError, match=r"base_model: expected .* got torch\.float64"):
            text(medusa, row)
        model.float()
        with pytest.raises(
            ValueError, match=r"heads: expected torch\.float32 .* got torch\.float16 on cpu; convert both"
        ):
            text(medusa, row)
        heads.float()
        assert len(text(medusa, row)) == len(expected)
        model.model.layers[1].to("meta")
        with pytest.raises(ValueError, match=r"base_model: expected on one device, got \['cpu', 'meta'\]"):
            text(medusa, row)


def test_a_vocabulary_resized_after_wrapping_is_refused(model):
    [row] = prompts(1, [6])
    with MedusaModel(model, heads_for(model), TREE) as medusa:
        model.resize_token_embeddings(16)
        with pytest.raises(ValueError, match="heads: expected vocab_size 16 like the base model, got 11"):
            text(medusa, row)


def test_a_decoder_replaced_after_wrapping_is_refused(model):
    [row] = prompts(1, [6])
    with MedusaModel(model, heads_for(model), TREE) as medusa:
        model.model = tiny(seed=5).model
        with pytest.raises(ValueError, match=r"base_model\.model: expected the decoder that was wrapped, got another"):
            text(medusa, row)
