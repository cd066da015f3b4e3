"""The engine: rows join and leave between steps, and each gets what `generate` gives it alone."""

from __future__ import annotations

import itertools
import random
import threading
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from callers import Caller, alone
from models import VOCAB, heads_for, prompts, tiny
from torch.overrides import TorchFunctionMode

from medusa_decoding import MedusaModel, Tree
from medusa_decoding.decode.runtime import progress
from medusa_decoding.decode.runtime.progress import STEPS_LATE
from medusa_decoding.serving import prompt_scores, scheduler
from medusa_decoding.serving.engine import Engine
from medusa_decoding.serving.groups import Groups
from medusa_decoding.serving.slots import Slots
from medusa_decoding.serving.ticket import Delta, EngineClosedError, QueueFullError

TREES = [None, "auto", Tree([]), Tree.chain(3), Tree.cartesian([3, 2]), Tree.dynamic(6, 3)]
SETTINGS: list[dict[str, Any]] = [
    {},
    {"do_sample": True, "temperature": 0.7},
    {"do_sample": True, "temperature": 1.6},
    {"do_sample": True, "temperature": 1.1, "top_p": 0.8},
    {"do_sample": True, "top_k": 3},
    {"repetition_penalty": 1.4},
    {"do_sample": True, "temperature": 0.9, "repetition_penalty": 1.2},
    {"eos_token_id": [4, 7]},
]


@pytest.fixture(params=["llama", "qwen3", "gemma3", "window"])
def model(request):
    window = {"sliding_window": 7} if request.param == "window" else {}
    base = tiny("mistral" if window else request.param, max_position_embeddings=160, **window)
    return MedusaModel(base, heads_for(base))


@pytest.fixture
def llama():
    base = tiny(max_position_embeddings=160)
    return MedusaModel(base, heads_for(base))


@pytest.fixture
def late(monkeypatch):
    """Results read one step late from a copy, as on a GPU."""
    monkeypatch.setitem(STEPS_LATE, "cpu", 1)


def jobs(count: int, seed: int) -> list[tuple[list[int], dict[str, Any]]]:
    drawn = random.Random(seed)
    found = []
    for number, prompt in enumerate(prompts(count, [1, 5, 12, 30, 47, 3], seed=seed)):
        settings = dict(drawn.choice(SETTINGS)) | {"max_new_tokens": drawn.randint(1, 40), "seed": number}
        found.append((prompt.tolist(), settings))
    return found


@pytest.mark.parametrize("slots", [3, 8])
def test_every_row_gets_what_it_gets_alone(model: MedusaModel, slots: int) -> None:
    asked, drawn = jobs(40, slots), random.Random(slots)
    expected = [alone(model, prompt, **settings) for prompt, settings in asked]
    with Engine(model, slots=slots, stall_seconds=0.0) as engine:
        callers = []
        for prompt, settings in asked:
            tree = drawn.choice(TREES if "cpu" in STEPS_LATE else [*TREES, Tree.chain(2).with_lookup(3)])
            callers.append(Caller(engine, prompt, tree=tree, **settings))
            time.sleep(drawn.choice([0.0, 0.0, 0.01]))  # so that rows join while others run
        assert [caller.tokens() for caller in callers] == expected
        for caller, (_, settings) in zip(callers, asked, strict=True):
            ended = caller.tokens()[-1] in settings.get("eos_token_id", [])
            assert caller.finish() == ("stop" if ended else "length")
        stats = engine.stats()
    assert stats.new_tokens == sum(map(len, expected))
    assert stats.prompt_tokens == sum(len(prompt) for prompt, _ in asked)
    assert sum(stats.finished.values()) == len(asked)
    accepted = [count for caller in callers for ticket in caller.tickets for count in ticket.accepted]
    assert stats.accepted_histogram == {count: accepted.count(count) for count in set(accepted)}
    assert sum(accepted) + len(accepted) + len(asked) == stats.new_tokens


@pytest.mark.usefixtures("late")
@pytest.mark.parametrize("slots", [2])
def test_every_row_gets_what_it_gets_alone_if_results_are_read_late(model: MedusaModel, slots: int) -> None:
    test_every_row_gets_what_it_gets_alone(model, slots)


class Reads(TorchFunctionMode):
    """Collects the bytes of each read and each copy to elsewhere of some tensors, as of tensors on a device."""

    READING = ("tolist", "item", "cpu", "numpy", "to", "__int__", "__float__", "__bool__", "__index__")

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        super().__init__()
        self.storages = {tensor.untyped_storage().data_ptr() for tensor in tensors}
        self.found: list[tuple[str, int]] = []

    def _on_device(self, value: Any) -> bool:
        return isinstance(value, torch.Tensor) and value.untyped_storage().data_ptr() in self.storages

    def __torch_function__(self, function, types, args=(), kwargs=None):
        name = function.__name__
        read = (
            args[0] if name in self.READING else args[1] if name == "copy_" and not self._on_device(args[0]) else None
        )
        if self._on_device(read):
            self.found.append((name, read.nbytes))
        return function(*args, **(kwargs or {}))


