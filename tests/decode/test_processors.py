"""Any logits processor of transformers, on trees: greedy text, scores and logits equal transformers' generate.

Heads propose the text that transformers writes with the processor, see `oracles.taught`: paths are accepted,
also through nodes that are not their head's first candidate, so that processors run for nodes deep in a tree.
"""

import copy
import functools
import types

import pytest
import torch
from models import FAMILIES, VOCAB, heads_for, padded, prompts, tiny, transformers_greedy
from oracles import new_tokens, taught
from transformers import LogitsProcessor, SynthIDTextWatermarkingConfig, WatermarkingConfig
from transformers.generation import logits_process as lp

from medusa_decoding import MedusaModel, Tree
from medusa_decoding.decode.selection import processors, sampling
from medusa_decoding.decode.selection.processors import LogitsProcessors
from medusa_kernels import draw_tokens

NEW = 24
TREES = {
    "chain": Tree.chain(4),
    "siblings": Tree.cartesian([3, 2, 2]),
    "uneven": Tree([[2], [0], [1], [2, 0], [0, 1], [0, 0], [0, 0, 1], [0, 0, 0], [1, 0], [1, 0, 0]]),
    "copied branch": Tree.cartesian([2, 2]).with_lookup(4),
}
LENGTHS = [7, 1, 19, 12]


def large(family="llama", **overrides):
    """A model whose heads can memorise some texts."""
    return tiny(family, **({"hidden_size": 128} | overrides))


def even_numbers_after_odd_ones(row, text):
    """For prefix_allowed_tokens_fn: the allowed next tokens of row `row`; each row has its own rule."""
    return [token for token in range(VOCAB) if (token + int(text[-1])) % (row + 2) != 0]


SETTINGS = {
    "repetition_penalty": {"repetition_penalty": 1.3},
    "repetition reward": {"repetition_penalty": 0.8},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 2},
    "bad_words_ids": {"bad_words_ids": [[3], [5, 1], [2, 7, 7]], "eos_token_id": 4},
    "sequence_bias": {"sequence_bias": [[[3], 2.0], [[5, 1], -4.0], [[1, 1], 3.0]]},
    "suppress_tokens": {"suppress_tokens": [0, 8, 9]},
    "begin_suppress_tokens": {"begin_suppress_tokens": [0, 1, 2, 3, 4, 5]},
    "forced_bos_token_id": {"forced_bos_token_id": 6, "begin_suppress_tokens": [1, 2]},
    "forced_eos_token_id": {"forced_eos_token_id": [9]},
    "exponential_decay_length_penalty": {"exponential_decay_length_penalty": (5, 1.1), "eos_token_id": [10]},
    "min_length": {"min_length": 22, "eos_token_id": [1, 5, 8], "repetition_penalty": 1.05},
    "min_new_tokens": {"min_new_tokens": 9, "eos_token_id": [1, 5, 8], "no_repeat_ngram_size": 3},
    "both minima": {"min_length": 22, "min_new_tokens": 2, "eos_token_id": [1, 5, 8]},
    "encoder_repetition_penalty": {"encoder_repetition_penalty": 1.5},
    "encoder_no_repeat_ngram_size": {"encoder_no_repeat_ngram_size": 2},
    "watermarking_config": {"watermarking_config": WatermarkingConfig(bias=3.0, context_width=1)},
    "renormalize_logits": {"renormalize_logits": True, "repetition_penalty": 1.2},
    "several": {
        "repetition_penalty": 1.2,
        "no_repeat_ngram_size": 3,
        "bad_words_ids": [[4]],
        "sequence_bias": {(2,): 1.0},
    },
}


def settings_of(name):
    # A watermark's configuration keeps what its processors hash with: each generation gets its own.
    return {key: copied(value) for key, value in SETTINGS[name].items()}


def copied(value):
    return WatermarkingConfig(**value.to_dict()) if isinstance(value, WatermarkingConfig) else value


@pytest.mark.parametrize(
    ("name", "tree"), [(name, ("siblings", "copied branch")[place % 2]) for place, name in enumerate(SETTINGS)]
)
def test_a_batch_is_transformers_text_row_by_row(name, tree):
    family = sorted(FAMILIES)[(list(SETTINGS).index(name) + list(TREES).index(tree)) % len(FAMILIES)]
    model = large(family, max_position_embeddings=128)
    rows = prompts(4, LENGTHS, seed=list(SETTINGS).index(name))
    expected = [transformers_greedy(model, row, NEW, **settings_of(name)) for row in rows]
    heads = taught(model, [(row.tolist(), text) for row, text in zip(rows, expected, strict=True)])
    ids, mask = padded(rows)
    with MedusaModel(model, heads, TREES[tree]) as medusa:
        output = medusa.generate(ids, mask, max_new_tokens=NEW, **settings_of(name))
    assert new_tokens(output, ids.shape[1]) == expected
    of_steps = sum(output.new_tokens) - len(rows)
    assert sum(map(sum, output.accept_lengths)) > (0.25 if tree != "copied branch" else 0.15) * of_steps
    if name != "renormalize_logits":
        assert expected != [transformers_greedy(model, row, NEW) for row in rows], "the processor changes nothing"


