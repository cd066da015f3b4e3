"""Tiny random models of the four families with fixed seeds, and heads for them."""

import torch
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
    } | overrides
    config_class, model_class = FAMILIES[family]
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
