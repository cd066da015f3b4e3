"""Where texts end: stop strings, criteria, time, EOS lists; what streamers and criteria receive before that.

Heads propose the model's own text, see `oracles.taught`, so that most steps accept several tokens and texts end
within accepted paths.
"""

import copy
import itertools
import time

import pytest
import torch
from calls import Recorder
from models import padded, prompts, tiny, transformers_greedy
from oracles import PRINTABLE, byte_tokenizer, new_tokens, taught
from transformers import StoppingCriteria
from transformers.generation import EosTokenCriteria

from medusa_decoding import MedusaModel, Tree
from medusa_decoding.decode.runtime import progress

NEW = 40
TREES = {"chain": Tree.chain(4), "siblings": Tree.cartesian([3, 2, 2]), "copied": Tree.cartesian([2]).with_lookup(4)}


@pytest.fixture(scope="module")
def tokenizer():
    return byte_tokenizer()


class Written:
    """A model that writes printable bytes, its prompts, transformers' texts after them, and heads that know these."""

    def __init__(self, family="llama", seed=0, lengths=(9, 4, 17)):
        self.model = tiny(family, seed=seed, vocab_size=PRINTABLE, hidden_size=160, max_position_embeddings=128)
        self.rows = prompts(len(lengths), list(lengths), vocab=PRINTABLE, seed=seed)
        self.texts = [transformers_greedy(self.model, row, NEW) for row in self.rows]
        known = [(row.tolist(), text) for row, text in zip(self.rows, self.texts, strict=True)]
        self.heads = taught(self.model, known, first=0.75, second=0.2)

    def swapped(self, tree="siblings"):
        return MedusaModel(self.model, self.heads, TREES[tree])


@pytest.fixture(scope="module")
def written():
    return Written()


def paths(output, row=0):
    """(first index, last index) of the new tokens of each step of a row; the prefill's token has index 0."""
    found, place = [], 1
    for accepted in output.accept_lengths[row]:
        found.append((place, place + accepted))
        place += accepted + 1
    return found


def within_a_path(steps, place):
    """Whether a step continues after the token at an index."""
    return any(first <= place < last for first, last in steps)


def consistent(output):
    """Each row's steps account for its tokens except the first, which is the prefill's."""
    for steps, count in zip(output.accept_lengths, output.new_tokens, strict=True):
        assert sum(steps) + len(steps) == count - 1
    metrics = output.metrics
    assert metrics.new_tokens == sum(output.new_tokens)
    assert metrics.steps == sum(map(len, output.accept_lengths)) == output.steps
    assert sum((accepted + 1) * steps for accepted, steps in metrics.accepted_histogram.items()) == (
        metrics.new_tokens - len(output.new_tokens)
    )
    assert len(metrics.step_seconds) == max(map(len, output.accept_lengths))


@pytest.mark.parametrize(
    ("family", "tree"), [("llama", "siblings"), ("mistral", "chain"), ("qwen2", "copied"), ("qwen3", "siblings")]
)
def test_stop_strings_cut_where_transformers_cuts(tokenizer, family, tree):
    """Strings of one to three tokens from anywhere in the text: some end within a path, some span two."""
    written = Written(family, lengths=(9,))
    [row], [text] = written.rows, written.texts
    cut_within = across = 0
    with written.swapped(tree) as medusa:
        whole = paths(medusa.generate(row[None], max_new_tokens=NEW))
        for last in range(0, NEW, 5):
            for size in (1, 2, 3):
                string = tokenizer.decode(text[max(0, last + 1 - size) : last + 1])
                kwargs = {"stop_strings": string, "tokenizer": tokenizer, "max_new_tokens": NEW}
                output = medusa.generate(row[None], metrics=True, **kwargs)
                # A token is a character here: the text ends with the first that completes the string.
                ends = [end for end in range(NEW) if tokenizer.decode(row.tolist() + text[: end + 1]).endswith(string)]
                assert new_tokens(output, len(row)) == [text[: ends[0] + 1]]
                if size == 3:
                    assert text[: ends[0] + 1] == transformers_greedy(written.model, row, **kwargs)
                consistent(output)
                end = output.new_tokens[0] - 1
                cut_within += within_a_path(whole, end)
                across += any(first > end + 1 - size and first <= end for first, _ in whole)
    assert cut_within >= 5
    assert across >= 5


class EndsAt(StoppingCriteria):
    """Records what it is shown; ends after a number of tokens (by length of the text)."""

    def __init__(self, length=10**9, form=torch.tensor):
        self.length, self.form, self.shown = length, form, []

    def __call__(self, input_ids, scores, **kwargs):
        assert input_ids.shape[0] == 1
        assert input_ids.dtype == torch.int64
        self.shown.append((input_ids[0].tolist(), scores))
        return self.form([input_ids.shape[1] >= self.length])


