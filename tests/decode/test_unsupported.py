"""Code that decoding bypasses is refused by name if it would change the text; code that it calls takes effect.

Hooks, accelerate: test_attention.py, test_quantised.py. Activated LoRA: test_lora.py. Autocast: test_model.py.
"""

import functools
import types

import pytest
import torch
from calls import with_heads
from models import heads_for, prompts, tiny, transformers_greedy
from peft import LoraConfig, XLoraConfig, get_peft_model
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, LlamaForCausalLM, LlamaModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.models.llama import modeling_llama as llama

from medusa_decoding import MedusaModel, Tree
from medusa_decoding.backbone.attention_swap import TreeAttention
from medusa_decoding.backbone.fused_layers import obstacle

TREE = Tree.cartesian([3, 2])
NEW = 16
[ROW] = prompts(1, [6])


class ScaledLogits(LlamaForCausalLM):
    def forward(self, *args, **kwargs):
        out = super().forward(*args, **kwargs)
        out.logits = -out.logits
        return out


class ScaledEmbeddings(LlamaModel):
    def forward(self, input_ids=None, inputs_embeds=None, **kwargs):
        embeddings = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        return super().forward(inputs_embeds=-3 * embeddings, **kwargs)


class OtherInputs(LlamaForCausalLM):
    def prepare_inputs_for_generation(self, input_ids, **kwargs):
        return super().prepare_inputs_for_generation(torch.zeros_like(input_ids), **kwargs)


class OtherLoop(LlamaForCausalLM):
    def _sample(self, *args, **kwargs):
        return super()._sample(*args, **kwargs).flip(1)


class OtherEnd(LlamaForCausalLM):
    def _get_stopping_criteria(self, *args, **kwargs):
        criteria = super()._get_stopping_criteria(*args, **kwargs)
        criteria.append(lambda ids, scores: torch.tensor([ids.shape[1] > 9]))
        return criteria


