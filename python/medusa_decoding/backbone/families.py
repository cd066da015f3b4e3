"""What each family of models has that Llama has not: one description per family, which the backbone follows.

A family is recognised by the names of its classes in transformers; none is imported for that. The description names
attributes of a model's modules and config, so that their values come from the model. What no description covers is
refused when a model is wrapped.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from medusa_decoding.linears.logits import ScaledLogits

QKV = ("q_proj", "k_proj", "v_proj")
GATE_UP = ("gate_proj", "up_proj")


@dataclass(frozen=True)
class Family:
    """How a family's layers differ from Llama's.

    Attributes:
        module: its module in transformers, `transformers.models.<module>.modeling_<module>`.
        prefix: what the names of its classes begin with.
        window: where its sliding window is: in the config, in each attention, or nowhere.
        qkv: the attention's projections of queries, keys and values, or the one for all three.
        gate_up: the same of the MLP's first products.
        normed: what `q_norm` and `k_norm` norm: each head alone, the whole projection, or nothing.
        norms: a layer's norms before attention, after it, before the MLP and after it; None where there is none.
        norm_offset: what is added to the weights of all norms, which then multiply before the result is rounded; None:
            nothing, and they multiply the rounded result. See `medusa_kernels.add_rms_norm`.
        epsilon: the attribute of the norms for what is added to the mean of the squares.
        activation: the MLP's module for it.
        rope_by_type: whether the rotary embedding depends on the layer's type.
        partial: whether the rotary embedding may be of a part of each head (`partial_rotary_factor`).
        rotated: the attention's attribute that says whether its layer has a rotary embedding, or None: all have.
        softcap: the attention's attribute that caps its scores.
        factor: the layer's attribute that multiplies what attention and MLP add to the hidden states.
        embedding: the decoder's attribute that embeddings are multiplied with.
        logits_divisor: the config's attribute that logits are divided by.
        logits_cap: the config's attribute that caps logits.
    """

    module: str
    prefix: str
    window: Literal["config", "layer"] | None = None
    qkv: tuple[str, ...] = QKV
    gate_up: tuple[str, ...] = GATE_UP
    normed: Literal["heads", "projections"] | None = None
    norms: tuple[str | None, ...] = ("input_layernorm", None, "post_attention_layernorm", None)
    norm_offset: float | None = None
    epsilon: str = "variance_epsilon"
    activation: str = "act_fn"
    rope_by_type: bool = False
    partial: bool = False
    rotated: str | None = None
    softcap: str | None = None
    factor: str | None = None
    embedding: str | None = None
    logits_divisor: str | None = None
    logits_cap: str | None = None

    def has(self, module: Any, kind: str) -> bool:
        """Return whether a module is exactly this family's class of a kind, such as `Attention` or `MLP`."""
        cls = type(module)
        where = f"transformers.models.{self.module}.modeling_{self.module}"
        return cls.__module__ == where and cls.__name__ == self.prefix + kind

    def norms_of(self, layer: Any) -> list[Any]:
        """Return a layer's norms before attention, after it, before the MLP and after it, None where there is none."""
        return [None if name is None else getattr(layer, name) for name in self.norms]

    def window_of(self, attention: Any) -> int | None:
        """Return an attention's sliding window in positions, or None."""
        if self.window is None:
            return None
        return getattr(attention.config if self.window == "config" else attention, "sliding_window", None)

    def check_window(self, attention: Any) -> str | None:
        """Return how an attention's window contradicts its layer's type, by which transformers masks; or None."""
        types = getattr(attention.config, "layer_types", None) if self.window == "layer" else None
        kind = types[attention.layer_idx] if types else None
        if kind is None or (kind == "sliding_attention") == bool(self.window_of(attention)):
            return None
        return f"a layer of type {kind} with the window {self.window_of(attention)}"

    def rotary_width(self, config: Any, head_dim: int) -> int:
        """Return how many of a head's numbers are rotated."""
        given = getattr(config, "rope_parameters", None) or {}
        return int(head_dim * given.get("partial_rotary_factor", 1.0)) if self.partial else head_dim

    def tables(self, config: Any) -> tuple[str, ...] | None:
        """Return the names of the model's rotary tables if its layers have different ones, else None."""
        if self.rope_by_type:
            return tuple(dict.fromkeys(config.layer_types))
        return None if self.rotated is None else ("rotated", "not rotated")

    def table_of(self, attention: Any) -> int | None:
        """Return which of these an attention has, or None if there is one for all."""
        names = self.tables(attention.config)
        if names is None:
            return None
        if self.rotated is not None:
            return 0 if getattr(attention, self.rotated) else 1
        return names.index(attention.config.layer_types[attention.layer_idx])

    def settings_of(self, attention: Any) -> dict[str, Any]:
        """Return an attention's window, rotary table and softcap, which must not change while it is swapped."""
        softcap = None if self.softcap is None else getattr(attention, self.softcap)
        table = self.table_of(attention)
        return {"sliding window": self.window_of(attention), "rotary table": table, "softcap of scores": softcap}

    def logits(self, lm_head: nn.Module, config: Any) -> nn.Module:
        """Return what makes logits of hidden states: `lm_head`, and what the family does to its result."""
        divisor, cap = (_value(config, name) for name in (self.logits_divisor, self.logits_cap))
        return lm_head if divisor in (None, 1) and cap is None else ScaledLogits(lm_head, divisor or 1.0, cap)


def _value(config: Any, name: str | None) -> float | None:
    return None if name is None else getattr(config, name, None)


_gemma = functools.partial(
    Family, window="layer", norm_offset=1.0, epsilon="eps", logits_cap="final_logit_softcapping",
    norms=("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"),
)  # fmt: skip
_olmo = functools.partial(
    Family, normed="projections", norm_offset=0.0,
    norms=(None, "post_attention_layernorm", None, "post_feedforward_layernorm"),
)  # fmt: skip
FAMILIES = (
    Family("llama", "Llama"),
    Family("mistral", "Mistral", window="config"),
    Family("ministral", "Ministral", window="layer"),
    Family("qwen2", "Qwen2", window="layer"),
    Family("qwen3", "Qwen3", window="layer", normed="heads"),
    Family("smollm3", "SmolLM3", window="layer", rotated="use_rope"),
    Family(
        "phi3", "Phi3", window="config", qkv=("qkv_proj",), gate_up=("gate_up_proj",), activation="activation_fn",
        partial=True,
    ),
    Family(
        "granite", "Granite", factor="residual_multiplier", embedding="embedding_multiplier",
        logits_divisor="logits_scaling",
    ),
    _olmo("olmo2", "Olmo2"),
    _olmo("olmo3", "Olmo3", window="layer", rope_by_type=True),
    _gemma("gemma2", "Gemma2", softcap="attn_logit_softcapping"),
    _gemma("gemma3", "Gemma3", normed="heads", rope_by_type=True),
    Family("mixtral", "Mixtral", window="config"),
    Family("qwen2_moe", "Qwen2Moe", window="layer"),
    Family("qwen3_moe", "Qwen3Moe", window="config", normed="heads"),
)  # fmt: skip
"""The families whose attention modules can be swapped. Phi-4 has Phi-3's classes."""


def family_of(module: nn.Module, kind: str = "Attention") -> Family | None:
    """Return the family of a module of transformers of this kind, or None if its class is none of theirs."""
    return next((family for family in FAMILIES if family.has(module, kind)), None)
