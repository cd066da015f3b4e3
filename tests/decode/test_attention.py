"""The attention swap: exact undo, and no change for other callers. See test_lora.py and test_quantised.py as well."""

import copy
import gc
import pickle

import pytest
import torch
from models import FAMILIES, heads_for, prompts, tiny, transformers_greedy
from transformers import GPT2Config, GPT2LMHeadModel, LlamaForSequenceClassification

from medusa_decoding import MedusaModel, Tree
from medusa_decoding.backbone.attention_swap import AttentionSwap, TreeAttention

TREE = Tree.cartesian([3, 2])
NEW = 16


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_swapped_model_is_unchanged_for_other_callers(family, implementation):
    model = tiny(family)
    model.set_attn_implementation(implementation)
    ids = torch.stack(prompts(2, [11]))
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    before = model(ids, attention_mask=mask).logits
    text = model.generate(ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False)
    with MedusaModel(model, heads_for(model), TREE) as medusa:
        during_first = model(ids, attention_mask=mask).logits
        medusa.generate(ids, mask, max_new_tokens=NEW)
        during = model(ids, attention_mask=mask).logits
        text_during = model.generate(ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False)
    after = model(ids, attention_mask=mask).logits
    for logits in (during_first, during, after):
        assert torch.equal(before, logits)
    assert torch.equal(text, text_during)


def test_gradients_flow_through_a_swapped_model():
    model = tiny()
    ids = torch.stack(prompts(1, [9]))
    model(ids, labels=ids).loss.backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    with AttentionSwap(model.model.layers):
        model(ids, labels=ids).loss.backward()
    assert all(torch.equal(expected[name], p.grad) for name, p in model.named_parameters())


def test_training_mode_reaches_the_original_modules():
    model = tiny()
    with AttentionSwap(model.model.layers):
        model.train()
        assert all(layer.self_attn.original.training for layer in model.model.layers)
        model.eval()
    assert not any(module.training for module in model.modules())


def test_a_garbage_collected_owner_does_not_keep_the_model_swapped():
    model = tiny()
    original = model.model.layers[0].self_attn
    medusa = MedusaModel(model)
    medusa = MedusaModel(model)  # as a notebook cell run twice does
    gc.collect()
    medusa.undo()
    assert model.model.layers[0].self_attn is original


@pytest.mark.parametrize("way", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_of_a_swapped_model_is_not_swapped(way):
    model = tiny()
    ids = torch.stack(prompts(1, [9]))
    with MedusaModel(model):
        again = way(model)
        assert isinstance(model.model.layers[0].self_attn, TreeAttention)
    assert not any(isinstance(module, TreeAttention) for module in again.modules())
    assert again.model.layers[0].self_attn is not model.model.layers[0].self_attn
    assert torch.equal(again(ids).logits, model(ids).logits)


def test_a_checkpoint_saved_while_swapped_equals_one_saved_before(tmp_path):
    model = tiny("qwen3")
    with AttentionSwap(model.model.layers):
        model.save_pretrained(tmp_path / "swapped")
    again = type(model).from_pretrained(tmp_path / "swapped")
    ids = torch.stack(prompts(1, [9]))
    assert torch.equal(again(ids).logits, model(ids).logits)


def test_an_unsupported_family_is_refused_and_unchanged():
    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=11))
    with pytest.raises(ValueError, match=r"Llama-family.*GPT2LMHeadModel"):
        MedusaModel(model)


def test_a_model_without_lm_head_is_refused_and_unchanged():
    model = LlamaForSequenceClassification(tiny().config)
    with pytest.raises(ValueError, match=r"causal language model, got LlamaForSequenceClassification"):
        MedusaModel(model)
    assert not any(isinstance(module, TreeAttention) for module in model.modules())


@pytest.mark.parametrize("place", ["", "model", "model.layers.1.self_attn"])
def test_hooks_that_decoding_would_skip_are_refused(place):
    model = tiny()
    ids = torch.stack(prompts(1, [5]))
    with MedusaModel(model) as medusa:
        hook = getattr(model.get_submodule(place), "original", model.get_submodule(place)).register_forward_hook(print)
        with pytest.raises(ValueError, match="no forward hooks on Llama"):
            medusa.generate(ids, max_new_tokens=2)
        hook.remove()
        medusa.generate(ids, max_new_tokens=2)


def test_hooks_on_layers_and_lm_head_take_effect():
    model = tiny()
    [row] = prompts(1, [7])
    plain = transformers_greedy(model, row, NEW)
    for place, hook in (
        ("lm_head", lambda module, args, out: -out),
        ("model.layers.0.mlp", lambda module, args, out: 2 * out),
        ("model.layers.1", lambda module, args, out: -out),
    ):
        handle = model.get_submodule(place).register_forward_hook(hook)
        expected = transformers_greedy(model, row, NEW)
        assert expected != plain, "the hook changes nothing: the test shows nothing"
        with MedusaModel(model, heads_for(model), TREE) as medusa:
            assert medusa.generate(row[None], max_new_tokens=NEW).sequences[0, len(row) :].tolist() == expected
        handle.remove()


def test_an_unsupported_layer_is_named_and_nothing_is_swapped():
    model = tiny()
    model.model.layers[1].self_attn = torch.nn.Identity()
    with pytest.raises(ValueError, match=r"layer 1: expected an attention of Llama, Mistral.*got Identity"):
        MedusaModel(model)
    assert not isinstance(model.model.layers[0].self_attn, TreeAttention)