class Rotary(llama.LlamaRotaryEmbedding):
    def forward(self, x, position_ids):
        return llama.LlamaRotaryEmbedding.forward(self, x, position_ids // 2)


class RotaryByLength(llama.LlamaRotaryEmbedding):
    def forward(self, x, position_ids):
        return super().forward(x, position_ids / (1 + position_ids.max() // 8))


def of_class(cls, place=""):
    def change(model, monkeypatch):
        model.get_submodule(place).__class__ = cls

    return change


def configured(name, value):
    def change(model, monkeypatch):
        setattr(model.config, name, value)

    return change


def patched(owner, name, around):
    """Replace a function, with the name and module of what it wraps, as decorators do."""

    def change(model, monkeypatch):
        monkeypatch.setattr(owner, name, functools.wraps(getattr(owner, name))(around(getattr(owner, name))))

    return change


def negated_logits(forward):
    def call(self, *args, **kwargs):
        out = forward(self, *args, **kwargs)
        out.logits = -out.logits
        return out

    return call


def negated_first(function):
    def call(*args, **kwargs):
        first, *rest = function(*args, **kwargs)
        return -first, *rest

    return call


def registered(name, function):
    def change(model, monkeypatch):
        monkeypatch.setitem(AttentionInterface._global_mapping, name, function)
        monkeypatch.setitem(AttentionMaskInterface._global_mapping, name, sdpa_mask)
        model.set_attn_implementation(name)

    return change


def registered_mask(model, monkeypatch):
    def without_the_first(*args, **kwargs):
        mask = sdpa_mask(*args, **kwargs | {"allow_is_causal_skip": False})
        mask[..., -1, 0] = False
        return mask

    monkeypatch.setitem(AttentionMaskInterface._global_mapping, "sdpa", without_the_first)


def global_hook(model, monkeypatch):
    def hook(module, args, out):
        if isinstance(module, LlamaForCausalLM):
            out.logits = -out.logits

    monkeypatch.setattr(torch.nn.modules.module, "_global_forward_hooks", {0: hook})


REFUSED = {
    "forward": (
        of_class(ScaledLogits),
        r"base_model: expected the forward .*ScaledLogits's \(test_unsupported\.Scaled",
    ),
    "decoder": (
        of_class(ScaledEmbeddings, "model"),
        r"base_model\.model: expected the forward .*test_unsupported\.ScaledEmbeddings\.forward",
    ),
    "inputs": (of_class(OtherInputs), r"base_model: expected transformers' own prepare_inputs_for_generation, got Oth"),
    "loop": (of_class(OtherLoop), r"base_model: expected transformers' own _sample, got OtherLoop's"),
    "patched class": (patched(LlamaForCausalLM, "forward", negated_logits), r"base_model: .*\(test_unsupported\."),
    "patched attention": (
        patched(llama.LlamaAttention, "forward", negated_first),
        r"base_model\.model\.layers\.0\.self_attn: .*\(test_unsupported\.",
    ),
    "patched rotation": (
        patched(llama, "apply_rotary_pos_emb", negated_first),
        r"transformers' own apply_rotary_pos_emb in transformers\.models\.llama\.modeling_llama, got test_unsupp",
    ),
    "attention": (
        registered("mine", negated_first(sdpa_attention_forward)),
        r"layers\.0\.self_attn: expected .* got test_unsupported\.negated_first.* as attention implementation 'mine'",
    ),
    "mask": (registered_mask, r"layers\.0\.self_attn: expected .*registered_mask.* implementation 'sdpa'"),
    "fewer layers": (
        configured("num_hidden_layers", 1),
        r"base_model\.model\.layers: expected at most config\.num_hidden_layers = 1, .*2;",
    ),
    "not causal": (configured("is_causal", False), r"expected causal attention, got is_causal=False"),
    "global hook": (global_hook, r"base_model: expected no global forward hooks"),
}


@pytest.mark.parametrize(("change", "why"), REFUSED.values(), ids=REFUSED)
def test_overrides_that_decoding_bypasses_are_refused_by_name(change, why, monkeypatch):
    plain = transformers_greedy(tiny(), ROW, NEW)
    before = tiny()
    medusa = MedusaModel(before, heads_for(before), TREE)
    model = tiny()
    heads = heads_for(model)
    change(model, monkeypatch)
    assert transformers_greedy(model, ROW, NEW) != plain, "the change changes nothing: the test shows nothing"
    with pytest.raises(ValueError, match=why):
        MedusaModel(model, heads, TREE)
    with pytest.raises(ValueError, match=r"base_model|prepare_inputs_for_generation"):
        with_heads(model, heads, ROW[None])
    assert not any(isinstance(module, TreeAttention) for module in model.modules())
    # Also if it is changed after wrapping.
    change(before, monkeypatch)
    with pytest.raises(ValueError, match=why):
        medusa.generate(ROW[None], max_new_tokens=NEW)
    medusa.undo()


def test_an_override_of_where_a_text_ends_needs_custom_generate():
    model = tiny()
    heads = heads_for(model)
    model.__class__ = OtherEnd
    expected = transformers_greedy(model, ROW, NEW)
    assert len(expected) == 4
    with MedusaModel(model, heads, TREE) as medusa:
        with pytest.raises(ValueError, match="transformers' own _get_stopping_criteria, got OtherEnd's"):
            medusa.generate(ROW[None], max_new_tokens=NEW)
        assert with_heads(model, heads, ROW[None])[0, 6:].tolist() == expected


def test_block_sparse_attention_of_transformers_is_refused(monkeypatch):
    sparse = types.FunctionType(sdpa_attention_forward.__code__, sdpa_attention_forward.__globals__, "msa_attention")
    model = tiny()
    registered("sparse", sparse)(model, monkeypatch)
    with pytest.raises(ValueError, match=r"plain attention .*, got msa_attention as .* 'sparse'"):
        MedusaModel(model)


def lora(**settings):
    return LoraConfig(target_modules=["q_proj", "down_proj"], r=2, init_lora_weights=False, **settings)


def test_dropout_in_training_mode_is_refused():
    model = tiny(attention_dropout=0.5)
    heads = heads_for(model)
    expected = transformers_greedy(model, ROW, NEW)
    with MedusaModel(model, heads, TREE) as medusa:
        model.train()
        with pytest.raises(
            ValueError, match=r"base_model\.model\.layers\.\d\.self_attn: expected no dropout, got 0\.5 "
        ):
            medusa.generate(ROW[None], max_new_tokens=NEW)
        model.eval()
        assert medusa.generate(ROW[None], max_new_tokens=NEW).sequences[0, 6:].tolist() == expected
        model.model.layers[1].train()
        with pytest.raises(ValueError, match=r"layers\.1\.self_attn: .* call eval\(\) on the model"):
            with_heads(model, heads, ROW[None])
    adapted = get_peft_model(tiny(), lora(lora_dropout=0.25)).train()
    with MedusaModel(adapted) as medusa:
        with pytest.raises(ValueError, match=r"base_model\.model\..*lora_dropout\.default: expected no dropout, got"):
            medusa.generate(ROW[None], max_new_tokens=NEW)
        adapted.eval()
        medusa.generate(ROW[None], max_new_tokens=NEW)


def test_training_mode_without_dropout_is_allowed_but_gradient_checkpointing_is_refused():
    model = tiny()
    heads = heads_for(model)
    expected = transformers_greedy(model, ROW, NEW)
    with MedusaModel(model, heads, TREE) as medusa:
        model.train()
        assert medusa.generate(ROW[None], max_new_tokens=NEW).sequences[0, 6:].tolist() == expected
        model.gradient_checkpointing_enable()
        # With gradients, no version keeps a cache. `generate`, which runs without them, does since transformers 5.24.
        assert len(model(ROW[None], use_cache=True).to_tuple()) == 1, "the output is more than the logits"
        with pytest.raises(ValueError, match=r"base_model\.model\.layers\.\d: expected no gradient checkpointing"):
            medusa.generate(ROW[None], max_new_tokens=NEW)
        model.eval()
        assert medusa.generate(ROW[None], max_new_tokens=NEW).sequences[0, 6:].tolist() == expected


def test_x_lora_is_refused(tmp_path):
    adapted = get_peft_model(tiny(), lora(task_type="CAUSAL_LM"))
    adapted.save_pretrained(tmp_path)
    model = tiny()
    model.config.use_cache = False
    settings = XLoraConfig(
        task_type="CAUSAL_LM", hidden_size=32, xlora_depth=1, adapters={"0": str(tmp_path), "1": str(tmp_path)}
    )
    mixed = get_peft_model(model, settings)
    with (
        MedusaModel(mixed) as medusa,
        pytest.raises(ValueError, match="base_model: expected no X-LoRA, got adapter default"),
    ):
        medusa.generate(ROW[None], max_new_tokens=NEW)


# Code that decoding calls


class Layer(llama.LlamaDecoderLayer):
    def forward(self, hidden_states, **kwargs):
        return -super().forward(hidden_states, **kwargs)


class Mlp(llama.LlamaMLP):
    def forward(self, x):
        return -super().forward(x)


class Embedding(nn.Embedding):
    def forward(self, ids):
        return 3 * super().forward(ids).flip(-1)


class Norm(llama.LlamaRMSNorm):
    def forward(self, hidden):
        return super().forward(hidden).flip(-1)


class Head(nn.Linear):
    def forward(self, hidden):
        return -super().forward(hidden)


def biased(model, monkeypatch):
    model.lm_head.bias = nn.Parameter(torch.linspace(-9, 9, 11))


TAKES_EFFECT = {
    "layer": of_class(Layer, "model.layers.1"),
    "MLP": of_class(Mlp, "model.layers.0.mlp"),
    "embedding": of_class(Embedding, "model.embed_tokens"),
    "norm": of_class(Norm, "model.norm"),
    "lm_head": of_class(Head, "lm_head"),
    "bias": biased,
    "rotation": of_class(Rotary, "model.rotary_emb"),
}


@pytest.mark.parametrize("change", TAKES_EFFECT.values(), ids=TAKES_EFFECT)
def test_overrides_that_decoding_calls_take_effect(change, monkeypatch, request):
    model = tiny()
    plain, heads = transformers_greedy(model, ROW, NEW), heads_for(model)
    change(model, monkeypatch)
    expected = transformers_greedy(model, ROW, NEW)
    assert expected != plain, "the change changes nothing: the test shows nothing"
    with MedusaModel(model, heads, TREE) as medusa:
        assert medusa.generate(ROW[None], max_new_tokens=NEW).sequences[0, 6:].tolist() == expected
        # As when steps are captured: layers run from their weights only if the result is the same.
        medusa.backbone.fuse = obstacle(medusa.backbone.decoder) is None
        monkeypatch.setattr(medusa.backbone, "choose_layers", lambda captured, **_: False)
        assert medusa.generate(ROW[None], max_new_tokens=NEW).sequences[0, 6:].tolist() == expected
        in_layers = any(name in request.node.name for name in ("layer", "MLP", "norm"))
        assert medusa.backbone.fuse != in_layers


def test_a_rotation_that_depends_on_the_length_is_refused():
    model = tiny()
    model.model.rotary_emb.__class__ = RotaryByLength
    with (
        MedusaModel(model, heads_for(model), TREE) as medusa,
        pytest.raises(ValueError, match=r"rotary_emb: expected rotations that depend on the position alone.*ByLength"),
    ):
        medusa.generate(ROW[None], max_new_tokens=NEW)


def test_a_changed_sliding_window_takes_effect_or_is_refused():
    model = tiny("mistral", sliding_window=4)
    heads = heads_for(model)
    narrow = transformers_greedy(model, ROW, NEW)
    assert with_heads(model, heads, ROW[None])[0, 6:].tolist() == narrow
    model.config.sliding_window = None
    wide = transformers_greedy(model, ROW, NEW)
    assert wide != narrow, "the window changes nothing: the test shows nothing"
    assert with_heads(model, heads, ROW[None])[0, 6:].tolist() == wide
    with MedusaModel(model, heads, TREE) as medusa:
        model.config.sliding_window = 4
        with pytest.raises(ValueError, match=r"layer 0: expected the sliding window as swapped, None, got 4"):
            medusa.generate(ROW[None], max_new_tokens=NEW)
