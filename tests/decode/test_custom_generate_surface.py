"""`custom_generate=medusa_generate`: streamers, pipelines, heads by name, peft, and what is refused."""

import functools
import threading

import pytest
import torch
from calls import IDS, NEW, TREE, Recorder, attentions, kept, plain, with_heads
from models import VOCAB, heads_for, prompts, tiny, transformers_greedy
from transformers import (
    DynamicCache,
    EosTokenCriteria,
    GenerationConfig,
    GPT2Config,
    GPT2LMHeadModel,
    MaxLengthCriteria,
    TextIteratorStreamer,
    TextStreamer,
    pipeline,
)
from transformers.generation import logits_process as lp
from transformers.generation import utils as generation_utils

from medusa_decoding import Tree, medusa_generate
from medusa_decoding.backbone.attention_swap import TreeAttention
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


def test_a_text_streamer_prints_the_same(model, heads, tokenizer, capsys):
    [row] = prompts(1, [6])
    plain(model, row[None], streamer=TextStreamer(tokenizer, skip_prompt=True))
    expected = capsys.readouterr().out
    with_heads(model, heads, row[None], streamer=TextStreamer(tokenizer, skip_prompt=True))
    assert capsys.readouterr().out == expected
    assert expected.strip() == tokenizer.decode(transformers_greedy(model, row, NEW))


def test_a_streamer_read_in_another_thread_ends_also_after_a_failure(model, heads, tokenizer):
    [row] = prompts(1, [6])

    class FailingError(Exception):
        pass

    def fail(input_ids, scores):
        raise FailingError

    for kwargs, errors in (
        ({}, ()),
        ({"logits_processor": [fail]}, FailingError),
        ({"tree": [[0]]}, ValueError),
        ({"heads": None}, ValueError),
        ({"guidance_scale": 2.0}, ValueError),
    ):
        streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=30)
        raised = []

        def write(streamer=streamer, kwargs=kwargs, errors=errors, raised=raised):
            try:
                with_heads(model, **({"heads": heads} | kwargs), ids=row[None], streamer=streamer)
            except errors as error:
                raised.append(error)

        thread = threading.Thread(target=write)
        thread.start()
        text = "".join(streamer)
        thread.join()
        assert len(raised) == bool(errors)
        assert streamer.text_queue.empty()
        assert text == ("" if errors else tokenizer.decode(transformers_greedy(model, row, NEW)))


def test_a_streamer_that_fails_ends_the_call_and_leaves_the_model_usable(model, heads):
    [row] = prompts(1, [6])
    own = attentions(model)
    streamer = Recorder(fail_at=4)
    with pytest.raises(InterruptedError):
        with_heads(model, heads, row[None], streamer=streamer)
    assert (len(streamer.values), streamer.ended) == (4, 1)
    assert attentions(model) == own
    assert with_heads(model, heads, row[None])[0, 6:].tolist() == transformers_greedy(model, row, NEW)


def called_by(names):
    """A future version of transformers' generate: same name, same module, other local variables."""
    body = "".join(f"    {name} = None\n" for name in names)
    found = {}
    exec(
        compile(f"def generate(self, decode):\n{body}    return decode()\n", "a_release", "exec"),
        vars(generation_utils),
        found,
    )
    return found["generate"]


def test_a_transformers_release_that_hides_the_streamer_is_refused(model, heads):
    [row] = prompts(1, [6])
    decode = functools.partial(medusa_generate, model, row[None], heads=heads)
    with pytest.raises(ValueError, match=r"to have arguments streamer, .* got none named streamer in transformers \d"):
        called_by(["assistant_model", "synced_gpus"])(model, decode)
    with pytest.raises(ValueError, match=r"got none named streamer, assistant_model, synced_gpus"):
        called_by([])(model, decode)
    with pytest.raises(ValueError, match="generation_config: expected the one that transformers has prepared"):
        called_by(["streamer", "assistant_model", "synced_gpus"])(model, decode)


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
    assert medusa._adaptive[False].trees[1] == Tree.chain(2)
    monkeypatch.chdir(folder.parent)
    with_heads(model, "heads", row[None])
    assert len(read) == 1
    model.to(torch.bfloat16)
    with_heads(model, folder, row[None])
    assert len(read) == 2
    assert kept(model)[0].heads.w1.dtype == torch.bfloat16


