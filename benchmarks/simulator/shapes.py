"""Sizes of models and of their Medusa heads: known ones by name, any other from its transformers config."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a dense Llama-like model.

    Attributes:
        name: how figures name it.
        hidden: h, hidden size.
        intermediate: i, width of the up, gate and down projections.
        layers: blocks.
        heads: n, query heads.
        kv_heads: heads of keys and values.
        head_dim: d.
        vocabulary: V, rows of lm_head.
    """

    name: str
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int


@dataclass(frozen=True)
class HeadShape:
    """Sizes of Medusa heads.

    Attributes:
        count: K.
        vocabulary: rows of a head's projection; None for all of the model's.
        shared: whether heads project with the model's lm_head instead of their own matrices.
        layers: residual blocks per head.
        root_rank: of the heads' input from the root token's embedding; 0 for none.

    Raises:
        ValueError: one of them is below 1 (root_rank: below 0).
    """

    count: int = 4
    vocabulary: int | None = None
    shared: bool = False
    layers: int = 1
    root_rank: int = 0

    def __post_init__(self) -> None:
        for name, least in (("count", 1), ("layers", 1), ("vocabulary", 1), ("root_rank", 0)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"heads: expected {name} of at least {least}, got {value}")


def _llama(name: str, hidden: int, intermediate: int, layers: int, heads: int) -> ModelShape:
    return ModelShape(name, hidden, intermediate, layers, heads, heads, 128, 32000)


SHAPES: dict[str, ModelShape] = {
    "vicuna-7b": _llama("vicuna-7b", 4096, 11008, 32, 32),
    "vicuna-13b": _llama("vicuna-13b", 5120, 13824, 40, 40),
    "vicuna-33b": _llama("vicuna-33b", 6656, 17920, 60, 52),
    "llama-2-7b": _llama("llama-2-7b", 4096, 11008, 32, 32),
    "llama-2-13b": _llama("llama-2-13b", 5120, 13824, 40, 40),
    "llama-3-8b": ModelShape("llama-3-8b", 4096, 14336, 32, 32, 8, 128, 128256),
    "mistral-7b": ModelShape("mistral-7b", 4096, 14336, 32, 32, 8, 128, 32000),
    "qwen3-8b": ModelShape("qwen3-8b", 4096, 12288, 36, 32, 8, 128, 151936),
}

_NAMES = {
    "hidden": "hidden_size",
    "intermediate": "intermediate_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "vocabulary": "vocab_size",
}
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


def find_shape(name: str) -> ModelShape:
    """Return a model's sizes.

    Args:
        name: a key of `SHAPES`, or a folder or hub id with a transformers config.

    Raises:
        ValueError: neither; a config without one of the sizes; or a mixture of experts, whose steps read a number of
            weights that depends on the text.
    """
    if name in SHAPES:
        return SHAPES[name]
    from medusa_decoding.checkpoints.pretrained import load_config  # imports transformers

    try:
        config: Any = load_config(name, argument="model")
    except ValueError as error:
        raise ValueError(
            f"model: expected one of {', '.join(SHAPES)}, or a folder or hub id with a config, got {name} ({error})"
        ) from error
    return shape_of(config, name)


def shape_of(config: Any, name: str) -> ModelShape:
    """Return the sizes that a transformers config states; see `find_shape` for what is refused."""
    experts = [field for field in _EXPERTS if getattr(config, field, None)]
    if experts:
        raise ValueError(f"model: expected a dense model, got {name} with {experts[0]} {getattr(config, experts[0])}")
    found: dict[str, int] = {}
    for size, field in _NAMES.items():
        value = getattr(config, field, None)
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"model: expected a config with {field} of at least 1, got {value!r} for {name}")
        found[size] = value
    heads = found["heads"]
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    head_dim = getattr(config, "head_dim", None) or found["hidden"] // heads
    return ModelShape(name, kv_heads=kv_heads, head_dim=head_dim, **found)