@pytest.mark.parametrize("tree", TREES)
def test_criteria_see_every_prefix_in_order(written, tree):
    row, text = written.rows[0], written.texts[0]
    with written.swapped(tree) as medusa:
        whole = paths(medusa.generate(row[None], max_new_tokens=NEW))
        assert sum(last - first for first, last in whole) > 15
        for end in (0, 1, *(first for first, last in whole if last > first), NEW - 1):
            criterion, other = EndsAt(len(row) + end + 1), EndsAt()
            output = medusa.generate(row[None], max_new_tokens=NEW, stopping_criteria=[criterion, other], metrics=True)
            assert new_tokens(output, len(row)) == [text[: end + 1]]
            consistent(output)
            # Nothing is shown after the end, and no criterion is left out.
            expected = [row.tolist() + text[: count + 1] for count in range(end + 1)]
            assert [prefix for prefix, _ in criterion.shown] == [prefix for prefix, _ in other.shown] == expected
            assert all(scores is None for _, scores in criterion.shown)


class EndsRows:
    """Ends each row of a batch after a count of new tokens, and records what it is shown of each."""

    def __init__(self, rows, counts=(13, 30, 6)):
        self.rows, self.ends, self.shown = rows, [len(row) + n for row, n in zip(rows, counts, strict=True)], {}

    def __call__(self, input_ids, scores):
        prefix = input_ids[0].tolist()
        number = next(i for i, row in enumerate(self.rows) if prefix[: len(row)] == row.tolist())
        assert len(prefix) <= self.ends[number], "shown tokens after the end"
        self.shown.setdefault(number, []).append(prefix)
        return torch.tensor([len(prefix) == self.ends[number]])


def test_criteria_of_a_batch_end_each_row_by_itself(written):
    """Rows of different lengths: each is shown without padding, as it would be alone."""
    ids, mask = padded(written.rows)
    criterion = EndsRows(written.rows)
    with written.swapped() as medusa:
        output = medusa.generate(
            ids, mask, max_new_tokens=NEW, stopping_criteria=[criterion], pad_token_id=7, metrics=True
        )
    expected = [text[:count] for text, count in zip(written.texts, (13, 30, 6), strict=True)]
    assert new_tokens(output, ids.shape[1]) == expected
    assert output.sequences.shape[1] == ids.shape[1] + 30
    assert output.sequences[2, ids.shape[1] + 6 :].eq(7).all()
    consistent(output)
    for number, (row, text) in enumerate(zip(written.rows, expected, strict=True)):
        assert criterion.shown[number] == [row.tolist() + text[: count + 1] for count in range(len(text))]


def test_criteria_get_the_scores_that_transformers_gives_them(written):
    """With output_scores: a tuple of the scores so far, the last of which chose the last token."""
    row = written.rows[0]
    kwargs = {"max_new_tokens": 12, "output_scores": True, "return_dict_in_generate": True}
    theirs, ours = EndsAt(), EndsAt()
    written.model.generate(
        row[None], attention_mask=torch.ones(1, len(row)), do_sample=False, stopping_criteria=[theirs], **kwargs
    )
    with written.swapped() as medusa:
        output = medusa.generate(row[None], stopping_criteria=[ours], **kwargs)
        cut = medusa.generate(row[None], stopping_criteria=[EndsAt(len(row) + 7)], **kwargs)
    assert sum(output.accept_lengths[0]) > 3
    # float32 rounds otherwise in each order of sums: how much in this model and on this CPU, float64 tells.
    text, last = theirs.shown[-1]
    with torch.no_grad():
        exact = copy.deepcopy(written.model).double()(torch.tensor([text])).logits[0, len(row) - 1 : -1]
    rounding = float((torch.cat(last) - exact).abs().max())
    assert rounding < 1e-3
    assert all(float((one - other).abs().max()) > 1 for one, other in itertools.pairwise(last))
    for (prefix, expected), (own_prefix, scores) in zip(theirs.shown, ours.shown, strict=True):
        assert own_prefix == prefix
        assert len(scores) == len(expected) == len(prefix) - len(row)
        assert all(torch.allclose(*pair, rtol=0, atol=10 * rounding) for pair in zip(scores, expected, strict=True))
    assert len(cut.scores) == 7
    assert all(torch.equal(*pair) for pair in zip(cut.scores, output.scores[:7], strict=True))


def test_time_runs_out(written, monkeypatch):
    """A clock that advances 1 s per read: the text ends after the first token past the limit."""
    row, text = written.rows[0], written.texts[0]
    clock = [1000.0]

    def tick():
        clock[0] += 1.0
        return clock[0]

    monkeypatch.setattr(time, "time", tick)
    with written.swapped() as medusa:
        # Read once when the criterion is made, then per token; transformers' own criterion does not count equality.
        for limit in (0, 1, 4.5, 20):
            output = medusa.generate(row[None], max_new_tokens=NEW, max_time=limit, metrics=True)
            assert new_tokens(output, len(row)) == [text[: int(limit) + 1]]
            consistent(output)
        assert len(new_tokens(medusa.generate(row[None], max_new_tokens=NEW, max_time=1e6), len(row))[0]) == NEW
        for wrong in ("1", -1.0, float("nan")):
            with pytest.raises(ValueError, match="max_time: expected seconds, at least 0, got"):
                medusa.generate(row[None], max_time=wrong)


