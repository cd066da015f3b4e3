"""`custom_generate=medusa_generate`: the text, scores and ends of transformers' own generate."""

import functools

import pytest
import torch
from calls import NEW, TREE, plain, with_heads
from models import VOCAB, heads_for, padded, prompts, tiny, transformers_greedy
from oracles import assert_some_accepted
from transformers import (
    EosTokenCriteria,
    GenerationConfig,
    MaxLengthCriteria,
    StoppingCriteria,
    WatermarkingConfig,
)
from transformers.generation import logits_process as lp

from medusa_decoding import MedusaModel
from medusa_decoding.model import MedusaOutput


class EndsWith(StoppingCriteria):
    def __init__(self, token):
        self.token = token

    def __call__(self, input_ids, scores, **kwargs):
        return input_ids[:, -1] == self.token


class Prefers(lp.LogitsProcessor):
    """Depends on the text so far and is called once per token, so a wrong prefix or order is noticed."""

    def __call__(self, input_ids, scores):
        scores = scores.clone()
        scores[torch.arange(len(scores)), (input_ids[:, -3:].sum(1) + input_ids[:, -1]) % VOCAB] += 4.0
        return scores


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("llama", {}),
        ("mistral", {"eos_token_id": [3, 5, 9]}),
        ("qwen2", {"eos_token_id": [3, 5, 9], "pad_token_id": 7, "min_new_tokens": 9}),
        ("qwen3", {"eos_token_id": [3, 5, 9], "min_length": 15}),
        ("llama", {"max_new_tokens": None, "max_length": 21, "eos_token_id": 4}),
        ("mistral", {"max_new_tokens": None}),
        ("qwen2", {"bad_words_ids": [[3], [5, 2], [1, 4]]}),
        ("qwen3", {"suppress_tokens": [2, 6], "begin_suppress_tokens": [1, 5, 8]}),
        ("llama", {"max_new_tokens": 1}),
    ],
    ids=str,
)
def test_a_padded_batch_gets_the_text_of_plain_generate(family, settings):
    model = tiny(family)
    ids, mask = padded(prompts(4, [5, 2, 9, 4]))
    expected = plain(model, ids, attention_mask=mask, **settings)
    output = with_heads(
        model, heads_for(model), ids, attention_mask=mask, return_dict_in_generate=True, metrics=True, **settings
    )
    assert isinstance(output, MedusaOutput)
    assert output.sequences.tolist() == expected.tolist()
    if output.steps > 10:
        assert_some_accepted(output)
    assert output.metrics.steps == output.steps


@pytest.mark.parametrize(
    "settings",
    [
        {"repetition_penalty": 1.6},
        {"sequence_bias": {(3,): -4.0, (5, 2): 3.0}},
        {"exponential_decay_length_penalty": (4, 1.4), "eos_token_id": 5},
        {"logits_processor": [Prefers(), lp.RepetitionPenaltyLogitsProcessor(1.7)], "repetition_penalty": 1.1},
        {
            "logits_processor": [lp.RepetitionPenaltyLogitsProcessor(1.1), lp.RepetitionPenaltyLogitsProcessor(1.9)],
            "repetition_penalty": 1.1,
        },
    ],
    ids="+".join,
)
def test_processors_see_each_row_as_if_it_were_alone(model, heads, settings):
    rows = prompts(3, [6, 2, 9])
    expected = [plain(model, row[None], **settings)[0, len(row) :].tolist() for row in rows]
    unprocessed = [transformers_greedy(model, row, NEW) for row in rows]
    assert expected != unprocessed, "the processor changes nothing: the test shows nothing"
    ids, mask = padded(rows)
    got = with_heads(model, heads, ids, attention_mask=mask, **settings)[:, ids.shape[1] :]
    # Rows that end are padded with zeros.
    assert [row[: len(text)] for row, text in zip(got.tolist(), expected, strict=True)] == expected


@pytest.mark.parametrize("own_instance", [False, True])
def test_prefix_allowed_tokens_fn_gets_the_row_and_its_text(model, heads, own_instance):
    def allowed(row, text):
        return [(int(text[-1]) + step + row) % VOCAB for step in (1, 2, 3)]

    def alone(row, asked, text):
        return allowed(row, text)

    rows = prompts(3, [6, 2, 9])
    expected = [
        plain(model, text[None], prefix_allowed_tokens_fn=functools.partial(alone, row))[0, len(text) :].tolist()
        for row, text in enumerate(rows)
    ]
    ids, mask = padded(rows)
    given = {"prefix_allowed_tokens_fn": allowed}
    if own_instance:
        given = {"logits_processor": [lp.PrefixConstrainedLogitsProcessor(allowed, 1)]}
    got = with_heads(model, heads, ids, attention_mask=mask, **given)
    assert got[:, ids.shape[1] :].tolist() == expected