def test_prefix_allowed_tokens_fn_gets_the_right_row():
    model = large("qwen2")
    rows = prompts(4, LENGTHS, seed=3)
    # In transformers a row alone is row 0, so the rule of row r is given its number.
    expected = [
        transformers_greedy(
            model, row, NEW, prefix_allowed_tokens_fn=lambda _, text, r=r: even_numbers_after_odd_ones(r, text)
        )
        for r, row in enumerate(rows)
    ]
    heads = taught(model, [(row.tolist(), text) for row, text in zip(rows, expected, strict=True)])
    asked = []

    def allowed(row, text):
        assert text.dim() == 1
        asked.append((row, text.tolist()))
        return even_numbers_after_odd_ones(row, text)

    ids, mask = padded(rows, "right")
    with MedusaModel(model, heads, TREES["siblings"]) as medusa:
        output = medusa.generate(ids, mask, max_new_tokens=NEW, prefix_allowed_tokens_fn=allowed)
    assert new_tokens(output, ids.shape[1]) == expected
    assert sum(map(sum, output.accept_lengths)) > NEW
    for r, row in enumerate(rows):
        text = row.tolist() + expected[r]
        assert [prefix for number, prefix in asked if number == r] == [text[: len(row) + n] for n in range(NEW)]


class Grammar(LogitsProcessor):
    """Tokens increase by 1 to 3, modulo the vocabulary; it remembers the text seen so far, and refuses any other."""

    def __init__(self, prompt, vocab):
        self.seen, self.vocab, self.calls = list(prompt), vocab, 0

    def __call__(self, input_ids, scores):
        assert input_ids.dtype == torch.int64
        assert scores.dtype == torch.float32
        assert scores.shape == (1, self.vocab)
        text = input_ids[0].tolist()
        assert text[: len(self.seen)] == self.seen, "not the text so far"
        assert len(text) == len(self.seen) + (self.calls > 0), "called for more or less than one token"
        self.seen, self.calls = text, self.calls + 1
        right = [(text[-1] + step) % self.vocab for step in (1, 2, 3)]
        masked = torch.full_like(scores, float("-inf"))
        masked[:, right] = scores[:, right]
        return masked


@pytest.mark.parametrize("tree", ["uneven", "copied branch"])
def test_a_stateful_processor_sees_one_growing_text(tree):
    model = large("mistral")
    [row] = prompts(1, [9])
    expected = transformers_greedy(model, row, NEW, logits_processor=[Grammar(row.tolist(), VOCAB)])
    heads = taught(model, [(row.tolist(), expected)])
    grammar = Grammar(row.tolist(), VOCAB)
    with MedusaModel(model, heads, TREES[tree]) as medusa:
        output = medusa.generate(row[None], max_new_tokens=NEW, logits_processor=[grammar])
        assert new_tokens(output, len(row)) == [expected]
        assert output.steps < (NEW - 1) / 1.3
        # One call per token: none for rejected tokens, none after the end.
        assert grammar.calls == NEW
        assert grammar.seen == row.tolist() + expected[:-1]
        eos = expected[10]
        cut = expected[: expected.index(eos) + 1]
        grammar = Grammar(row.tolist(), VOCAB)
        output = medusa.generate(row[None], max_new_tokens=NEW, logits_processor=[grammar], eos_token_id=eos)
    assert new_tokens(output, len(row)) == [cut]
    assert grammar.calls == len(cut)


def in_place(input_ids, scores):
    """Changes what it is given and returns it."""
    scores[:, input_ids[0, -1]] -= 3.0
    return scores


def returning_another(input_ids, scores):
    return scores.clone().index_fill_(1, input_ids[0, -1:], -5.0)


def assert_own_logits(model, text, logits):
    """Check that logits are those of a text's last tokens: at most twice as far from fp64 as the model's own are."""
    with torch.no_grad():
        own = model(text[None]).logits[0, -len(logits) - 1 : -1].double()
        exact = copy.deepcopy(model).double()(text[None]).logits[0, -len(logits) - 1 : -1]
    assert (logits.double() - exact).abs().max() <= 2 * (own - exact).abs().max()


