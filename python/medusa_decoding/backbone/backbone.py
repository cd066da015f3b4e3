"""Backbone: run the loaded model's own modules over the tokens of a decode pass.

It calls the embedding, the decoder layers and the final norm of the loaded model; only the attention modules, and some
quantised linear ones, are swapped. `choose_layers` decides whether `fused_layers` runs the layers.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from medusa_decoding.backbone import fused_layers, unsupported
from medusa_decoding.backbone.attention_swap import AttentionSwap, DecodeContext, check_layers
from medusa_decoding.backbone.families import family_of
from medusa_decoding.backbone.generation_lock import lock_of
from medusa_decoding.backbone.rope import tables_of_layers
from medusa_decoding.backbone.tensor_parallel import Peers, local_kv_heads
from medusa_decoding.linears.holding import LinearHold
from medusa_decoding.linears.reading import is_hooked
from medusa_kernels.cache_rows import row_width

logger = logging.getLogger(__name__)

MTP = ("num_mtp_layers", "num_nextn_predict_layers", "mtp_num_hidden_layers")
"""What configs call the number of their multi-token prediction layers."""

NATIVE_PREFILL = 128
"""Tokens of a prefill's chunk up to which the C++ library runs it; with more, PyTorch's products are as fast."""
PIECES = {torch.uint8: 1024, torch.int8: 256}
"""Tokens up to which a prefill beside bfloat16 runs in pieces of `NATIVE_PREFILL`, by the dtype of quantised weights.

