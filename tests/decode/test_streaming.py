"""Streamers that are told where steps end."""

import pytest
import torch
from calls import Recorder, with_heads
from models import prompts, tiny, transformers_greedy
from oracles import assert_some_accepted, taught

from medusa_decoding import MedusaModel, Tree

TREE = Tree.cartesian([2, 2])
NEW = 24


class StepRecorder(Recorder):
    """Records the new tokens of each step."""

    def __init__(self):
        super().__init__()
        self.steps, self.open = [], None

    def put(self, value):
        super().put(value)
        if self.open is None:  # the prompt
            self.open = []
        else:
            self.open.extend(value.tolist())

    def end_step(self):
        self.steps.append(self.open)
        self.open = []


@pytest.fixture(scope="module")
def case():
    """A model, heads that are often right about its text after a prompt, the prompt and the text."""
    model = tiny()
    [row] = prompts(1, [6])
    text = transformers_greedy(model, row, NEW)
    return model, taught(model, [(row.tolist(), text)]), row, text


def stream(case, **settings):
    model, heads, row, _ = case
    streamer = StepRecorder()
    with MedusaModel(model, heads, TREE) as medusa:
        output = medusa.generate(row[None], max_new_tokens=NEW, streamer=streamer, **settings)
    assert streamer.open == []
    assert streamer.ended == 1
    return streamer.steps, output


def test_steps_end_where_the_output_says(case):
    steps, output = stream(case)
    assert_some_accepted(output)
    assert [len(step) for step in steps] == [1] + [accepted + 1 for accepted in output.accept_lengths[0]]
    assert [token for step in steps for token in step] == case[3]


def test_a_criterion_within_an_accepted_path_ends_the_last_step(case):
    steps, _ = stream(case)
    text = case[3]
    # After all but the last token of a step of at least two.
    place = next(place for place, step in enumerate(steps) if len(step) > 1)
    length = sum(map(len, steps[: place + 1])) - 1

    def stop(ids, scores):
        return torch.tensor([ids.shape[1] == len(case[2]) + length])

    cut, output = stream(case, stopping_criteria=[stop])
    assert cut == [*steps[:place], steps[place][:-1]]
    assert [token for step in cut for token in step] == text[:length]
    assert [len(step) for step in cut[1:]] == [accepted + 1 for accepted in output.accept_lengths[0]]


def test_steps_end_through_custom_generate(case):
    model, heads, row, text = case
    streamer = StepRecorder()
    with_heads(model, heads, row[None], tree=TREE, max_new_tokens=NEW, streamer=streamer)
    steps, _ = stream(case)
    assert streamer.steps == steps
    assert max(map(len, steps)) > 1


def test_what_end_step_raises_ends_the_generation(case):
    class Failing(StepRecorder):
        def end_step(self):
            raise InterruptedError("the reader has gone")

    model, heads, row, text = case
    streamer = Failing()
    with MedusaModel(model, heads, TREE) as medusa:
        with pytest.raises(InterruptedError, match="the reader has gone"):
            medusa.generate(row[None], max_new_tokens=NEW, streamer=streamer)
        assert streamer.values[1:] == [text[:1]]
        assert medusa.generate(row[None], max_new_tokens=NEW).sequences[0, 6:].tolist() == text