def test_a_folder_without_heads_is_named(model, tmp_path):
    with pytest.raises(ValueError, match="expected a checkpoint of Medusa heads"):
        with_heads(model, tmp_path, IDS)


def test_a_lora_wrapped_model_decodes_with_its_adapter():
    peft = pytest.importorskip("peft")
    model = tiny()
    heads = heads_for(model)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "up_proj"], task_type="CAUSAL_LM")
    adapted = peft.get_peft_model(model, config).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.5)
    [row] = prompts(1, [7])
    ids = {"input_ids": row[None], "attention_mask": torch.ones_like(row[None])}
    settings = {"max_new_tokens": NEW, "do_sample": False}
    expected, streamer = adapted.generate(**ids, **settings), Recorder()
    medusa = {"custom_generate": medusa_generate, "heads": heads, "tree": TREE}
    assert adapted.generate(**ids, **settings, **medusa, streamer=streamer).tolist() == expected.tolist()
    assert [value[0] for value in streamer.values[1:]] == expected[0, 7:].tolist()
    with adapted.disable_adapter():
        without = adapted.generate(**ids, **settings)
        assert adapted.generate(**ids, **settings, **medusa).tolist() == without.tolist()
    assert without.tolist() != expected.tolist(), "the adapter changes nothing: the test shows nothing"
    assert not any(isinstance(module, TreeAttention) for module in adapted.modules())


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


@pytest.mark.parametrize("batch_size", [1, 3])
def test_a_text_generation_pipeline(model, heads, tokenizer, batch_size):
    writer = pipeline("text-generation", model=model, tokenizer=tokenizer)
    settings = {"max_new_tokens": NEW, "do_sample": False, "batch_size": batch_size, "eos_token_id": 4}
    expected = writer(TEXTS, **settings)
    got = writer(TEXTS, **settings, custom_generate=medusa_generate, heads=heads, tree=TREE)
    assert got == expected
    assert len({len(text["generated_text"]) for [text] in got}) > 1, "no text ends early"
    assert kept(model), "the pipeline did not call medusa_generate"


def test_a_pipeline_with_streamer_stop_sequence_and_several_samples(model, heads, tokenizer):
    writer = pipeline("text-generation", model=model, tokenizer=tokenizer)
    medusa = {"custom_generate": medusa_generate, "heads": heads, "tree": TREE}
    settings = {"max_new_tokens": NEW, "do_sample": False, "return_full_text": False, "skip_special_tokens": False}
    expected, got = Recorder(), Recorder()
    writer("abc", **settings, streamer=expected)
    [text] = writer("abc", **settings, streamer=got, **medusa)
    assert got.values == expected.values
    assert got.ended == 1
    whole = text["generated_text"]
    assert len(whole) == NEW
    stopped = writer("abc", **settings, stop_sequence=whole[4:6], **medusa)
    assert stopped == writer("abc", **settings, stop_sequence=whole[4:6])
    assert len(stopped[0]["generated_text"]) < NEW
    samples = {"max_new_tokens": NEW, "num_return_sequences": 4, "return_full_text": False}
    texts = [sample["generated_text"] for sample in writer("abc", **samples, **medusa, seed=3)]
    assert len(set(texts)) > 1
    assert texts == [sample["generated_text"] for sample in writer("abc", **samples, **medusa, seed=3)]
    [scored] = writer("abc", **settings, **medusa, return_dict_in_generate=True, output_scores=True)
    assert scored["generated_text"] == whole


