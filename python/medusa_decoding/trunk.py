"""Trunk: the base model's own modules, run over the tokens of a decode pass.

It walks embedding, decoder layers and final norm of the loaded model; only the attention modules are ours (swapped).
Nothing of a modeling file is repeated here. The trunk does not know heads, trees or acceptance.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from medusa_decoding.attention import AttentionSwap, DecodeContext
from medusa_decoding.cache import TreeCache, bucket
from medusa_decoding.rope import rope_tables


class Trunk:
    """A causal language model of the Llama family with its attention modules swapped.

    Args:
        base: the model as loaded by transformers, or wrapped by peft.

    Raises:
        ValueError: not a Llama, Mistral, Qwen2 or Qwen3 causal language model, or one spread over several devices.
            The model is left as it was.
    """

    def __init__(self, base: nn.Module) -> None:
        causal: Any = base
        if hasattr(base, "get_base_model"):  # peft's wrapper
            causal = causal.get_base_model()
        decoder: Any = getattr(causal, "model", None)
        if not all(hasattr(decoder, name) for name in ("embed_tokens", "layers", "norm", "rotary_emb")):
            raise ValueError(f"base_model: expected a Llama-family causal language model, got {type(causal).__name__}")
        devices = {parameter.device for parameter in causal.parameters()}
        if len(devices) != 1:
            raise ValueError(f"base_model: expected on one device, got {sorted(map(str, devices))}")
        self.causal = causal
        self.decoder = decoder
        self.config: Any = causal.config
        self.swap = AttentionSwap(decoder.layers)
        self.lm_head: nn.Module = causal.get_output_embeddings()

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return next(self.causal.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of activations and cache: that of the norms, which stay unquantised."""
        return self.decoder.norm.weight.dtype

    @property
    def vocab_size(self) -> int:
        """V, the rows of lm_head."""
        return self.config.vocab_size

    @property
    def context_limit(self) -> int:
        """Positions the model is declared for; dynamic RoPE stretches them by its factor."""
        rope = getattr(self.config, "rope_parameters", None) or {}
        factor = rope.get("factor", 1.0) if "dynamic" in str(rope.get("rope_type", "")) else 1.0
        return int(self.config.max_position_embeddings * factor)

    def new_cache(self, prompt_lengths: list[int], rows: int) -> TreeCache:
        """Allocate a cache for prompts of these lengths and `rows` rows a sequence (rounded up)."""
        attention = self.decoder.layers[0].self_attn
        capacity = bucket(rows)
        rope = rope_tables(self.decoder.rotary_emb, prompt_lengths, capacity, self.dtype, self.device)
        return TreeCache.allocate(
            num_layers=len(self.decoder.layers),
            batch=len(prompt_lengths),
            num_kv_heads=self.config.num_key_value_heads,
            capacity=capacity,
            head_dim=attention.head_dim,
            rope=rope,
            dtype=self.dtype,
            device=self.device,
        )

    def forward(self, tokens: torch.Tensor, context: DecodeContext) -> torch.Tensor:
        """Run tokens [B, N] through the model: hidden states after the final norm, [B, N, H]; the cache is appended."""
        hidden = self.decoder.embed_tokens(tokens)
        for layer in self.decoder.layers:
            out = layer(hidden, position_embeddings=None, medusa_context=context)
            hidden = out[0] if isinstance(out, tuple) else out
        return self.decoder.norm(hidden)
