"""What callers of transformers' generate rely on: arguments that change nothing, wrappers, masks, prompts."""

import functools
import inspect
import logging

import pytest
import torch
import transformers
from calls import IDS, NEW, TREE, WANTED, kept, one_letter_per_token, plain, with_heads
from models import transformers_greedy
from transformers import (
    CompileConfig,
    DynamicCache,
    LlamaForCausalLM,
    StaticCache,
)
from transformers.generation import GenerationMixin

from medusa_decoding import MedusaModel, medusa_generate
from medusa_decoding.generation import settings

# transformers 5.24 has renamed past_key_values to cache, and takes both; earlier versions refuse the new name.
CACHE = ["past_key_values", "cache"]
if "cache" not in inspect.signature(LlamaForCausalLM.forward).parameters:
    CACHE.remove("cache")

# One value of each field that is ignored, other than transformers' default.
IGNORED = {
    "use_cache": False,
    "cache_implementation": "sliding_window",
    "cache_config": {"max_batch_size": 1},
    "max_cache_len": 40,
    "prefill_chunk_size": 2,
    "compile_config": CompileConfig(),
    "disable_compile": True,
    "continuous_batching_config": getattr(transformers, "ContinuousBatchingConfig", object)(),
    "low_memory": True,
    "early_stopping": True,
    "length_penalty": 2.0,
    "num_assistant_tokens": 3,
    "num_assistant_tokens_schedule": "heuristic",
    "assistant_confidence_threshold": 0.5,
    "max_matching_ngram_size": 3,
    "assistant_lookbehind": 4,
    "target_lookbehind": 4,
    "assistant_ensemble_weight": 0.5,
    "speculation_type": "mtp",
    "decoder_start_token_id": 1,
}


def test_each_ignored_field_has_a_value_here():
    assert set(IGNORED) == set(settings._IGNORED)


@pytest.mark.parametrize("name", IGNORED)
def test_fields_that_only_affect_transformers_loop_are_ignored(model, heads, name, caplog):
    if not hasattr(model.generation_config, name):
        pytest.skip(f"this transformers has no {name}")
    expected = transformers_greedy(model, IDS[0], NEW)
    assert with_heads(model, heads, IDS, **{name: IGNORED[name]})[0, 3:].tolist() == expected
    caplog.set_level(logging.INFO, "medusa_decoding")
    with MedusaModel(model, heads, TREE) as medusa:
        got = medusa.generate(IDS, max_new_tokens=NEW, **{name: IGNORED[name]})
    assert got.sequences[0, 3:].tolist() == expected
    assert f"{name}: ignored" in caplog.text


@pytest.mark.parametrize(
    "kwargs",
    [
        {"output_attentions": True},
        {"output_hidden_states": True},
        {"labels": IDS},
        {"logits_to_keep": 0},
        {"assistant_tokenizer": object(), "tokenizer": object()},
        {"negative_prompt_ids": IDS},
        {"guidance_scale": 1},
    ],
    ids="+".join,
)
def test_arguments_that_change_nothing_are_accepted(model, heads, kwargs):
    expected = plain(model, IDS, **kwargs).tolist()
    assert with_heads(model, heads, IDS, **kwargs).tolist() == expected


@pytest.mark.parametrize("name", CACHE)
@pytest.mark.parametrize("kind", ["of the config", "static", "with use_cache=False"])
def test_an_empty_cache_is_accepted_and_stays_empty(model, heads, kind, name):
    caches = {
        "of the config": lambda: DynamicCache(config=model.config),
        "static": lambda: StaticCache(config=model.config, max_cache_len=40),
    }
    cache = caches.get(kind, DynamicCache)()
    given = {"use_cache": False} if "use_cache" in kind else {}
    for _ in range(2):
        output = with_heads(model, heads, IDS, return_dict_in_generate=True, **given, **{name: cache})
        assert output.sequences[0, 3:].tolist() == transformers_greedy(model, IDS[0], NEW)
        assert output.past_key_values is None
        assert int(cache.get_seq_length()) == 0