@pytest.mark.usefixtures("late")
def test_a_step_is_read_by_one_small_copy(llama: MedusaModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the scheduler does around steps, rows that join and leave included: it waits for nothing else."""
    engine = Engine(llama, slots=4, stall_seconds=0.0)
    running, state, copies = engine._scheduler, engine._scheduler.slots.state, []
    of_state = [value for value in vars(state).values() if isinstance(value, torch.Tensor)]
    reads = Reads([*of_state, state.cache.kv, state.cache.lengths, running.slots._places, running.slots.temperatures])
    step, step_for = running._step, running._step_for

    def alone_in(tree: Tree) -> Any:
        def unwatched(*args: Any) -> Any:  # what the step itself does is not counted: on a CPU it reads
            with torch._C.DisableTorchFunction():
                return step_for(tree)(*args)

        return unwatched

    def watched(group: Any) -> None:
        before = running.counts.steps
        with reads:
            step(group)
        copies.append((list(reads.found), running.counts.steps - before, len(group.rows)))
        reads.found.clear()

    monkeypatch.setattr(running, "_step_for", alone_in)
    monkeypatch.setattr(running, "_step", watched)
    settings = [{}, {"do_sample": True, "temperature": 0.7, "seed": 1}, {"eos_token_id": [4, 7]}]
    with engine:
        callers = [
            Caller(engine, prompt.tolist(), max_new_tokens=12 + number, **settings[number % 3])
            for number, prompt in enumerate(prompts(9, [5, 30, 12]))
        ]
        assert all(caller.finish() in ("length", "stop") for caller in callers)
    row_bytes = state.report[0].nbytes
    assert row_bytes < 2048
    assert len({rows for _, _, rows in copies}) > 2
    for found, steps, _ in copies:
        assert [name for name, _ in found] == ["copy_"] * steps
        assert all(size <= 4 * row_bytes for _, size in found)


def test_rows_of_one_batch_may_be_told_to_end_by_their_callers_tokens(llama: MedusaModel) -> None:
    (prompt,) = prompts(1, [9])
    whole = alone(llama, prompt.tolist(), max_new_tokens=30)
    end = whole[12]
    with Engine(llama, slots=2) as engine:
        cut = Caller(engine, prompt.tolist(), ends=[end], max_new_tokens=30)
        full = Caller(engine, prompt.tolist(), max_new_tokens=30)
        assert full.tokens() == whole
        assert cut.tokens() == whole[: whole.index(end) + 1]
        assert (cut.finish(), full.finish()) == ("stop", "length")


def test_typical_acceptance_is_that_of_generate(llama: MedusaModel) -> None:
    settings = {"acceptance": "typical", "posterior_threshold": 0.2, "max_new_tokens": 24}
    asked = [prompt.tolist() for prompt in prompts(4, [3, 20])]
    tree = Tree.cartesian([3, 2])
    expected = [alone(llama, prompt, tree=tree, **settings) for prompt in asked]
    with Engine(llama, slots=3) as engine:
        lossy = [Caller(engine, prompt, tree=tree, **settings) for prompt in asked]
        plain = [Caller(engine, prompt, tree=tree, max_new_tokens=24) for prompt in asked]
        assert [caller.tokens() for caller in lossy] == expected
        assert [caller.tokens() for caller in plain] == [alone(llama, prompt, max_new_tokens=24) for prompt in asked]
    assert expected != [caller.tokens() for caller in plain]


def test_choices_are_the_rows_of_one_generate(llama: MedusaModel) -> None:
    (prompt,) = prompts(1, [40])
    settings: dict[str, Any] = {"do_sample": True, "temperature": 1.3, "seed": 11, "max_new_tokens": 20}
    output = llama.generate(prompt[None], num_return_sequences=3, **settings)
    with Engine(llama, slots=2) as engine:
        caller = Caller(engine, prompt.tolist(), n=3, **settings)
        found = [caller.tokens(choice) for choice in range(3)]
        # The second choice's prompt is in the cache already, but for its last token.
        assert [ticket.reused for ticket in caller.tickets] == [0, 39, 39]
    assert found == output.sequences[:, 40:].tolist()
    assert len({tuple(tokens) for tokens in found}) == 3


def test_log_probabilities_are_the_models_own(llama: MedusaModel) -> None:
    (prompt,) = prompts(1, [8])
    settings: dict[str, Any] = {"do_sample": True, "temperature": 0.6, "seed": 3, "repetition_penalty": 1.3}
    with Engine(llama, slots=2) as engine:
        other = Caller(engine, prompt.tolist(), max_new_tokens=60)
        caller = Caller(engine, prompt.tolist(), logprobs=3, tree=Tree.chain(3), max_new_tokens=25, **settings)
        tokens = caller.tokens()
        assert other.tokens() == alone(llama, prompt.tolist(), max_new_tokens=60)
        assert other.deltas[0][0].logprobs is None
    assert tokens == alone(llama, prompt.tolist(), max_new_tokens=25, **settings)
    kept = [entry for delta in caller.deltas[0] for entry in delta.logprobs or []]
    with torch.no_grad():
        text = torch.cat([prompt, torch.tensor(tokens)])[None]
        logits = llama.backbone.causal_lm(text).logits[0, len(prompt) - 1 : -1]
    expected = logits.log_softmax(-1)
    assert len(kept) == len(tokens)
    for entry, token, row in zip(kept, tokens, expected, strict=True):
        assert entry.logprob == pytest.approx(float(row[token]), abs=1e-4)
        best = row.topk(3)
        assert [token for token, _ in entry.top] == best.indices.tolist()
        assert [value for _, value in entry.top] == pytest.approx(best.values.tolist(), abs=1e-4)


def test_prompt_log_probabilities_are_the_models(model: MedusaModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_scores, "MOST_LOGITS", 3 * VOCAB)
    monkeypatch.setattr(scheduler, "PREFILL_CHUNK", 16)
    [prompt] = (prompt.tolist() for prompt in prompts(1, [50], seed=7))
    answer = alone(model, prompt, max_new_tokens=12)
    with Engine(model, slots=2) as engine:
        Caller(engine, prompt, max_new_tokens=2).tokens()  # what is cached of the prompt has no scores
        caller = Caller(engine, prompt, n=2, prompt_logprobs=3, max_new_tokens=12)
        assert caller.tokens(0) == caller.tokens(1) == answer
        one = Caller(engine, prompt[:1], prompt_logprobs=0, max_new_tokens=1)
        one.tokens()
    with torch.no_grad():
        expected = model.backbone.causal_lm(torch.tensor([prompt])).logits[0, :-1].log_softmax(-1)
    first, *found = caller.tickets[0].prompt_logprobs
    assert first is None
    assert list(one.tickets[0].prompt_logprobs) == [None]
    for entry, token, row in zip(found, prompt[1:], expected, strict=True):
        best = row.topk(3)
        assert entry.logprob == pytest.approx(float(row[token]), abs=1e-4)
        assert entry.rank == row.argsort(descending=True).tolist().index(token) + 1
        assert [token for token, _ in entry.top] == best.indices.tolist()
        assert [value for _, value in entry.top] == pytest.approx(best.values.tolist(), abs=1e-4)


def test_a_prompt_that_begins_with_cached_text_runs_only_the_rest(llama: MedusaModel) -> None:
    first, second = (prompt.tolist() for prompt in prompts(2, [50], seed=5))
    answer = alone(llama, first, max_new_tokens=20)
    turns = [first + answer + second[:10], first[:30] + second[:20], second]
    expected = [alone(llama, turn, max_new_tokens=15) for turn in turns]
    with Engine(llama, slots=3) as engine:
        assert Caller(engine, first, max_new_tokens=20).tokens() == answer
        callers = [Caller(engine, turn, max_new_tokens=15) for turn in turns]
        assert [caller.tokens() for caller in callers] == expected
        # All but the answer's last token, which was never run; then the part in common; then nothing.
        assert [caller.tickets[0].reused for caller in callers] == [69, 30, 0]
        assert engine.stats().reused_tokens == 99


def test_a_model_that_changes_between_two_requests_reuses_nothing(llama: MedusaModel) -> None:
    prompt = prompts(1, [50])[0].tolist()
    with Engine(llama, slots=2) as engine:
        Caller(engine, prompt, max_new_tokens=10).wait()
        with torch.no_grad():
            llama.base.model.layers[0].mlp.up_proj.weight.mul_(3.0)
        changed = Caller(engine, prompt, max_new_tokens=10)
        assert changed.tokens() == alone(llama, prompt, max_new_tokens=10)
        assert changed.tickets[0].reused == 0
        assert Caller(engine, prompt, max_new_tokens=10).wait().tickets[0].reused == 49
        llama.undo()
        assert Caller(engine, prompt, max_new_tokens=10).finish() == "error"
    with pytest.raises(ValueError, match="undo"):
        Engine(llama)


def test_cached_text_of_a_running_row_is_reused(llama: MedusaModel) -> None:
    (prompt,) = prompts(1, [60], seed=6)
    shared = prompt.tolist()
    expected = alone(llama, [*shared, 3], max_new_tokens=20)
    with Engine(llama, slots=2) as engine:
        running = Caller(engine, [*shared, 1, 2], max_new_tokens=90, tree=Tree([]))
        running.wait_for(1)
        other = Caller(engine, [*shared, 3], max_new_tokens=20)
        assert other.tokens() == expected
        assert other.tickets[0].reused == 60
        assert running.tokens() == alone(llama, [*shared, 1, 2], max_new_tokens=90)


def test_rows_that_come_and_go_move_no_keys_and_values(llama: MedusaModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """They change places in the state alone, also when the slot of a cached text becomes a row."""
    asked = jobs(12, 4)
    expected = [alone(llama, prompt, **settings) for prompt, settings in asked]
    engine, swap, moved = Engine(llama, slots=4, stall_seconds=0.0), Slots.swap, [0]
    cache = engine._scheduler.slots.state.cache

    def watched(slots: Slots, one: int, other: int) -> None:
        before = cache.kv.clone()
        swap(slots, one, other)
        assert torch.equal(cache.kv, before)
        moved[0] += one != other

    monkeypatch.setattr(Slots, "swap", watched)
    with engine:
        callers = [Caller(engine, prompt, **settings) for prompt, settings in asked]
        assert [caller.tokens() for caller in callers] == expected
        (prompt,), slots = prompts(1, [50], seed=5), engine._scheduler.slots
        assert Caller(engine, prompt.tolist(), max_new_tokens=1).finish() == "length"
        place = next(p for p, text in zip(slots.places, slots.texts, strict=True) if text[:50] == prompt.tolist())
        again = Caller(engine, [*prompt.tolist(), 1], max_new_tokens=1)
        assert again.finish() == "length"
        assert again.tickets[0].reused == 50
        assert slots.places[0] == place  # the free slot became the row, without a copy
    assert moved[0] > 5
    assert sorted(slots.places) == list(range(4))
    assert slots.rows(0, 4).cache.slots.tolist() == slots.places


def test_a_long_prompt_runs_in_chunks_between_the_steps_of_others(llama: MedusaModel) -> None:
    (long,) = prompts(1, [150], seed=8)
    order: list[str] = []
    with Engine(llama, slots=2, stall_seconds=0.0) as engine:
        engine.submit(long[:40].tolist(), lambda choice, delta: None, max_new_tokens=1)  # to know the pace of chunks
        running = threading.Event()

        def first(choice: int, delta: Delta) -> None:
            order.append("step")
            if len(order) == 2:  # the round that ran its prompt is over
                running.set()

        engine.submit([1, 2, 3], first, max_new_tokens=150, tree=Tree([]))
        assert running.wait(30)
        seen = len(order)
        caller = Caller(engine, long.tolist(), max_new_tokens=4)
        caller.wait_for(1)
        order.append("joined")
        assert caller.tokens() == alone(llama, long.tolist(), max_new_tokens=4)
    # 150 tokens in chunks of 32 take five rounds, each with a step of the other row.
    assert order[seen:].index("joined") >= 4


@pytest.mark.parametrize(
    ("lengths", "begins", "ran"),
    [
        # The first chunk finds out the pace; a quarter of 40 and 20 tokens together would be padding.
        ([40, 40, 20, 22], [0] * 4, [(1, 32), (1, 8), (1, 40), (2, 22)]),
        ([40, 40, 40], [0, 30, 28], [(1, 32), (1, 8), (2, 12)]),  # the first one's keys and values are reused
    ],
)
def test_waiting_prompts_run_together(
    llama: MedusaModel,
    lengths: list[int],
    begins: list[int],
    ran: list[tuple[int, int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Chunks [rows, tokens] of prompts of some lengths, whose first tokens are the first prompt's."""
    ticks = itertools.count()  # a millisecond passes from one look at the clock to the next
    clock = SimpleNamespace(perf_counter=lambda: next(ticks) / 1000, thread_time=time.thread_time)
    monkeypatch.setattr("medusa_decoding.serving.scheduler.time", clock)
    engine, submitted, seen = Engine(llama, slots=4), threading.Event(), []
    asked = [prompt.tolist() for prompt in prompts(len(lengths), lengths, seed=7)]
    asked = [asked[0][:begin] + prompt[begin:] for prompt, begin in zip(asked, begins, strict=True)]
    expected = [alone(llama, prompt, max_new_tokens=8) for prompt in asked]
    forward, scheduler_round = llama.backbone.forward, engine._scheduler.round

    def recorded(tokens: torch.Tensor, context: Any) -> torch.Tensor:
        if int(context.cache.lengths[0]) == context.offset:  # not a step
            seen.append((*tokens.shape,))
            # Should it be cancelled now, nothing that is about to be overwritten is taken for cached.
            first = engine._scheduler.taken - len(tokens)
            assert all(len(text) <= context.offset for text in engine._scheduler.slots.texts[first:][: len(tokens)])
        return forward(tokens, context)

    monkeypatch.setattr(llama.backbone, "forward", recorded)
    monkeypatch.setattr(engine._scheduler, "round", lambda: submitted.wait(30) and scheduler_round())
    with engine:
        callers = [Caller(engine, prompt, max_new_tokens=8) for prompt in asked]
        submitted.set()
        assert [caller.tokens() for caller in callers] == expected
    assert seen == ran


def test_a_prompt_cancelled_between_two_chunks_harms_no_other_that_runs_with_it(
    llama: MedusaModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = [prompt.tolist() for prompt in prompts(3, [40, 41, 42], seed=7)]
    expected = [alone(llama, prompt, max_new_tokens=8) for prompt in asked]
    engine, submitted, rows, forward = Engine(llama, slots=4), threading.Event(), [], llama.backbone.forward
    scheduler_round = engine._scheduler.round

    def cancelling(tokens: torch.Tensor, context: Any) -> torch.Tensor:
        rows.append(len(tokens))
        callers[1].tickets[0].cancel()
        return forward(tokens, context)

    monkeypatch.setattr(llama.backbone, "forward", cancelling)
    monkeypatch.setattr(engine._scheduler, "round", lambda: submitted.wait(30) and scheduler_round())
    monkeypatch.setattr(engine._scheduler, "_chunk", lambda: 1000 if engine._scheduler._prefill is None else 60)
    with engine:
        callers = [Caller(engine, prompt, max_new_tokens=8) for prompt in asked]
        submitted.set()
        assert [callers[0].tokens(), callers[2].tokens()] == expected[::2]
        assert (callers[1].tokens(), callers[1].finish()) == ([], "cancelled")
    assert rows[:3] == [3, 3, 3]


def test_a_cancelled_row_leaves_and_the_others_go_on(llama: MedusaModel) -> None:
    asked = [prompt.tolist() for prompt in prompts(5, [6], seed=4)]
    with Engine(llama, slots=2, queue=8) as engine:
        callers = [Caller(engine, prompt, max_new_tokens=120, tree=Tree([])) for prompt in asked]
        callers[0].wait_for(3)
        callers[0].tickets[0].cancel()  # runs
        callers[3].tickets[0].cancel()  # waits
        for place in (0, 3):
            assert callers[place].finish() == "cancelled"
        for place in (1, 2, 4):
            assert callers[place].tokens() == alone(llama, asked[place], max_new_tokens=120)
        part = callers[0].tokens()
        assert callers[3].tokens() == []
        assert engine.stats().finished == {"cancelled": 2, "length": 3}
    assert part == alone(llama, asked[0], max_new_tokens=120)[: len(part)]
    assert len(part) < 120


def test_closing_may_finish_what_runs_and_waits_for_a_limited_time(llama: MedusaModel) -> None:
    expected = alone(llama, [1, 2], max_new_tokens=150)
    with Engine(llama, slots=1) as engine:
        callers = [Caller(engine, [1, 2], max_new_tokens=150, tree=Tree([])) for _ in range(2)]
        callers[0].wait_for(1)
        engine.close(drain=60)
        assert [caller.tokens() for caller in callers] == [expected] * 2
    with Engine(llama, slots=1) as engine:
        went_on = threading.Event()
        caller = Caller(engine, [1, 2], max_new_tokens=150, make_processors=lambda: [_paused(went_on)])
        closing = threading.Thread(target=engine.close, kwargs={"drain": 60})
        closing.start()
        while engine.running:
            time.sleep(0.001)
        with pytest.raises(EngineClosedError):
            engine.submit([1], lambda choice, delta: None)
        second = threading.Thread(target=engine.close)  # shortens the time to nothing
        second.start()
        while engine._deadline > time.monotonic():
            time.sleep(0.001)
        went_on.set()
        closing.join(30)
        assert caller.finish() == "cancelled"


def _paused(event: threading.Event) -> Any:
    """A logits processor that waits before the second token."""

    def processor(text: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if text.shape[1] == 3:
            event.wait(30)
        return scores

    return processor


def test_a_full_queue_refuses_and_queues_nothing(llama: MedusaModel) -> None:
    with Engine(llama, slots=1, queue=2) as engine:
        went_on = threading.Event()
        first = Caller(engine, [1, 2], max_new_tokens=150, make_processors=lambda: [_paused(went_on)])
        first.wait_for(1)
        waiting = Caller(engine, [3], max_new_tokens=2)
        with pytest.raises(QueueFullError, match="at most 2 waiting"):
            engine.submit([4], lambda choice, delta: None, n=2, do_sample=True)
        assert engine.stats().waiting == 1
        last = Caller(engine, [5], max_new_tokens=2)
        with pytest.raises(QueueFullError):
            engine.submit([6], lambda choice, delta: None)
        first.tickets[0].cancel()
        went_on.set()
        assert (len(waiting.tokens()), len(last.tokens())) == (2, 2)


def test_an_error_of_one_callers_code_ends_only_its_own_row(llama: MedusaModel) -> None:
    def failing(text: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if text.shape[1] == 14:
            raise ValueError("no more")
        return scores

    def nothing(text: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.fill_(-torch.inf) if text.shape[1] == 12 else scores

    asked = [prompt.tolist() for prompt in prompts(4, [9], seed=3)]
    expected = [alone(llama, prompt, max_new_tokens=40) for prompt in asked]
    with Engine(llama, slots=4) as engine:
        good = [Caller(engine, prompt, max_new_tokens=40, tree=Tree.chain(3)) for prompt in asked[:2]]
        bad = Caller(engine, asked[2], max_new_tokens=40, make_processors=lambda: [failing], tree=Tree.chain(3))
        draws = Caller(
            engine, asked[3], max_new_tokens=40, make_processors=lambda: [nothing], do_sample=True, tree=Tree.chain(3)
        )
        deaf = engine.submit(asked[0], _raise, max_new_tokens=40)
        assert bad.finish() == draws.finish() == "error"
        assert str(bad.error()) == "no more"
        assert "no token allowed" in str(draws.error())
        assert bad.tokens() == expected[2][:5][: len(bad.tokens())]
        assert [caller.tokens() for caller in good] == expected[:2]
        assert Caller(engine, asked[3], max_new_tokens=40).tokens() == expected[3]
        assert deaf[0].prompt == asked[0]


def _raise(choice: int, delta: Delta) -> None:
    raise RuntimeError("this caller cannot take it")


def test_output_that_is_not_finite_ends_its_row() -> None:
    base = tiny(max_position_embeddings=160, vocab_size=40)
    model, good = MedusaModel(base, heads_for(base)), [1, 2, 3]
    expected = alone(model, good, max_new_tokens=12)
    never = next(token for token in range(40) if token not in expected + good)
    with torch.no_grad():  # spoils prompts that have it
        model.backbone.decoder.embed_tokens.weight[never] = torch.nan
    with Engine(model, slots=2) as engine:
        running = Caller(engine, good, max_new_tokens=12, tree=Tree.chain(2))
        spoiled = Caller(engine, [1, never, 2], max_new_tokens=20)
        assert isinstance(spoiled.error(), FloatingPointError)
        assert spoiled.tokens() == []
        assert running.tokens() == expected
        assert Caller(engine, good, max_new_tokens=12, tree=Tree.chain(2)).tokens() == expected  # no draft is spoiled


def test_a_failed_step_of_one_kind_harms_no_other_rows(llama: MedusaModel, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = [prompt.tolist() for prompt in prompts(3, [20, 30], seed=9)]
    expected = [alone(llama, prompt, max_new_tokens=100) for prompt in asked]
    with Engine(llama, slots=4) as engine:
        forward, fail = llama.backbone.forward, threading.Event()

        def broken(tokens: torch.Tensor, context: Any) -> torch.Tensor:
            if tokens.shape == (2, 1) and fail.is_set():
                fail.clear()
                raise RuntimeError("out of luck")
            return forward(tokens, context)

        monkeypatch.setattr(llama.backbone, "forward", broken)
        bad = [Caller(engine, prompt, max_new_tokens=100, tree=Tree([])) for prompt in asked[:2]]
        good = Caller(engine, asked[2], max_new_tokens=100, tree=Tree.chain(2))
        good.wait_for(5)
        fail.set()
        assert [caller.finish() for caller in bad] == ["error", "error"]
        assert good.tokens() == expected[2]  # its row has moved


def test_an_engine_that_cannot_go_on_ends_all_its_requests(llama: MedusaModel, monkeypatch: pytest.MonkeyPatch) -> None:
    with Engine(llama, slots=1) as engine:
        assert engine.running
        running = Caller(engine, [1, 2, 3], max_new_tokens=150, tree=Tree([]))
        waiting = Caller(engine, [1, 2, 3])
        running.wait_for(2)
        monkeypatch.setattr(engine._scheduler, "round", lambda: _raise(0, Delta([])))
        assert (running.finish(), waiting.finish()) == ("error", "error")
        with pytest.raises(RuntimeError, match="closed"):
            engine.submit([1], lambda choice, delta: None)
        assert not engine.running


@pytest.mark.usefixtures("late")
def test_padded_steps_as_on_a_gpu_serve_kinds_that_come_and_go(
    llama: MedusaModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    width = Groups.width
    monkeypatch.setattr(Groups, "width", lambda self, group, captured: width(self, group, True))
    asked, drawn = jobs(40, 5), random.Random(5)
    expected = [alone(llama, prompt, **settings) for prompt, settings in asked]
    with Engine(llama, slots=6, stall_seconds=0.0) as engine:
        callers = []
        for prompt, settings in asked:
            callers.append(Caller(engine, prompt, tree=drawn.choice(TREES), **settings))
            time.sleep(drawn.choice([0.0, 0.005]))
        assert [caller.tokens() for caller in callers] == expected


def test_padded_steps_go_on_when_another_kind_joins_and_leaves(
    llama: MedusaModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    width = Groups.width
    monkeypatch.setattr(Groups, "width", lambda self, group, captured: width(self, group, True))
    expected = alone(llama, [1, 2, 3], max_new_tokens=150)
    with Engine(llama, slots=6, stall_seconds=0.0) as engine:
        three = [Caller(engine, [1, 2, 3], max_new_tokens=150, tree=Tree([])) for _ in range(3)]
        for caller in three:
            caller.wait_for(5)
        other = Caller(engine, [3, 2, 1], max_new_tokens=20, tree=Tree.chain(2))
        assert other.finish() == "length"
        assert [caller.tokens() for caller in three] == [expected] * 3


def test_a_negative_seed_is_one_of_64_bits(llama: MedusaModel) -> None:
    settings: dict[str, Any] = {"do_sample": True, "seed": -5, "max_new_tokens": 20}
    with Engine(llama, slots=1) as engine:
        assert Caller(engine, [1, 2, 3], **settings).tokens() == alone(llama, [1, 2, 3], **settings)


BAD: dict[str, tuple[list[int], dict[str, Any], str]] = {
    "id": ([VOCAB], {}, r"input_ids: expected ids in \[0, 11\)"),
    "tokens": ([1] * 100, {"max_new_tokens": 61}, "max_new_tokens: expected at most 60 .*, got 61"),
    "tokens, of numpy": ([1] * 100, {"max_new_tokens": np.int64(61)}, "max_new_tokens: expected at most 60 .*, got 61"),
    "n": ([1], {"n": 0}, "n: expected a whole number of at least 1"),
    "logprobs": ([1], {"logprobs": 21}, "logprobs: expected 0 to 20, got 21"),
    "tree": ([1], {"tree": Tree.chain(5)}, "tree: "),
    "lookup": ([1], {"tree": Tree([]).with_lookup(17)}, "tree: expected at most 16 tokens copied from the text in an"),
    "minimum": (
        [1],
        {"min_new_tokens": 3, "eos_token_id": 2, "acceptance": "typical"},
        "min_new_tokens: expected 0 with acceptance='typical'",
    ),
    "typical": ([1], {"acceptance": "typical", "logprobs": 1}, "acceptance: expected 'lossless' with top_logprobs"),
}


@pytest.mark.parametrize(("prompt", "settings", "message"), BAD.values(), ids=BAD.keys())
def test_bad_requests_are_refused(
    llama: MedusaModel, prompt: list[int], settings: dict[str, Any], message: str
) -> None:
    with Engine(llama, slots=1) as engine:
        with pytest.raises(ValueError, match=message):
            engine.submit(prompt, lambda choice, delta: None, **settings)
        assert engine.stats().waiting == engine.stats().running == 0


@pytest.mark.parametrize("sampled", [{}, {"do_sample": True, "temperature": 1.3, "seed": 5}], ids=["greedy", "sampled"])
def test_end_tokens_wait_for_the_least_number_of_tokens(llama: MedusaModel, sampled: dict[str, Any]) -> None:
    settings = {"max_new_tokens": 30, **sampled}
    text, least = alone(llama, [1, 2, 3], **settings), 12
    eos, end = text[3], text[5]  # both would end it early
    expected = alone(llama, [1, 2, 3], min_new_tokens=least, eos_token_id=[eos, end], **settings)
    with Engine(llama, slots=2) as engine:
        other = Caller(engine, [4, 5], max_new_tokens=40, seed=1)  # shares the steps
        held = Caller(engine, [1, 2, 3], min_new_tokens=least, eos_token_id=eos, ends=[end], **settings)
        assert held.tokens() == expected != text
        assert len(expected) >= least
        assert other.tokens() == alone(llama, [4, 5], max_new_tokens=40)


OWN: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    # the model's own generation config, what is asked, and what `generate` is asked instead
    "min_new_tokens": ({"min_new_tokens": 9, "eos_token_id": [1, 4, 7]}, {}, {"max_new_tokens": 20}),
    "more than asked": ({"min_new_tokens": 9, "eos_token_id": 4}, {"max_new_tokens": 5}, {"min_new_tokens": 5}),
    "max_new_tokens": ({"max_new_tokens": 7}, {"max_new_tokens": None}, {"max_new_tokens": 7}),
    "num_return_sequences": ({"num_return_sequences": 3}, {}, {"num_return_sequences": 1}),
    "stop_strings": ({"stop_strings": ["a"]}, {}, {"stop_strings": []}),
    "top_k": ({"top_k": -1}, {"do_sample": True, "temperature": 1.2, "seed": 3}, {"top_k": 0}),
    "max_time": ({"max_time": 0.0}, {}, {"max_new_tokens": 1}),
}


@pytest.mark.parametrize(("own", "asked", "meant"), OWN.values(), ids=OWN.keys())
def test_the_models_own_generation_config_is_obeyed(
    llama: MedusaModel, own: dict[str, Any], asked: dict[str, Any], meant: dict[str, Any]
) -> None:
    for name, value in own.items():
        setattr(llama.backbone.causal_lm.generation_config, name, value)
    asked = {"max_new_tokens": 20, **asked}
    expected = alone(llama, [1, 2, 3], **{**asked, **meant})
    with Engine(llama, slots=1) as engine:
        assert Caller(engine, [1, 2, 3], **asked).tokens() == expected


@pytest.mark.parametrize(
    ("own", "message"),
    [
        ({"num_beams": 2}, "generation_config.num_beams: expected 1, got 2"),
        ({"suppress_tokens": [999]}, "suppress_tokens: expected"),
    ],
)
def test_a_generation_config_that_fails_every_request_fails_at_the_start(
    llama: MedusaModel, own: dict[str, Any], message: str
) -> None:
    for name, value in own.items():
        setattr(llama.backbone.causal_lm.generation_config, name, value)
    with pytest.raises(ValueError, match=f"model: its own generation config cannot be served.*{message}"):
        Engine(llama)


def test_memory_is_stated_and_checked_before_it_is_taken(llama: MedusaModel, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(llama, slots=4)
    kv = engine._scheduler.slots.state.cache.kv
    assert engine.memory.cache == kv.nbytes
    assert engine.memory.rows == kv.shape[4] >= engine.context + 64
    monkeypatch.setattr("medusa_decoding.serving.engine.available", lambda device: engine.memory.total)
    assert Engine(llama, slots=4).context == 80  # halved, as only nine tenths may be taken
    monkeypatch.setattr("medusa_decoding.decode.runtime.state_pool.available", lambda device: 2**20)
    monkeypatch.setattr("medusa_decoding.decode.runtime.state_pool.UNCHECKED", 0)
    with pytest.raises(MemoryError, match=r"expected at most 1\.0 MiB .* would fit"):
        Engine(llama, slots=64, context=160)


def test_models_whose_tables_depend_on_the_text_are_refused() -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    with pytest.raises(ValueError, match="dynamic scaling"):
        Engine(MedusaModel(tiny(rope_parameters=rope)))


def test_without_heads_rows_copy_from_their_own_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_between", lambda before, after: (0.001, 0.001))  # accepted copies pay
    model = MedusaModel(tiny(max_position_embeddings=512))
    asked = [prompt.tolist() for prompt in prompts(3, [40, 20, 2])]
    expected = [alone(model, prompt, max_new_tokens=200, tree=Tree([])) for prompt in asked]
    with Engine(model, slots=2) as engine:
        callers = [Caller(engine, prompt, max_new_tokens=200) for prompt in asked]
        assert [caller.tokens() for caller in callers] == expected
        assert max(engine.stats().accepted_histogram) > 3
        assert set(engine.stats().tree_nodes) > {1, 3}


def test_states_come_with_single_tokens() -> None:
    with Engine(MedusaModel(tiny()), slots=1, states=True) as engine:
        caller = Caller(engine, [1, 2, 1, 2, 1, 2], max_new_tokens=20)
        assert len(caller.tokens()) == 20
        assert engine.stats().tree_nodes == {1: 19}


@pytest.mark.gpu
def test_captured_steps_serve_rows_that_come_and_go() -> None:
    base = tiny(max_position_embeddings=160).cuda()
    model = MedusaModel(base, heads_for(base).cuda())
    asked, drawn = jobs(40, 3), random.Random(3)
    expected = [alone(model, prompt, **settings) for prompt, settings in asked]
    with Engine(model, slots=6, stall_seconds=0.0) as engine:
        callers = [Caller(engine, prompt, tree=drawn.choice(TREES), **settings) for prompt, settings in asked]
        assert [caller.tokens() for caller in callers] == expected


def test_prefixes_in_8_bits_are_copied_with_their_scales() -> None:
    """The second prompt begins as the first, most of whose text would be lost if it took that slot."""
    base = tiny(max_position_embeddings=256)
    [row] = prompts(1, [60])
    asked = [row.tolist(), [*row[:40].tolist(), 1, 2, 3], row.tolist()]
    with MedusaModel(base, heads_for(base), Tree.cartesian([3, 2]), cache_dtype="int8") as model:
        expected = [alone(model, prompt, max_new_tokens=24, tree=Tree([])) for prompt in asked]
        with Engine(model, slots=2, context=120) as engine:
            callers = [Caller(engine, prompt, max_new_tokens=24).wait() for prompt in asked]
            assert [caller.tokens() for caller in callers] == expected
            assert [caller.tickets[0].reused for caller in callers] == [0, 40, 59]
            cache = engine._scheduler.slots.state.cache
            assert (cache.kv.dtype, engine.memory.cache) == (torch.int8, cache.kv.nbytes)
