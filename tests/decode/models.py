"""Tiny random models of all families with fixed seeds, and heads for them."""

import torch
import transformers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from medusa_decoding import MedusaHeads

FAMILIES = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}
_KINDS = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "num_hidden_layers": 3}
_SHORT = {"sliding_window": 5} | _KINDS
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_SHARED = {"shared_expert_intermediate_size": 24, "mlp_only_layers": [1]}
# Families beside the four: the names of their classes, and settings that make every kind of layer they have.
MORE_FAMILIES = {
    "ministral": ("Ministral", _SHORT),
    "smollm3": ("SmolLM3", {"no_rope_layers": [1, 0, 1], "use_sliding_window": True} | _SHORT),
    "phi3": ("Phi3", {"sliding_window": 5}),
    "phi4": ("Phi3", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}),
    "granite": ("Granite", {"embedding_multiplier": 1.5, "residual_multiplier": 0.7, "attention_multiplier": 0.2,
                            "logits_scaling": 3.0}),
    "olmo2": ("Olmo2", {}),
    "olmo3": ("Olmo3", _SHORT),
    "gemma2": ("Gemma2", {"query_pre_attn_scalar": 12, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}
               | _SHORT | {"attn_implementation": "eager"}),  # sdpa ignores the cap in transformers 5.17
    "gemma3": ("Gemma3", {"query_pre_attn_scalar": 2, "final_logit_softcapping": 3.0} | _SHORT),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "sliding_window": 5}),
    "qwen2_moe": ("Qwen2Moe", _EXPERTS | _SHARED),
    "qwen3_moe": ("Qwen3Moe", _EXPERTS | {"mlp_only_layers": [1]}),
}  # fmt: skip


def rope(kind, **more):
    """Setting of a kind of rotary embedding."""
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **more}}


# A vocabulary so small that random heads are often right, and in which id 0 is an ordinary token.
VOCAB = 11


def tiny(family="llama", *, seed=0, dtype=torch.float32, **overrides):
    """Build a random model; weights are large enough that its greedy text wanders instead of settling on one token."""
    settings = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 96,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        "initializer_range": 0.4,
    }
    if family in FAMILIES:
        config_class, model_class = FAMILIES[family]
    else:
        name, own = MORE_FAMILIES[family]
        settings |= own
        model_class = getattr(transformers, f"{name}ForCausalLM")
        config_class = model_class.config_class
    settings |= overrides
    torch.manual_seed(seed)
    model = model_class(config_class(**settings)).to(dtype).eval()
    model.generation_config.pad_token_id = 0
    return model


def heads_for(model, num_heads=4, num_layers=1, *, seed=1, shared=False):
    """Random heads near the model's own lm_head, so that some draft tokens are right and many are wrong."""
    generator = torch.Generator().manual_seed(seed)
    config = model.config
    heads = MedusaHeads(config.hidden_size, config.vocab_size, num_heads, num_layers, shared_projection=shared)
    with torch.no_grad():
        heads.w1.copy_(torch.randn(heads.w1.shape, generator=generator) * 0.3)
        heads.b1.copy_(torch.randn(heads.b1.shape, generator=generator) * 0.3)
        if not shared:
            heads.w2.copy_(model.get_output_embeddings().weight.expand_as(heads.w2))
    return heads.to(next(model.parameters()).dtype).eval()


def prompts(count, lengths, *, seed=2, vocab=VOCAB):
    """Random prompts of the given lengths."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, vocab, (lengths[i % len(lengths)],), generator=generator) for i in range(count)]


def padded(rows, side="left", fill=0):
    """Stack rows of different lengths with an attention mask."""
    width = max(len(row) for row in rows)
    ids = torch.full((len(rows), width), fill)
    mask = torch.zeros(len(rows), width, dtype=torch.int64)
    for i, row in enumerate(rows):
        span = slice(width - len(row), width) if side == "left" else slice(0, len(row))
        ids[i, span], mask[i, span] = row, 1
    return ids, mask


def transformers_greedy(model, prompt, max_new_tokens, **kwargs):
    """New tokens of one prompt from transformers' own greedy generate."""
    ids = prompt[None]
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_new_tokens, do_sample=False, **kwargs
    )
    return out[0, len(prompt) :].tolist()
