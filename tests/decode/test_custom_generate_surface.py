"""`custom_generate=medusa_generate`: streamers, pipelines, heads by name, peft, and what is refused."""

import functools

import pytest
import torch
from calls import IDS, NEW, TREE, Recorder, attentions, filled, kept, plain, read_by_thread, with_heads
from models import heads_for, prompts, tiny, transformers_greedy
from transformers import (
    EosTokenCriteria,
    MaxLengthCriteria,
    pipeline,
)

from medusa_decoding import MedusaModel, Tree, medusa_generate
from medusa_decoding.checkpoints import read_heads, write_heads


def test_a_streamer_gets_what_plain_generate_gives_it(model, heads):
    [row] = prompts(1, [6])
    expected, got = Recorder(), Recorder()
    plain(model, row[None], streamer=expected, eos_token_id=[3, 9], min_new_tokens=11)
    with_heads(model, heads, row[None], streamer=got, eos_token_id=[3, 9], min_new_tokens=11)
    assert expected.values[0] == [row.tolist()]
    assert len(expected.values) > 11
    assert (got.values, got.ended) == (expected.values, expected.ended) == (expected.values, 1)


def test_a_streamer_given_by_position_or_through_wrappers_is_found(model, heads):
    [row] = prompts(1, [6])
    mask = torch.ones_like(row[None])
    expected = Recorder()
    plain(model, row[None], streamer=expected)
    settings = {"attention_mask": mask, "max_new_tokens": NEW}
    bound = functools.partial(medusa_generate, heads=heads, tree=TREE)

    def wrapped(*args, **kwargs):
        return bound(*args, **kwargs)

    for custom in (bound, wrapped):
        got = Recorder()
        model.generate(row[None], None, None, None, None, None, None, got, custom_generate=custom, **settings)
        assert got.values == expected.values


def test_a_streamer_read_in_another_thread_ends_also_after_a_failure(model, heads, tokenizer):
    [row] = prompts(1, [6])
    expected = tokenizer.decode(transformers_greedy(model, row, NEW))
    for kwargs, error in (
        ({}, None),
        ({"logits_processor": [lambda ids, scores: 1 / 0]}, ZeroDivisionError),
        ({"tree": [[0]]}, ValueError),
        ({"heads": None}, ValueError),
        ({"guidance_scale": 2.0}, ValueError),
    ):
        settings = {"heads": heads, "ids": row[None]} | kwargs
        text = read_by_thread(tokenizer, functools.partial(with_heads, model, **settings), error)
        assert text == ("" if error else expected)


def test_other_callers_are_refused(model, heads):
    [row] = prompts(1, [6])
    with pytest.raises(ValueError, match=r"expected a call by transformers.*MedusaModel.generate can be called"):
        medusa_generate(model, row[None], heads=heads)
    other = tiny(seed=3)
    with pytest.raises(ValueError, match="expected a call by transformers"):
        other.generate(row[None], custom_generate=lambda *args, **kwargs: medusa_generate(model, *args[1:], **kwargs))


@pytest.fixture
def folder(model, tmp_path):
    write_heads(heads_for(model, shared=True), tmp_path / "heads", base_model="../base")
    Tree.chain(2).save(tmp_path / "heads" / "medusa_tree.json")
    return tmp_path / "heads"


def test_heads_of_a_folder_are_read_once(model, folder, monkeypatch):
    read = []

    def counted(path, **kwargs):
        read.append(path)
        return read_heads(path, **kwargs)

    monkeypatch.setattr("medusa_decoding.model.read_heads", counted)
    [row] = prompts(1, [6])
    expected = transformers_greedy(model, row, NEW)
    for name in (folder, str(folder), folder.parent / "." / "heads"):
        assert with_heads(model, name, row[None], tree=None)[0, 6:].tolist() == expected
    assert len(read) == 1
    [medusa] = kept(model)
    assert medusa.tree == "auto"
    assert medusa._policies["auto", True, False].trees[1] == Tree.chain(2)
    monkeypatch.chdir(folder.parent)
    with_heads(model, "heads", row[None])
    assert len(read) == 1
    model.to(torch.bfloat16)
    with_heads(model, folder, row[None])
    assert len(read) == 2
    assert kept(model)[0].heads.w1.dtype == torch.bfloat16


def test_prompt_learning_is_refused():
    peft = pytest.importorskip("peft")
    config = peft.PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM")
    model = tiny()
    heads = heads_for(model)
    adapted = peft.get_peft_model(model, config)
    with pytest.raises(
        ValueError, match=r"expected LlamaForCausalLM's own prepare_inputs_for_generation, got a replaced"
    ):
        adapted.generate(input_ids=IDS, custom_generate=medusa_generate, heads=heads, max_new_tokens=4)
    # peft puts the method back as an attribute of the model, which is no obstacle.
    assert with_heads(model, heads, IDS)[0, 3:].tolist() == transformers_greedy(model, IDS[0], NEW)