def filled():
    """A cache of two tokens."""
    cache = DynamicCache()
    cache.update(torch.zeros(1, 2, 2, 8), torch.zeros(1, 2, 2, 8), 0)
    return cache


@pytest.fixture
def no_work(monkeypatch):
    def forward(*args, **kwargs):
        raise AssertionError("the model ran before the arguments were refused")

    monkeypatch.setattr("medusa_decoding.backbone.backbone.Backbone.forward", forward)
    monkeypatch.setattr("transformers.models.llama.modeling_llama.LlamaDecoderLayer.forward", forward)


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"num_beams": 3}, r"num_beams: expected 1, got 3; .*no beam search"),
        ({"num_beams": 2, "do_sample": True}, "num_beams: expected 1, got 2"),
        ({"penalty_alpha": 0.6, "top_k": 4}, "penalty_alpha: .*no contrastive search"),
        ({"guidance_scale": 1.5}, "guidance_scale: expected 1.0, got 1.5"),
        ({"dola_layers": "high"}, "dola_layers"),
        ({"prompt_lookup_num_tokens": 3}, "prompt_lookup_num_tokens: .*another way of speculation"),
        ({"assistant_model": tiny(seed=7)}, "assistant_model: expected None, got LlamaForCausalLM"),
        ({"synced_gpus": True}, "synced_gpus: expected False, got True"),
        (
            {"past_key_values": filled()},
            r"past_key_values: expected .* empty cache, got DynamicCache \(length: 2",
        ),
        (  # the argument's name since transformers 5.24; earlier versions refuse it themselves
            {"cache": filled()},
            r"past_key_values: expected .* got DynamicCache \(length: 2|not used by the model: \['cache'\]",
        ),
        (
            {"cache_implementation": "offloaded"},
            "cache_implementation: expected .*, got 'offloaded'",
        ),
        ({"output_attentions": True, "return_dict_in_generate": True}, "output_attentions: expected False"),
        ({"output_hidden_states": True, "return_dict_in_generate": True}, "output_hidden_states: expected False"),
        ({"position_ids": torch.tensor([[5, 6, 7]])}, "position_ids: expected each row's positions from 0 on"),
        ({"position_ids": torch.arange(5)[None]}, r"position_ids: expected .* shape \[1, 3\], got shape \[1, 5\]"),
        ({"position_ids": [[0, 1, 2]]}, r"position_ids: expected .* shape \[1, 3\], got list"),
        ({"inputs_embeds": torch.zeros(1, 3, 32)}, "inputs_embeds: expected None, got Tensor"),
        ({"ids": torch.zeros(1, 3, 32), "attention_mask": None}, r"input_ids: expected int64 .*float32 \[1, 3, 32\]"),
        ({"ids": IDS[None], "attention_mask": None}, r"input_ids: expected int64 .*int64 \[1, 1, 3\]"),
        ({"ids": IDS[:, :0]}, "input_ids: expected at least one row and one token"),
        ({"ids": IDS[:0]}, "input_ids: expected at least one row and one token"),
        ({"attention_mask": torch.ones(1, 5)}, r"attention_mask: expected .*shape \[1, 3\], got (shape )?\[1, 5\]"),
        ({"attention_mask": torch.tensor([[0, 1, 1, 1]])}, r"attention_mask: expected shape \[1, 3\], got \[1, 4\]"),
        ({"heads": None}, "heads: expected MedusaHeads, or a folder or hub id of heads, got NoneType"),
        ({"heads": 3}, "heads: expected MedusaHeads, .* got int"),
        ({"heads": heads_for(tiny(hidden_size=64, head_dim=16))}, "hidden_size 32 like the base model, got 64"),
        ({"tree": [[0]]}, "tree: expected a Tree or"),
        ({"tree": Tree.chain(5)}, "has depth 5, expected at most 4"),
        ({"acceptance": "loose"}, "acceptance: expected 'lossless' or 'typical', got 'loose'"),
        ({"acceptance": "typical", "do_sample": True}, "do_sample: expected False with acceptance='typical'"),
        ({"backend": "graph"}, "backend: expected 'auto', 'eager' or 'compiled' on cpu, got 'graph'"),
        ({"seed": 1.5}, "seed: expected a whole number"),
        ({"ids": IDS.repeat(2, 1), "streamer": Recorder()}, "streamer: expected a batch of 1, got 2"),
        ({"stop_strings": "b"}, r"tokenizer: expected the model's tokenizer with stop_strings.*StopStringCriteria"),
        ({"stop_strings": [""], "tokenizer": object()}, "stop_strings: expected one or more non-empty"),
        ({"eos_token_id": [3, 5], "stopping_criteria": [EosTokenCriteria(5)]}, r"eos_token_id = \[3, 5\], got \[5\]"),
        ({"forced_eos_token_id": 5, "stopping_criteria": [MaxLengthCriteria(8)]}, "expected max_length 19 .* got 8"),
        ({"ids": torch.tensor([[1, VOCAB]])}, rf"ids in \[0, {VOCAB}\)"),
        ({"attention_mask": torch.tensor([[1, 0, 1]])}, "padded at one end only"),
        ({"max_new_token": 4}, "max_new_token"),
        ({"num_return_sequences": 2}, "num_return_sequences"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_what_cannot_work_is_refused_by_name_before_any_work(model, heads, no_work, kwargs, words):
    own = attentions(model)
    with pytest.raises((ValueError, TypeError), match=words):
        with_heads(model, **({"heads": heads, "ids": IDS} | kwargs))
    assert attentions(model) == own


def test_embeddings_without_ids_are_refused_by_name(model, heads, no_work):
    for given in ({}, {"attention_mask": torch.ones_like(IDS)}):
        with pytest.raises(ValueError, match="inputs_embeds: expected None, got Tensor"):
            model.generate(inputs_embeds=torch.zeros(1, 3, 32), custom_generate=medusa_generate, heads=heads, **given)


def test_two_sets_of_allowed_tokens_are_refused(model, heads, no_work):
    constrained = [lp.PrefixConstrainedLogitsProcessor(lambda row, text: [1], 1) for _ in range(2)]
    with pytest.raises(ValueError, match="prefix_allowed_tokens_fn: expected at most one, got 2"):
        with_heads(model, heads, IDS, logits_processor=constrained)


def test_an_unsupported_family_is_refused(heads):
    gpt2 = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=VOCAB, bos_token_id=1, eos_token_id=2))
    for given in (heads, "a/checkpoint"):
        with pytest.raises(ValueError, match=r"Llama-family.*GPT2LMHeadModel"):
            gpt2.generate(IDS, custom_generate=medusa_generate, heads=given)


def test_stop_strings_in_a_config_are_refused_by_transformers_itself(model, heads, tokenizer):
    # If this fails because nothing is raised, the docstring's advice is no longer needed.
    config = GenerationConfig(stop_strings="b", max_new_tokens=4)
    with pytest.raises(ValueError, match="tokenizer"):
        model.generate(IDS, custom_generate=medusa_generate, heads=heads, generation_config=config, tokenizer=tokenizer)


def test_neutral_arguments_are_allowed(model, heads):
    neutral = {
        "num_beams": 1, "assistant_model": None, "streamer": None, "past_key_values": None, "use_cache": True,
        "position_ids": torch.tensor([[0, 1, 2]]), "cache_implementation": "static", "synced_gpus": False, "top_k": 0,
        "logits_to_keep": 1, "stop_strings": None,
    }  # fmt: skip
    got = model.generate(IDS, custom_generate=medusa_generate, heads=heads, max_new_tokens=NEW, **neutral)
    assert got[0, 3:].tolist() == transformers_greedy(model, IDS[0], NEW)