@pytest.mark.parametrize("processor", [in_place, returning_another])
def test_processors_that_change_scores_in_place(processor):
    model = large()
    [row] = prompts(1, [9])
    # Alone, so that no earlier processor has copied the logits.
    kwargs = {"logits_processor": [processor]}
    expected = transformers_greedy(model, row, NEW, **kwargs)
    heads = taught(model, [(row.tolist(), expected)])
    with MedusaModel(model, heads, TREES["siblings"]) as medusa:
        output = medusa.generate(row[None], max_new_tokens=NEW, output_logits=True, **kwargs)
    assert new_tokens(output, len(row)) == [expected]
    assert sum(output.accept_lengths[0]) > 5
    # Logits stay the model's own.
    assert_own_logits(model, torch.cat([row, torch.tensor(expected)]), torch.cat(output.logits))


def test_processors_of_the_caller_replace_transformers_own():
    """As in transformers: a given processor takes precedence over one of its type that a setting would make."""
    model = large()
    [row] = prompts(1, [9])
    first, second = transformers_greedy(model, row, NEW)[3:5]
    ends = {"eos_token_id": [first, second]}
    given = {
        "repetition": ({"repetition_penalty": 5.0}, lp.RepetitionPenaltyLogitsProcessor(1.1)),
        "minimum": (ends, lp.MinNewTokensLengthLogitsProcessor(9, 12, [first, second], device="cpu")),
        "minimum twice": (
            ends | {"min_new_tokens": 2},
            lp.MinNewTokensLengthLogitsProcessor(9, 12, [first, second], device="cpu"),
        ),
        "minimum in all": (ends, lp.MinLengthLogitsProcessor(20, [first, second], device="cpu")),
        "temperature": (ends, lp.TemperatureLogitsWarper(0.3)),
    }
    for name, (kwargs, processor) in given.items():
        kwargs = {"logits_processor": [processor]} | kwargs
        expected = transformers_greedy(model, row, NEW, **kwargs)
        plain = transformers_greedy(model, row, NEW, **(ends if "eos_token_id" in kwargs else {}))
        assert (expected == plain) == (name == "temperature"), name
        heads = taught(model, [(row.tolist(), expected)])
        with MedusaModel(model, heads, TREES["siblings"]) as medusa:
            assert new_tokens(medusa.generate(row[None], max_new_tokens=NEW, **kwargs), len(row)) == [expected], name


@pytest.mark.parametrize("extra", [{}, {"repetition_penalty": 1.3, "bad_words_ids": [[3]]}], ids=["plain", "processed"])
def test_scores_and_logits_equal_transformers(extra):
    model = large("qwen3")
    rows = prompts(4, LENGTHS, seed=4)
    kwargs = {"eos_token_id": [2, 6], "output_scores": True, "output_logits": True, "max_new_tokens": NEW} | extra
    singles = [
        model.generate(
            row[None], attention_mask=torch.ones(1, len(row)), do_sample=False, return_dict_in_generate=True, **kwargs
        )
        for row in rows
    ]
    texts = [single.sequences[0, len(row) :].tolist() for single, row in zip(singles, rows, strict=True)]
    assert len({len(text) for text in texts}) > 1, "no row ends early"
    heads = taught(model, [(row.tolist(), text) for row, text in zip(rows, texts, strict=True)])
    ids, mask = padded(rows)
    with MedusaModel(model, heads, TREES["siblings"]) as medusa:
        output = medusa.generate(ids, mask, **kwargs)
        without = medusa.generate(ids, mask, max_new_tokens=3)
    assert without.scores is without.logits is None
    assert new_tokens(output, ids.shape[1]) == texts
    assert sum(map(sum, output.accept_lengths)) > 2
    longest = max(map(len, texts))
    for got, name in ((output.scores, "scores"), (output.logits, "logits")):
        assert len(got) == longest
        for place, values in enumerate(got):
            assert values.shape == (4, VOCAB)
            assert values.dtype == torch.float32
            for row, single in enumerate(singles):
                if place < len(texts[row]):
                    expected = getattr(single, name)[place][0]
                    assert torch.equal(values[row].isinf(), expected.isinf())
                    assert torch.allclose(values[row], expected, atol=1e-5)
                else:
                    assert not values[row].any()


