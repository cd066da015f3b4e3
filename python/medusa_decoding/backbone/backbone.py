"""Backbone: the base model's own modules, run over the tokens of a decode pass.

It walks embedding, decoder layers and final norm of the loaded model; only the attention modules are ours (swapped).
Nothing of a modeling file is repeated here; where `fuse` is set, the layers are run by `fused_layers`. It does not know
heads, trees or acceptance.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from medusa_decoding.backbone import fused_layers, unsupported
from medusa_decoding.backbone.attention_swap import AttentionSwap, DecodeContext, check_layers
from medusa_decoding.backbone.generation_lock import lock_of
from medusa_decoding.backbone.rope import rope_tables
from medusa_decoding.backbone.tensor_parallel import Peers, local_kv_heads


class Backbone:
    """A causal language model of the Llama family with its attention modules swapped.

    Args:
        base: the model as loaded by transformers (tensor parallel or not), or wrapped by peft.

    Attributes:
        peers: the processes that the model is sharded over.
        kv_heads: KV heads of each layer that this process holds; all of them, unless the model is tensor parallel.
        lock: held by one generation of this model at a time, whatever heads it uses.
        fuse: whether layers are run by `fused`, in a few launches each, instead of module by module.

    Raises:
        ValueError: not a Llama, Mistral, Qwen2 or Qwen3 causal language model, one that a single process spreads over
            several devices, one sharded otherwise than by whole heads, or one whose text depends on what decoding
            passes by (see `unsupported`). The model is left as it was.
    """

    def __init__(self, base: nn.Module) -> None:
        causal: Any = base
        if hasattr(base, "get_base_model"):  # peft's wrapper
            if causal.active_peft_config.is_prompt_learning:
                raise ValueError("base_model: expected no prompt learning (virtual tokens), got a peft model with it")
            causal = causal.get_base_model()
        decoder: Any = getattr(causal, "model", None)
        parts = all(hasattr(decoder, name) for name in ("embed_tokens", "layers", "norm", "rotary_emb"))
        if not parts or not hasattr(causal, "lm_head") or not hasattr(causal, "generation_config"):
            raise ValueError(f"base_model: expected a Llama-family causal language model, got {type(causal).__name__}")
        self.causal_lm = causal
        self.decoder = decoder
        self.config: Any = causal.config
        check_layers(decoder.layers)
        self.check(base, now=False)
        self.lock = lock_of(decoder)
        self.peers = Peers.of(causal)
        self.kv_heads = local_kv_heads(causal, self.peers.size)
        self.swap = AttentionSwap(decoder.layers)
        self.fuse = False

    def check(self, base: Any, now: bool = True) -> None:
        """Check that the model can be decoded as it is; it may have been cast, moved or patched.

        Args:
            base: what the backbone was made from.
            now: see `unsupported.check`.

        Raises:
            ValueError: it cannot, or something that decoding passes by would change its text (see `unsupported`).
        """
        if self.causal_lm.model is not self.decoder:
            raise ValueError("base_model.model: expected the decoder that was wrapped, got another; wrap it again")
        if self.dtype not in (torch.float16, torch.bfloat16, torch.float32):
            raise ValueError(f"base_model: expected torch.float16, torch.bfloat16 or torch.float32, got {self.dtype}")
        unsupported.check(base, self.causal_lm, now)

    @property
    def lm_head(self) -> nn.Module:
        """The projection to the vocabulary, as it stands now (an adapter may have been put around it)."""
        return self.causal_lm.lm_head

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return next(self.causal_lm.parameters()).device

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
        """Positions the model is declared for.

        Configs of scaled RoPE state either the stretched or the trained length in `max_position_embeddings`; the
        longer reading is taken, as the limit only refuses what leaves no room.
        """
        declared = self.config.max_position_embeddings
        rope = getattr(self.config, "rope_parameters", None) or {}
        trained = rope.get("original_max_position_embeddings") or declared
        return max(declared, int(rope.get("factor", 1.0) * trained))

    def kv_shape(self, batch: int, capacity: int) -> tuple[int, ...]:
        """Shape of the block of keys and values, [L, 2, B, Hkv, S, D], with the KV heads of this process."""
        head_dim = self.decoder.layers[0].self_attn.head_dim
        return (len(self.decoder.layers), 2, batch, self.kv_heads, capacity, head_dim)

    def rope(self, prompt_lengths: list[int], capacity: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotary tables by position for prompts of these lengths, see `rope_tables`."""
        return rope_tables(self.decoder.rotary_emb, prompt_lengths, capacity, self.dtype, self.device)

    def forward(self, tokens: torch.Tensor, context: DecodeContext) -> torch.Tensor:
        """Run tokens [B, N] through the model: hidden states after the final norm, [B, N, H]; the cache is appended."""
        hidden = self.decoder.embed_tokens(tokens)
        if self.fuse:
            return fused_layers.forward(self.decoder, hidden, context)
        for layer in self.decoder.layers:
            out = unsupported.without_recording_hooks(layer)(hidden, position_embeddings=None, medusa_context=context)
            hidden = out[0] if isinstance(out, tuple) else out
        return self.decoder.norm(hidden)
