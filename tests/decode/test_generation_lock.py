"""Several threads share one model; what a generation's own callbacks may and may not do.

Threads that have a model each: test_robustness.py.
"""

import functools
import queue
import threading

import pytest
import torch
from calls import TREE, attentions, with_heads
from models import heads_for, padded, prompts, tiny, transformers_greedy
from oracles import byte_tokenizer, new_tokens
from peft import LoraConfig, get_peft_model
from test_robustness import Streamer, in_threads
from transformers import TextIteratorStreamer

from medusa_decoding import MedusaModel, Session, Tree
from medusa_decoding.backbone.attention_swap import TreeAttention
from medusa_decoding.backbone.generation_lock import GenerationLock
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


def no_patience(monkeypatch):
    """Shorten the time that a waiting thread allows the caller's code to return."""
    monkeypatch.setattr("medusa_decoding.backbone.generation_lock.PATIENCE", 0.01)


def text(medusa, row, **settings):
    return new_tokens(medusa.generate(row[None], **{"max_new_tokens": NEW} | settings), len(row))[0]


def calling(function, place):
    """Settings of `generate` with which a streamer, a criterion or a processor calls a function for each token."""
    return {
        "streamer": {"streamer": Streamer(function)},
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
            streamer = Streamer() if turn % 2 else None
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


def test_a_reader_may_generate_before_it_reads_on(model, monkeypatch):
    """The streamer waits for its reader, and the reader for its own generation."""
    no_patience(monkeypatch)
    rows = prompts(2, [6])
    expected = [transformers_greedy(model, row, NEW) for row in rows]
    read = queue.Queue(maxsize=1)
    streamer = Streamer(lambda seen: read.put(seen, timeout=60))
    got = []
    with MedusaModel(model, heads_for(model), TREE) as medusa:
        writer = threading.Thread(target=lambda: got.append(text(medusa, rows[0], streamer=streamer)))
        writer.start()
        read.get(timeout=60)
        assert text(medusa, rows[1]) == expected[1]
        assert with_heads(model, medusa.heads, rows[1][None])[0, 6:].tolist() == expected[1]
        with pytest.raises(ValueError, match=r"expected undo\(\) between generations"):
            medusa.undo()
        for _ in range(NEW):
            read.get(timeout=60)
        writer.join(timeout=60)
        assert got == [expected[0]]


@pytest.mark.parametrize("place", ["streamer", "criterion", "processor"])
def test_a_callback_may_wait_for_another_thread(model, place, monkeypatch):
    no_patience(monkeypatch)
    rows = prompts(2, [6])
    expected = [transformers_greedy(model, row, NEW) for row in rows]
    got = []
    with MedusaModel(model, heads_for(model), "auto") as medusa:

        def ask(*args):
            if len(got) < 3:
                thread = threading.Thread(target=lambda: got.append(text(medusa, rows[1])))
                thread.start()
                thread.join(timeout=60)
            return args[-1] if place == "processor" else False

        assert text(medusa, rows[0], **calling(ask, place)) == expected[0]
        assert text(medusa, rows[0]) == expected[0]
    assert got == [expected[1]] * 3


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

        within = Streamer(lambda seen: got.append(text(medusa, rows[1], logits_processor=[innermost])))
        assert text(medusa, rows[0], streamer=within, max_new_tokens=4) == expected[0][:4]
        assert text(medusa, rows[0]) == expected[0]
    assert got == [expected[2]] * 4 + [expected[1]] * 5


def test_a_streamers_reader_may_end_the_with_block(model):
    """`with` ends while the generation's thread returns: undo waits for it."""
    model = tiny(vocab_size=256)
    [row] = prompts(1, [6])
    tokenizer = byte_tokenizer()
    expected = tokenizer.decode(transformers_greedy(model, row, NEW))
    for _ in range(5):
        streamer, errors = TextIteratorStreamer(tokenizer, skip_prompt=True), []

        def write(streamer=streamer, errors=errors):
            try:
                medusa.generate(row[None], max_new_tokens=NEW, streamer=streamer)
            except BaseException as error:
                errors.append(error)

        with MedusaModel(model, heads_for(model), TREE) as medusa:
            thread = threading.Thread(target=write)
            thread.start()
            assert "".join(streamer) == expected
        assert not any(isinstance(attention, TreeAttention) for attention in attentions(model))
        thread.join(timeout=60)
        assert errors == []


@pytest.mark.parametrize("place", ["streamer", "criterion", "processor"])
@pytest.mark.parametrize("what", ["undo", "suspend"])
def test_undo_within_a_generation_is_refused(model, what, place, monkeypatch):
    no_patience(monkeypatch)
    [row] = prompts(1, [6])
    expected = transformers_greedy(model, row, NEW)
    with MedusaModel(model, heads_for(model), TREE) as medusa:

        def call(*args):
            with pytest.raises(ValueError, match=rf"expected {what}\(\) between generations, got it during one"):
                getattr(medusa, what)()
            return args[-1] if place == "processor" else False

        assert text(medusa, row, **calling(call, place)) == expected
        # Not even a thread that a callback waits for.
        errors = []

        def undo():
            try:
                medusa.undo()
            except ValueError as error:
                errors.append(error)

        def ask(seen):
            if seen == 3:
                thread = threading.Thread(target=undo)
                thread.start()
                thread.join(timeout=60)

        assert text(medusa, row, streamer=Streamer(ask)) == expected
        assert len(errors) == 1
        # Calls that only free memory are allowed at any time.
        assert text(medusa, row, streamer=Streamer(lambda seen: medusa.free())) == expected


def test_undo_by_another_thread_waits(model):
    [row] = prompts(1, [6])
    expected = transformers_greedy(model, row, NEW)
    for _ in range(3):
        medusa, got = MedusaModel(model, heads_for(model), TREE), []
        begun = threading.Event()
        streamer = Streamer(lambda seen, begun=begun: begun.set())
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


def test_an_interrupt_while_waiting_does_not_hold_the_lock(monkeypatch):
    no_patience(monkeypatch)
    lock, begun, end, waited = GenerationLock(), threading.Event(), threading.Event(), []

    def hold():
        with lock.held():
            begun.set()
            end.wait(timeout=60)

    def interrupt(condition, *args):
        waited.append(1)
        raise KeyboardInterrupt

    holder = threading.Thread(target=hold)
    holder.start()
    begun.wait(timeout=60)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Condition, "wait", interrupt)
        with pytest.raises(KeyboardInterrupt), lock.held():
            pass
    assert waited == [1]
    assert lock.holder == holder.ident
    end.set()
    with lock.held():
        assert lock.holder == threading.get_ident()
    holder.join(timeout=60)
    assert lock.holder is None
    assert not lock._under_way


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


