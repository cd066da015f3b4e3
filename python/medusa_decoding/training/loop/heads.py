"""The heads of a run: fresh ones, or given ones to train further."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

from medusa_decoding.checkpoints import read_heads
from medusa_decoding.heads import MedusaHeads
from medusa_decoding.training.config import Config, HeadsConfig
from medusa_decoding.training.data.targets import most_frequent_tokens
from medusa_decoding.training.loop.backbone import TrainingBackbone
from medusa_decoding.training.loop.rows import Rows


def make_heads(config: Config, backbone: TrainingBackbone, tokenizer: Any, frequencies: Counter[int]) -> MedusaHeads:
    """Return heads to train, in float32 on the model's device: W1 zero and W2 the lm_head (2.1.1), or those given.

    For a model that divides its logits, W2 is the lm_head divided by that number.

    A trimmed vocabulary has the most frequent tokens of the training data.
    """
    settings, model = config.heads, backbone.causal.config
    vocabulary, size = int(model.vocab_size), int(model.hidden_size)
    device = next(backbone.module.parameters()).device
    if settings.initial is not None:
        given = given_heads(config, size, vocabulary)
        heads = new_heads(settings, size, vocabulary, given.token_map, torch.float32, device, given.all_parents)
        with torch.no_grad():
            for name, weight in given.named_parameters():  # root input, parents' term or map may be new
                heads.get_parameter(name).copy_(weight)
        return heads
    token_map = choose_tokens(settings, tokenizer, frequencies)
    heads = new_heads(settings, size, vocabulary, token_map, torch.float32, device)
    if heads.w2 is not None:
        layer: Any = getattr(backbone.lm_head, "base_layer", backbone.lm_head)
        weight = layer.weight.detach()
        if weight.shape != (vocabulary, size) or not weight.is_floating_point():
            raise ValueError(
                f"model: expected an lm_head [{vocabulary}, {size}] of floats to start heads from, got "
                f"{weight.dtype} {list(weight.shape)}"
            )
        with torch.no_grad():
            heads.w2.copy_((weight if token_map is None else weight[token_map.to(weight.device)]).expand_as(heads.w2))
            heads.w2.div_(getattr(backbone.to_logits(), "divisor", None) or 1.0)
    return heads


def choose_tokens(settings: HeadsConfig, tokenizer: Any, frequencies: Counter[int]) -> torch.Tensor | None:
    """Return the token_map of fresh heads, int64 [V'], or None for the whole vocabulary."""
    if settings.token_map_size is None:
        return None
    ends = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    return most_frequent_tokens(frequencies, settings.token_map_size, always=ends)


def describe_map(token_map: torch.Tensor, vocab_size: int, rows: Rows) -> str:
    """Return a line of text: how many tokens heads propose, and their share of held-out data's tokens."""
    words, counts = f"heads propose {len(token_map):,} of {vocab_size:,} tokens", rows.held_out_frequencies
    if not counts:
        return words
    share = sum(counts[token] for token in token_map.tolist()) / counts.total()
    return f"{words}: {share:.1%} of those to learn in held-out data"


def new_heads(
    settings: HeadsConfig,
    hidden_size: int,
    vocab_size: int,
    token_map: torch.Tensor | None,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    all_parents: bool = False,
) -> MedusaHeads:
    """Return fresh heads as configured, with this token_map."""
    return MedusaHeads(
        hidden_size,
        vocab_size,
        settings.num_heads,
        settings.num_layers,
        shared_projection=settings.shared_projection,
        bias=settings.bias,
        token_map=None if token_map is None else token_map.cpu(),
        parent_rank=settings.parent_rank,
        root_rank=settings.root_rank,
        feature_layers=settings.feature_layers,
        all_parents=all_parents,
        dtype=dtype,
        device=device,
    )


def given_heads(config: Config, hidden_size: int, vocab_size: int) -> MedusaHeads:
    """Read the heads that `heads.initial` names."""
    settings, name = config.heads, str(config.heads.initial)
    heads = read_heads(name, hidden_size=hidden_size, vocab_size=vocab_size, dtype=torch.float32).heads
    if heads.storage != "float":
        raise ValueError(f"heads.initial: expected heads in floats, got some in {heads.storage}")
    for key, got in (
        ("num_heads", heads.num_heads),
        ("num_layers", heads.num_layers),
        ("shared_projection", heads.shared_projection),
        ("bias", heads.b1 is not None),
        ("token_map_size", None if heads.token_map is None else len(heads.token_map)),
        ("parent_rank", heads.parent_rank or settings.parent_rank),  # a missing term is made
        ("root_rank", heads.root_rank or settings.root_rank),
        ("feature_layers", heads.feature_layers or settings.feature_layers),
    ):
        wanted = getattr(settings, key)
        if wanted != got:
            raise ValueError(f"heads.{key}: expected {got} like the heads in {name}, got {wanted}")
    return heads