TEXTS = ["abc", "kjihgfed", "cab"]


def test_a_text_generation_pipeline(model, heads, tokenizer):
    writer = pipeline("text-generation", model=model, tokenizer=tokenizer)
    settings = {"max_new_tokens": NEW, "do_sample": False, "batch_size": 3, "eos_token_id": 4}
    expected = writer(TEXTS, **settings)
    got = writer(TEXTS, **settings, custom_generate=medusa_generate, heads=heads, tree=TREE)
    assert got == expected
    assert len({len(text["generated_text"]) for [text] in got}) > 1, "no text ends early"
    assert kept(model), "the pipeline did not call medusa_generate"


@pytest.fixture
def no_work(monkeypatch):
    def forward(*args, **kwargs):
        raise AssertionError("the model ran before the arguments were refused")

    monkeypatch.setattr("medusa_decoding.backbone.backbone.Backbone.forward", forward)
    monkeypatch.setattr("transformers.models.llama.modeling_llama.LlamaDecoderLayer.forward", forward)


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        (  # the argument's name since transformers 5.24; earlier versions refuse it themselves
            {"cache": filled()},
            r"past_key_values: expected .* got DynamicCache \(length: 2|not used by the model: \['cache'\]",
        ),
        ({"position_ids": torch.tensor([[5, 6, 7]])}, "position_ids: expected each row's positions from 0 on"),
        ({"position_ids": torch.arange(5)[None]}, r"position_ids: expected .* shape \[1, 3\], got shape \[1, 5\]"),
        ({"ids": torch.zeros(1, 3, 32), "attention_mask": None}, r"input_ids: expected int64 .*float32 \[1, 3, 32\]"),
        ({"ids": IDS[:0]}, "input_ids: expected at least one row and one token"),
        ({"attention_mask": torch.ones(1, 5)}, r"attention_mask: expected .*shape \[1, 3\], got (shape )?\[1, 5\]"),
        ({"heads": None}, "heads: expected MedusaHeads, or a folder or hub id of heads, got NoneType"),
        ({"heads": heads_for(tiny(hidden_size=64, head_dim=16))}, "hidden_size 32 like the base model, got 64"),
        ({"tree": [[0]]}, "tree: expected a Tree or"),
        ({"stop_strings": "b"}, r"tokenizer: expected the model's tokenizer with stop_strings.*StopStringCriteria"),
        ({"eos_token_id": [3, 5], "stopping_criteria": [EosTokenCriteria(5)]}, r"eos_token_id = \[3, 5\], got \[5\]"),
        ({"forced_eos_token_id": 5, "stopping_criteria": [MaxLengthCriteria(8)]}, "expected max_length 19 .* got 8"),
        ({"max_new_token": 4}, "max_new_token"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_what_cannot_work_is_refused_by_name_before_any_work(model, heads, no_work, kwargs, words):
    own = attentions(model)
    with pytest.raises((ValueError, TypeError), match=words):
        with_heads(model, **({"heads": heads, "ids": IDS} | kwargs))
    assert attentions(model) == own


def test_neutral_arguments_are_allowed(model, heads):
    neutral = {
        "num_beams": 1, "assistant_model": None, "streamer": None, "past_key_values": None, "use_cache": True,
        "position_ids": torch.tensor([[0, 1, 2]]), "cache_implementation": "static", "synced_gpus": False, "top_k": 0,
        "logits_to_keep": 1, "stop_strings": None,
    }  # fmt: skip
    got = model.generate(IDS, custom_generate=medusa_generate, heads=heads, max_new_tokens=NEW, **neutral)
    assert got[0, 3:].tolist() == transformers_greedy(model, IDS[0], NEW)


def test_the_cache_may_be_in_8_bits_for_a_call():
    model = tiny(max_position_embeddings=512)
    heads, settings = heads_for(model), {"max_new_tokens": 200, "tree": TREE}
    with MedusaModel(model, heads, cache_dtype="int8") as medusa:
        expected = medusa.generate(IDS, **settings).sequences
    settings |= {"custom_generate": medusa_generate, "heads": heads}
    for dtype, same in (("int8", True), (None, False), ("int8", True)):
        assert torch.equal(model.generate(IDS, cache_dtype=dtype, **settings), expected) == same
    with pytest.raises(ValueError, match="cache_dtype: expected None or 'int8', got 'int4'"):
        model.generate(IDS, cache_dtype="int4", **settings)