def test_lists_of_end_tokens_and_criteria_together(written):
    row, text = written.rows[0], written.texts[0]
    kinds = list(dict.fromkeys(text))
    with written.swapped() as medusa:
        for eos in ([kinds[9]], [kinds[12], kinds[5], 255], kinds[3:]):
            criterion = EndsAt()
            output = medusa.generate(
                row[None], max_new_tokens=NEW, eos_token_id=eos, stopping_criteria=[criterion], metrics=True
            )
            expected = transformers_greedy(written.model, row, NEW, eos_token_id=eos)
            assert new_tokens(output, len(row)) == [expected]
            assert len(criterion.shown) == len(expected) < NEW
            consistent(output)
            # One end token is a criterion too, if given as one.
            given = EosTokenCriteria(torch.tensor(eos))
            output = medusa.generate(row[None], max_new_tokens=NEW, stopping_criteria=[given])
            assert new_tokens(output, len(row)) == [expected]


@pytest.mark.parametrize(
    ("limit", "tree"), [("budget", "chain"), ("eos", "copied"), ("stop string", "siblings"), ("criterion", "chain")]
)
def test_streamers_get_each_token_in_order_and_nothing_after_the_end(tokenizer, written, limit, tree):
    row, text = written.rows[0], written.texts[0]
    with written.swapped(tree) as medusa:
        whole = paths(medusa.generate(row[None], max_new_tokens=NEW))
        first = {token: place for place, token in reversed(list(enumerate(text)))}
        end = next(place for place, token in enumerate(text) if within_a_path(whole, place) and first[token] == place)
        kwargs = {
            "budget": {"max_new_tokens": end + 1},
            "eos": {"eos_token_id": text[end]},
            "stop string": {"stop_strings": tokenizer.decode([text[end]]), "tokenizer": tokenizer},
            "criterion": {"stopping_criteria": [EndsAt(len(row) + end + 1)]},
        }[limit]
        recorder = Recorder()
        output = medusa.generate(row[None], **({"max_new_tokens": NEW} | kwargs), streamer=recorder, metrics=True)
    assert new_tokens(output, len(row)) == [text[: end + 1]]
    assert recorder.values == [[row.tolist()], *([token] for token in text[: end + 1])]
    assert recorder.ended == 1
    consistent(output)


def test_the_model_is_usable_after_a_streamers_end_fails(written):
    """Criteria and tokens that fail: test_robustness."""

    class Failing(Recorder):
        def end(self):
            raise ZeroDivisionError

    row = written.rows[0]
    with written.swapped() as medusa:
        with pytest.raises(ZeroDivisionError):
            medusa.generate(row[None], max_new_tokens=NEW, streamer=Failing())
        assert new_tokens(medusa.generate(row[None], max_new_tokens=NEW), len(row)) == [written.texts[0]]


@pytest.mark.parametrize("tree", ["siblings", "copied"])
def test_a_host_that_reads_one_step_late_cuts_at_the_same_token(written, monkeypatch, tree):
    """As on a GPU, where one more step is running when a criterion ends a row."""
    ids, mask = padded(written.rows)
    criterion = EndsRows(written.rows)
    expected = [text[:count] for text, count in zip(written.texts, (13, 30, 6), strict=True)]
    with written.swapped(tree) as medusa:
        steps = medusa.generate(ids, mask, max_new_tokens=NEW).accept_lengths
        monkeypatch.setitem(progress.STEPS_LATE, "cpu", 1)
        for kwargs in ({}, {"output_scores": True}, {"eos_token_id": [written.texts[1][20]]}):
            output = medusa.generate(
                ids, mask, max_new_tokens=NEW, stopping_criteria=[criterion], metrics=True, **kwargs
            )
            texts = [text[: text.index(kwargs["eos_token_id"][0]) + 1] if "eos_token_id" in kwargs
                     and kwargs["eos_token_id"][0] in text else text for text in expected]  # fmt: skip
            assert new_tokens(output, ids.shape[1]) == texts
            consistent(output)
            for own, all_of_them in zip(output.accept_lengths, steps, strict=True):
                assert own[:-1] == all_of_them[: len(own) - 1]
            assert output.scores is None or len(output.scores) == 30
        recorder = Recorder()
        medusa.generate(written.rows[0][None], max_new_tokens=NEW, stopping_criteria=[criterion], streamer=recorder)
        assert [value[0] for value in recorder.values[1:]] == expected[0]


def test_a_row_ends_at_an_end_token_of_its_own_within_a_step():
    report = torch.tensor([[5, 0, 0, 11, 12, 13, 14]], dtype=torch.int32)
    step = progress.Progress([5], [False], [False], report, None, None)
    row = progress.RowReader(ends=frozenset([13]), count=1)
    assert row.read(step, 0) == [11, 12, 13]
    assert (row.count, row.accepted, row.stopped, row.ended) == (4, [2], True, True)
    assert row.read(step, 0) == []