@pytest.mark.parametrize("more", [{}, {"do_sample": True, "top_k": 5, "top_p": 0.9}])
def test_removing_invalid_values_changes_nothing(model, heads, more):
    given = more | WANTED | {"remove_invalid_values": True}
    torch.manual_seed(0)
    expected = plain(model, IDS, **given)
    got = with_heads(model, heads, IDS, **given, seed=1)
    torch.testing.assert_close(got.scores[0], expected.scores[0], rtol=1e-4, atol=1e-4)
    texts = [with_heads(model, heads, IDS, **more, seed=1, remove_invalid_values=asked) for asked in (True, False)]
    assert texts[0].tolist() == texts[1].tolist()
    if "do_sample" not in more:
        assert texts[0].tolist() == expected.sequences.tolist()


def test_invalid_values_are_errors_also_where_transformers_would_remove_them(model, heads):
    with torch.no_grad():
        model.lm_head.weight[4] = float("nan")
    with pytest.raises(FloatingPointError):
        with_heads(model, heads, IDS, remove_invalid_values=True)


class Subclass(LlamaForCausalLM):
    """Adds keywords of its own to generate's."""

    def generate(self, inputs=None, *, wanted=None, **options):
        return super().generate(inputs, **options)


def wrapped_by_name(function):
    @functools.wraps(function)
    def generate(self, *positional, **options):
        return function(self, *positional, **options)

    return generate


def wrapped_without_traces(function):
    def call(owner, *some, **named):
        named = dict(named)
        with torch.inference_mode():
            return function(owner, *some, **named)

    return call


def taken_apart(function):
    """Names the tokenizer itself and bypasses transformers' own decorator."""

    def call(self, inputs, tokenizer=None, **rest):
        return function.__wrapped__(self, inputs, tokenizer=tokenizer, **rest)

    return call


def twice(function):
    return wrapped_without_traces(wrapped_by_name(function))


@pytest.mark.parametrize("wrap", [taken_apart, twice, "subclass", "instance"])
def test_a_tokenizer_is_found_whatever_wraps_generate(model, heads, monkeypatch, wrap):
    tokenizer = one_letter_per_token()
    whole = tokenizer.decode(transformers_greedy(model, IDS[0], 24))
    expected = plain(model, IDS, max_new_tokens=24, stop_strings=whole[8:10], tokenizer=tokenizer)
    assert expected.shape[1] < 27
    if wrap == "subclass":
        model.__class__ = Subclass
    elif wrap == "instance":
        model.generate = functools.partial(wrapped_by_name(GenerationMixin.generate), model)
    else:
        monkeypatch.setattr(GenerationMixin, "generate", wrap(GenerationMixin.generate))
    given = {"max_new_tokens": 24, "stop_strings": whole[8:10]}
    assert with_heads(model, heads, IDS, tokenizer=tokenizer, **given).tolist() == expected.tolist()
    # A variable of that name in an outer frame is not an argument of the call.
    with pytest.raises(ValueError, match="tokenizer: expected the model's tokenizer with stop_strings, got None"):
        with_heads(model, heads, IDS, **given)


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        ([[1, 0, 3]], r"expected row 0 padded at one end only, got \[1, 0, 1\]"),
        ([[1, 2], [0, 0]], "row 1 has no token"),
    ],
)
def test_messages_say_that_transformers_makes_a_mask(model, heads, ids, words):
    ids = torch.tensor(ids)
    for mask in (None, (ids != 0).long()):
        with pytest.raises(ValueError, match=f"attention_mask: {words}; if nothing is padded, give .* makes one"):
            with_heads(model, heads, ids, attention_mask=mask)
    rows = with_heads(model, heads, ids, attention_mask=torch.ones_like(ids))[:, ids.shape[1] :]
    assert rows.tolist() == [transformers_greedy(model, row, NEW) for row in ids]


def test_prompts_in_every_form(model, heads):
    model.generation_config.bos_token_id = 1
    expected = transformers_greedy(model, IDS[0], 4)
    given = {"custom_generate": medusa_generate, "heads": heads, "max_new_tokens": 4, "do_sample": False}
    for form in ({"inputs": IDS}, {"input_ids": IDS}, {"input_ids": IDS.int()}):
        assert model.generate(**form, **given)[0, 3:].tolist() == expected
    # Without a prompt transformers begins with bos_token_id.
    assert model.generate(**given)[0].tolist() == [1, *transformers_greedy(model, torch.tensor([1]), 4)]
    for mask in (torch.ones_like(IDS).bool(), torch.ones(1, 3)):
        assert model.generate(IDS, attention_mask=mask, **given)[0, 3:].tolist() == expected
    assert kept(model)