def test_scores_and_logits_are_those_of_plain_generate(model, heads):
    ids, mask = padded(prompts(3, [5, 2, 9]))
    wanted = {
        "attention_mask": mask, "return_dict_in_generate": True, "output_scores": True, "output_logits": True,
        "eos_token_id": [3, 5, 9], "min_new_tokens": 4, "suppress_tokens": [2],
    }  # fmt: skip
    expected, got = plain(model, ids, **wanted), with_heads(model, heads, ids, **wanted)
    assert got.sequences.tolist() == expected.sequences.tolist()
    assert len(got.scores) == len(expected.scores) == len(got.logits) == max(got.new_tokens)
    assert min(got.new_tokens) < max(got.new_tokens), "no row ended early: the test shows less than it says"
    for place in range(len(got.scores)):
        live = torch.tensor([place < count for count in got.new_tokens])
        torch.testing.assert_close(got.scores[place][live], expected.scores[place][live], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(got.logits[place][live], expected.logits[place][live], rtol=1e-4, atol=1e-4)
    without = with_heads(model, heads, ids, attention_mask=mask, return_dict_in_generate=True)
    assert without.scores is None
    assert without.logits is None


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"temperature": 0.6, "top_p": 0.8, "top_k": 9, "renormalize_logits": True},
        {"temperature": 0.6, "logits_processor": [lp.TemperatureLogitsWarper(0.5), lp.TopKLogitsWarper(20)]},
        {"watermarking_config": WatermarkingConfig(bias=3.0, seeding_scheme="selfhash")},
        {"generation_config": GenerationConfig(do_sample=True, top_k=7, min_p=0.01, typical_p=0.95), "do_sample": None},
    ],
    ids=["defaults", "temperature", "own warpers", "watermark", "generation_config"],
)
def test_sampling_draws_from_the_distribution_that_transformers_prepares(settings):
    # The first token's scores do not depend on what is drawn. More tokens than 50, transformers' default top_k.
    model = tiny(vocab_size=80)
    ids, mask = padded(prompts(2, [5, 9], vocab=80))
    wanted = {
        "attention_mask": mask, "do_sample": True, "return_dict_in_generate": True, "output_scores": True,
        "max_new_tokens": 2,
    } | settings  # fmt: skip
    expected = plain(model, ids, **wanted).scores[0]
    got = with_heads(model, heads_for(model), ids, **wanted)
    torch.testing.assert_close(got.scores[0], expected, rtol=1e-4, atol=1e-4)
    if not settings:
        assert (expected > float("-inf")).sum(1).tolist() == [50, 50]
    first = got.sequences[:, ids.shape[1]]
    assert bool((expected[torch.arange(2), first] > float("-inf")).all())


@pytest.mark.parametrize(("count", "seeded"), [(1, "keyword"), (3, "manual_seed")])
def test_one_seed_writes_what_medusa_model_writes(model, heads, count, seeded):
    ids, mask = padded(prompts(2, [4, 9]))
    settings = {"do_sample": True, "temperature": 1.3, "top_k": 6, "num_return_sequences": count, "max_new_tokens": NEW}
    torch.manual_seed(11)
    with MedusaModel(model, heads, TREE) as medusa:
        seed = {"seed": 5} if seeded == "keyword" else {}
        expected = medusa.generate(ids, mask, **settings, **seed).sequences
    torch.manual_seed(11)
    got = with_heads(model, heads, ids, attention_mask=mask, **settings, **seed)
    assert got.shape == (2 * count, ids.shape[1] + NEW)
    assert got.tolist() == expected.tolist()
    torch.manual_seed(12)
    other = with_heads(model, heads, ids, attention_mask=mask, **settings, **({"seed": 6} if seed else {}))
    assert other.tolist() != expected.tolist()


@pytest.mark.parametrize(
    "criteria",
    [
        [EndsWith(4)],
        [MaxLengthCriteria(3)],
        [EosTokenCriteria([3, 8])],
        [EosTokenCriteria([3]), EosTokenCriteria([8]), EndsWith(4), MaxLengthCriteria(17)],
    ],
    ids=["own", "passed already", "more ends", "several"],
)
def test_stopping_criteria_end_where_plain_generate_ends(model, heads, criteria):
    for row in prompts(6, [6]):
        expected = plain(model, row[None], eos_token_id=3, stopping_criteria=criteria)
        got = with_heads(model, heads, row[None], eos_token_id=3, stopping_criteria=criteria)
        assert got.tolist() == expected.tolist()
    default = [plain(model, row[None], eos_token_id=3).shape for row in prompts(6, [6])]
    ended = [plain(model, row[None], eos_token_id=3, stopping_criteria=criteria).shape for row in prompts(6, [6])]
    assert ended != default, "the criteria change nothing: the test shows nothing"