CHANGES = {
    "to": lambda model, medusa: model.to(torch.bfloat16),
    "heads": lambda model, medusa: medusa.heads.to(torch.bfloat16),
    "adapter": lambda model, medusa: model.set_adapter("other"),
    "merged": lambda model, medusa: model.merge_adapter(),
    "new adapter": lambda model, medusa: model.add_adapter("third", LoraConfig(target_modules=["q_proj"], r=2)),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_weights_changed_within_a_generation_are_refused(change):
    base = tiny()
    rows = prompts(2, [6, 9])
    ids, mask = padded(rows)
    settings = LoraConfig(target_modules=["q_proj"], r=2, init_lora_weights=False)
    model = get_peft_model(base, settings)
    model.add_adapter("other", settings)
    model.eval()
    with MedusaModel(model, heads_for(tiny()), TREE) as medusa:
        calls = []

        def once(ids, scores):
            calls.append(1)
            if len(calls) == 5:
                change(model, medusa)
            return False

        with pytest.raises(ValueError, match=r"base_model, heads: expected their weights and adapters left alone"):
            medusa.generate(ids, mask, max_new_tokens=NEW, stopping_criteria=[once])
        assert len(calls) >= 5


def test_the_error_that_ends_a_with_block_is_raised_also_during_a_generation(model, monkeypatch, caplog):
    no_patience(monkeypatch)
    [row] = prompts(1, [6])
    begun, end = threading.Event(), threading.Event()

    def wait(seen):
        begun.set()
        end.wait(timeout=60)

    medusa = MedusaModel(model, heads_for(model), TREE)
    writer = threading.Thread(target=text, args=(medusa, row), kwargs={"streamer": Streamer(wait)})
    writer.start()
    assert begun.wait(timeout=60)
    with pytest.raises(KeyError, match="the caller's own"), medusa:
        raise KeyError("the caller's own")
    assert "expected undo() between generations" in caplog.text
    end.set()
    writer.join(timeout=60)
    medusa.undo()
    assert not any(isinstance(attention, TreeAttention) for attention in attentions(model))


def test_a_nested_block_may_name_a_device_when_the_outer_one_did_not():
    """As `medusa_generate` does: it waits for what another thread has launched on that device."""
    lock = GenerationLock()
    with lock.held(), lock.held(torch.device("cuda")):
        pass
    assert lock._device == torch.device("cuda")