@pytest.mark.parametrize("name", ["repetition_penalty", "watermarking_config"])
def test_with_one_seed_the_text_equals_plain_decoding(name):
    model = large("mistral")
    rows = prompts(4, LENGTHS, seed=6)
    ids, mask = padded(rows)
    kwargs = {"max_new_tokens": NEW, "do_sample": True, "temperature": 0.9, "top_k": 6, "seed": 4}
    with MedusaModel(model, heads_for(model)) as medusa:
        plain = medusa.generate(ids, mask, tree=Tree([]), **kwargs, **settings_of(name))
        unprocessed = medusa.generate(ids, mask, tree=Tree([]), **kwargs)
        texts = new_tokens(plain, ids.shape[1])
        heads = taught(model, [(row.tolist(), text) for row, text in zip(rows, texts, strict=True)])
    assert plain.sequences.tolist() != unprocessed.sequences.tolist()
    with MedusaModel(model, heads) as medusa:
        for tree in TREES.values():
            output = medusa.generate(ids, mask, tree=tree, **kwargs, **settings_of(name))
            assert output.sequences.tolist() == plain.sequences.tolist()
            assert output.steps < plain.steps


def test_the_last_filters_and_the_draw_are_one_op_where_a_kernel_serves(monkeypatch):
    """On a GPU the vocabulary is not sorted at each token; the processors before see each text as ever."""
    model, row = large("mistral"), prompts(1, [9], seed=6)[0]
    kwargs = {"max_new_tokens": NEW, "do_sample": True, "temperature": 0.9, "top_k": 9, "top_p": 0.8, "seed": 4}
    penalty = [lp.RepetitionPenaltyLogitsProcessor(1.3)]
    calls = []

    def drawn(*args, **settings):
        calls.append(settings)
        return draw_tokens(*args, **settings)

    with MedusaModel(model, heads_for(model), Tree.cartesian([3, 2])) as medusa:
        wanted = medusa.generate(row[None], logits_processor=lp.LogitsProcessorList(penalty), **kwargs).sequences
        unfiltered = medusa.generate(row[None], **kwargs | {"top_k": 0, "top_p": 1.0}).sequences
        monkeypatch.setattr(processors, "served_by", lambda *_: types.SimpleNamespace(name="triton"))
        monkeypatch.setattr(processors, "draw_tokens", drawn)
        monkeypatch.setattr(sampling.Nucleus, "__call__", None)
        got = medusa.generate(row[None], logits_processor=lp.LogitsProcessorList(penalty), **kwargs).sequences
    assert got.tolist() == wanted.tolist() != unfiltered.tolist()
    assert len(calls) == NEW
    assert all(one == {"temperature": 0.9, "top_k": 9, "top_p": 0.8} for one in calls)


def test_synthid_watermark_remembers_each_row():
    """A processor of transformers that stores the text it has seen, per row."""
    model = large()
    rows = prompts(3, [6, 9, 4], seed=6)
    ids, mask = padded(rows)
    config = functools.partial(SynthIDTextWatermarkingConfig, keys=[1, 5, 7, 9], ngram_len=3)
    kwargs = {"max_new_tokens": NEW, "do_sample": True, "seed": 4}
    with MedusaModel(model, heads_for(model)) as medusa:
        plain = medusa.generate(ids, mask, tree=Tree([]), watermarking_config=config(), **kwargs)
        output = medusa.generate(ids, mask, tree=TREES["siblings"], watermarking_config=config(), **kwargs)
        unmarked = medusa.generate(ids, mask, tree=Tree([]), **kwargs)
    assert output.sequences.tolist() == plain.sequences.tolist() != unmarked.sequences.tolist()
    assert output.steps < plain.steps


@pytest.mark.parametrize(
    ("kwargs", "host"),
    [
        ({}, False),
        ({"temperature": 0.5, "top_k": 3, "top_p": 0.9, "min_p": 0.1, "typical_p": 0.9, "epsilon_cutoff": 0.01}, False),
        ({"eta_cutoff": 0.01}, True),
        ({"repetition_penalty": 1.1}, True),
        ({"output_scores": True}, True),
    ],
)
def test_tokens_are_selected_on_the_host_only_if_necessary(monkeypatch, kwargs, host):
    """Processors that look at scores alone stay on the device; either way the text equals plain decoding."""
    model = tiny()
    [row] = prompts(1, [9])
    walks, walk = [], LogitsProcessors.walk
    monkeypatch.setattr(LogitsProcessors, "walk", lambda self, *args: walks.append(1) or walk(self, *args))
    with MedusaModel(model, heads_for(model), TREES["siblings"]) as medusa:
        texts = [
            medusa.generate(row[None], max_new_tokens=20, do_sample=True, seed=1, tree=tree, **kwargs).sequences
            for tree in (TREES["siblings"], Tree([]))
        ]
    assert bool(walks) == host
    assert torch.equal(*texts)