PyTorch first widens whole weights, which more tokens are needed to pay for.
"""


class Backbone:
    """A causal language model of one of the families, Llama's or like it, with its attention modules swapped.

    Args:
        base: the model as loaded by transformers (tensor parallel or not), or wrapped by peft.
        rounds: whether its quantised layers round their inputs to 8 bits, see `LinearHold`.
        feature_layers: after how many layers its heads read states besides the last one, see `MedusaHeads`.

    Attributes:
        causal_lm: the causal language model, without peft's wrapper.
        decoder: its decoder, `causal_lm.model`: embedding, layers and final norm.
        family: what its layers do otherwise than Llama's.
        linears: keeps quantised linear modules readable, see `LinearHold`.
        peers: the processes that the model is sharded over.
        kv_heads: KV heads per layer in this process; all of them unless the model is tensor parallel.
        lock: held by one generation of this model at a time, whatever heads it uses.
        fuse: whether `fused_layers` runs the layers, in a few launches each, instead of module by module.
        said: how the layers of steps run and why, as logged last, or None.
        cache_dtype: int8 for a KV cache in 8 bits (see `medusa_kernels.cache_rows`), None for one in the model's dtype.
        native: the layers as the C++ library runs them for a tree pass, in one call, or None.
        feature_layers: see above.

    A model that cannot be decoded is a `ValueError`, and is left unchanged.
    """

    def __init__(self, base: nn.Module, rounds: bool = False, feature_layers: Sequence[int] = ()) -> None:
        causal: Any = base
        if hasattr(base, "get_base_model"):  # peft's wrapper
            if causal.active_peft_config.is_prompt_learning:
                raise ValueError("base_model: expected no prompt learning (virtual tokens), got a peft model with it")
            causal = causal.get_base_model()
        decoder: Any = getattr(causal, "model", None)
        parts = all(hasattr(decoder, name) for name in ("embed_tokens", "layers", "norm", "rotary_emb"))
        if not parts or not hasattr(causal, "lm_head") or not hasattr(causal, "generation_config"):
            raise ValueError(
                f"base_model: expected a Llama-family causal language model, got {type(causal).__name__}; of a model "
                "with images, load the text model alone"
            )
        self.causal_lm = causal
        self.decoder = decoder
        self.config: Any = causal.config
        self.feature_layers = tuple(feature_layers)
        check_layers(decoder.layers)
        attention = decoder.layers[0].self_attn
        family = family_of(getattr(attention, "original", attention))
        assert family is not None, "check_layers has refused it"
        self.family = family
        self.linears = LinearHold(causal, rounds)
        try:
            self.check(base, now=False)
            self.lock = lock_of(decoder)
            self.peers = Peers.from_model(causal)
            self.kv_heads = local_kv_heads(causal, self.peers.size)
            self.swap = AttentionSwap(decoder.layers)
        except BaseException:
            self.linears.undo()
            raise
        self.fuse = False
        self.cache_dtype: torch.dtype | None = None
        self.native: fused_layers.NativeLayers | None = None
        self.said: str | None = None
        predicting = next((name for name in MTP if getattr(self.config, name, None)), None)
        if predicting is not None:
            logger.info(
                "base_model: its config has %s = %s; Medusa decoding does not run such multi-token prediction layers, "
                "transformers' generate(use_mtp=True) decodes with them",
                predicting,
                getattr(self.config, predicting),
            )

    def undo(self) -> None:
        """Give the model its own modules back; a second call does nothing."""
        self.native = None
        self.swap.undo()
        self.linears.undo()

    def suspend(self) -> None:
        """Give the model its own modules back until `resume`."""
        self.swap.suspend()
        self.linears.undo()

    def resume(self, causal: Any) -> None:
        """Hold the model `causal` again; see `AttentionSwap.resume` for errors, after which nothing is changed."""
        self.linears.resume(causal)
        try:
            self.swap.resume()
        except BaseException:
            self.linears.undo()
            raise

    def check(self, base: Any, now: bool = True) -> None:
        """Raise `ValueError` if the model has been cast, moved or patched so that it cannot be decoded.

        `base` is the model that the backbone was made from. See `unsupported.check` for `now`.
        """
        if self.causal_lm.model is not self.decoder:
            raise ValueError("base_model.model: expected the decoder that was wrapped, got another; wrap it again")
        if self.dtype not in (torch.float16, torch.bfloat16, torch.float32):
            raise ValueError(f"base_model: expected torch.float16, torch.bfloat16 or torch.float32, got {self.dtype}")
        unsupported.check(base, self.causal_lm, now)

    def choose_layers(self, captured: bool, traced: bool = False) -> bool:
        """Choose how the layers of steps run, and log it once with the reason.

        If the ops can read their modules, `fused_layers` runs them: on a CPU in one call of the C++ library (with LoRA
        or experts, in some calls for each layer), on CUDA in captured steps. Experts run as modules. Otherwise, or if
        the model is tensor parallel, all layers run module by module.

        Returns:
            Whether that has changed, so that steps compiled or captured before are no longer right.
        """
        on_cpu = self.device.type == "cpu"
        native, fuse = None, False
        if on_cpu or captured or self.peers.size > 1:
            why_not: str | None = f"tensor parallel over {self.peers.size} processes"
            if self.peers.size == 1:
                why_not = fused_layers.obstacle(self.decoder)
            fuse, how = why_not is None, "fused"
            apart = fused_layers.apart_limit(self.decoder) if fuse else None
            if apart is not None and traced:
                fuse, why_not = False, f"{apart} in steps that are traced"
            elif fuse and fused_layers.has_adapters(self.decoder):
                fused_layers.refresh_adapters(self.decoder)
            if fuse and fused_layers.has_experts(self.decoder):
                how = "fused, experts as modules"
                if on_cpu and self.dtype != torch.float32:  # in a trial no faster so than as modules
                    fuse, why_not = False, "experts in 16 bits on a CPU"
            elif fuse and on_cpu and apart is None:
                why_not = fused_layers.native_limit(self.decoder)
                native = fused_layers.NativeLayers(self.decoder, self.feature_layers) if why_not is None else None
                fuse, how = False, "one call of the C++ library"
            said = f"layers: module by module ({why_not})"
            if why_not is None:
                said = f"layers: {how} ({fused_layers.forms(self.decoder)})"
            if said != self.said:
                self.said = said
                logger.info("%s", said)
        unchanged = native is self.native if native is None else native.same(self.native)
        if fuse == self.fuse and unchanged:
            return False
        self.fuse, self.native = fuse, native
        return True

    def runs_quantised_modules(self) -> bool:
        """Return whether steps call a library's quantised modules, which may get slow at some number of rows."""
        weights = (type(weight).__module__ for weight in self.decoder.layers.parameters())
        quantised = any(module.partition(".")[0] != "torch" for module in weights)
        if not quantised:
            return False
        on_cpu = self.device.type == "cpu"
        why_not = fused_layers.obstacle(self.decoder) or (on_cpu and fused_layers.native_limit(self.decoder))
        return bool(why_not) or fused_layers.has_experts(self.decoder)

    @property
    def capturable(self) -> bool:
        """Whether steps can be captured as CUDA graphs.

        PyTorch multiplies by a mixture's experts with kernels of its own in bfloat16; in other dtypes it reads on the
        host how many tokens each expert has.
        """
        return self.dtype == torch.bfloat16 or not fused_layers.has_experts(self.decoder)

    @property
    def lm_head(self) -> nn.Module:
        """The current `lm_head`, including an adapter that wraps it and what the family does to its logits."""
        return self.family.logits(self.causal_lm.lm_head, self.config)

    @property
    def embed_tokens(self) -> nn.Module:
        """The current input embedding."""
        return self.decoder.embed_tokens

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return next(self.causal_lm.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of activations: that of the norms, which are never quantised."""
        return self.decoder.norm.weight.dtype

    @property
    def kv_dtype(self) -> torch.dtype:
        """The dtype of the KV cache."""
        return self.cache_dtype or self.dtype

    @property
    def head_dim(self) -> int:
        """D, the size of a head."""
        return self.decoder.layers[0].self_attn.head_dim

    @property
    def vocab_size(self) -> int:
        """V, the rows of lm_head."""
        return self.config.vocab_size

    @property
    def rope_type(self) -> str | None:
        """The type of the rotary embedding in the config, None if its layers have different ones."""
        return (getattr(self.config, "rope_parameters", None) or {}).get("rope_type")

    @property
    def context_limit(self) -> int:
        """The number of positions that the model supports.

        In configs of scaled RoPE, `max_position_embeddings` is either the scaled or the trained length. The longer
        reading is used, since the limit only refuses requests that leave no room.
        """
        declared = self.config.max_position_embeddings
        rope = getattr(self.config, "rope_parameters", None) or {}
        trained = rope.get("original_max_position_embeddings") or declared
        if self.rope_type == "longrope":  # beyond it, other frequencies for all keys: see `rope_tables`
            return int(trained)
        return max(declared, int(rope.get("factor", 1.0) * trained))

    def check_length(self, tokens: int) -> None:
        """Raise `ValueError` if rotary tables do not reach as far as a text of so many tokens, its prompt included."""
        if self.rope_type == "longrope" and tokens > self.context_limit:
            raise ValueError(
                f"max_new_tokens: expected at most {self.context_limit} tokens with the prompt (the trained length of "
                f"this model's longrope), got {tokens}; use transformers' own generate"
            )

    def kv_shape(self, batch: int, capacity: int) -> tuple[int, ...]:
        """Return the shape of the KV cache, [L, 2, B, Hkv, S, D], with the KV heads of this process.

        In 8 bits the last axis is longer.
        """
        width = row_width(self.head_dim, self.kv_dtype)
        return (len(self.decoder.layers), 2, batch, self.kv_heads, capacity, width)

    def rope(self, prompt_lengths: list[int], capacity: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return rotary tables by position for prompts of these lengths, see `rope.tables_of_layers`."""
        names, rotary = self.family.tables(self.config), self.decoder.rotary_emb
        tables = tables_of_layers(rotary, names, prompt_lengths, capacity, self.dtype, self.device)
        width, expected = tables[0].shape[-1], self.family.rotary_width(self.config, self.head_dim)
        if width != expected:
            raise ValueError(f"rope: expected tables for {expected} numbers of each head, got {width}")
        return tables

    @property
    def can_hold_last(self) -> bool:
        """Whether a prefill may run the last layer for its last tokens alone: on a CPU, a layer as transformers has it.

        Hooks in that layer see all tokens: with any, it runs in full.
        """
        layer = self.decoder.layers[-1]
        return (
            self.device.type == "cpu"
            and self.family.has(layer, "DecoderLayer")
            and unsupported.foreign_forward(type(layer)) is None
            and not any(is_hooked(module) for module in layer.modules())
        )

    def prefill_nodes(self, batch: int, tokens: int) -> int:
        """Return how many of a prefill's next `tokens` of each row run at once as the nodes of a tree, by `native`.

        0 if they run by modules. For few rows the limit is reading the weights, which `native` does once; `PIECES` says
        how many rows are few beside quantised weights. In bfloat16 PyTorch's products take several times as long as in
        float32, for any number of rows, on a CPU without instructions for it.
        """
        if self.native is None:
            return 0
        if batch * tokens <= NATIVE_PREFILL:
            return tokens
        fast = torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
        most = max(PIECES.get(weight.dtype, 0) for weight in self.native.weights)
        slow = self.dtype == torch.bfloat16 and (not fast or batch * tokens <= most)
        return NATIVE_PREFILL // batch if slow else 0

    @property
    def states_size(self) -> int:
        """(1 + F) H, the size of what heads read of a token: the last state and those of F feature layers."""
        return (1 + len(self.feature_layers)) * int(self.config.hidden_size)

    def forward(self, tokens: torch.Tensor, context: DecodeContext) -> tuple[torch.Tensor, torch.Tensor]:
        """Run tokens [B, N], append to the cache, and return their hidden states and what heads read of them.

        With `context.hold_last` the last layer only appends; its input, for `finish`, takes the place of its output.

        Returns:
            hidden: [B, N, H] after the final norm.
            states: [B, N, (1 + F) H], these followed by those after F feature layers; without any, `hidden` itself.
        """
        hidden = self._forward(tokens, context)
        return hidden, torch.cat([hidden, *context.features], dim=-1) if context.features else hidden

    def _forward(self, tokens: torch.Tensor, context: DecodeContext) -> torch.Tensor:
        hidden = self.embed_tokens(tokens)
        if self.family.embedding is not None:
            hidden = hidden * getattr(self.decoder, self.family.embedding)
        if self.native is not None and context.ancestors is not None:
            return self.native(hidden, context)
        if self.fuse:
            return fused_layers.forward(self.decoder, hidden, context, self.feature_layers)
        for index, layer in enumerate(self.decoder.layers):
            if index in self.feature_layers:
                context.features.append(hidden)
            if context.hold_last and layer is self.decoder.layers[-1]:
                before = self.family.norms_of(layer)[0]
                layer.self_attn.append(hidden if before is None else before(hidden), context)
                return hidden
            hidden = _run(layer, hidden, context)
        return self.decoder.norm(hidden)

    def finish(self, hidden: torch.Tensor, context: DecodeContext) -> torch.Tensor:
        """Run the last layer and the final norm on the last layer's input, [B, N, H] to [B, N, H]."""
        return self.decoder.norm(_run(self.decoder.layers[-1], hidden, context))


def _run(layer: Any, hidden: torch.Tensor, context: DecodeContext) -> torch.Tensor:
    out = unsupported.without_recording_hooks(layer)(hidden, position_embeddings=None, medusa_context=context)
    return out[0] if isinstance(out, tuple) else out
