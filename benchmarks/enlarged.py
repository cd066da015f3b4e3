"""The demo model within a larger one: the same texts, at the cost of the larger model.

A model of 254M parameters that is right about anything cannot be trained on two CPU cores. One with random weights has
the cost of its size, but accepts no draft and writes the same token for ever. So the demo model's weights are put in a
corner of the larger ones. What surrounds them is random, but cannot reach the residual stream: rows that would write to
it are zero. The larger model writes what the demo model writes, and all ways of decoding accept what they accept there.
"""

from __future__ import annotations

import copy
import math
import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaForCausalLM, PretrainedConfig

from benchmarks.simulator.shapes import ModelShape, shape_of
from medusa_decoding.checkpoints import pretrained, read_heads, write_heads
from medusa_decoding.demo import CHECKPOINT
from medusa_decoding.heads import MedusaHeads

CONSTANT = 1e-4
"""Held by one more dimension of the residual stream, to keep tokens that the small model lacks from being chosen."""


def enlarge(small: Any, shape: ModelShape, seed: int = 0) -> LlamaForCausalLM:
    """Return a larger float32 model that writes what a small Llama writes.

    Args:
        small: float32, without biases and with its own lm_head.
        shape: larger than the small model in every way, with the same head_dim.
        seed: of the weights around the small model's.

    Raises:
        ValueError: a shape with a size below the small model's, or with another head_dim.
    """
    known = small.config
    group, wide = known.num_attention_heads // known.num_key_value_heads, shape.heads // shape.kv_heads
    least = (known.hidden_size + 1, known.num_hidden_layers, known.num_key_value_heads, known.intermediate_size)
    least += (known.vocab_size,)
    sizes = (shape.hidden, shape.layers, shape.kv_heads, shape.intermediate, shape.vocabulary)
    if wide < group or shape.head_dim != known.head_dim or any(a < b for a, b in zip(sizes, least, strict=True)):
        raise ValueError(f"shape: expected one larger than the small model in every way, got {shape}")
    config = copy.deepcopy(known)
    config.hidden_size, config.num_hidden_layers, config.intermediate_size = (
        shape.hidden,
        shape.layers,
        shape.intermediate,
    )
    config.num_attention_heads, config.num_key_value_heads = shape.heads, shape.kv_heads
    config.vocab_size, config.head_dim, config.max_position_embeddings = shape.vocabulary, known.head_dim, 1 << 14
    # The mean square is over more dimensions, of which the others hold zero.
    share = known.hidden_size / shape.hidden
    config.rms_norm_eps = known.rms_norm_eps * share
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        large = LlamaForCausalLM(config).eval().requires_grad_(False)
    size, dim, inner = known.hidden_size, known.head_dim, known.intermediate_size
    # Heads of one KV head stay together.
    query = torch.cat([
        torch.arange(dim) + (i // group * wide + i % group) * dim for i in range(known.num_attention_heads)
    ])  # fmt: skip
    key = torch.arange(known.num_key_value_heads * dim)

    def norm(into: Any, of: Any) -> None:
        into.weight.zero_()
        into.weight[:size] = of.weight * math.sqrt(share)

    for place, layer in enumerate(large.model.layers):
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
        if place >= known.num_hidden_layers:
            continue
        of = small.model.layers[place]
        norm(layer.input_layernorm, of.input_layernorm)
        norm(layer.post_attention_layernorm, of.post_attention_layernorm)
        for name, rows in (("q_proj", query), ("k_proj", key), ("v_proj", key)):
            weight = getattr(layer.self_attn, name).weight
            weight[rows, :size] = getattr(of.self_attn, name).weight
        layer.self_attn.o_proj.weight[:size, query] = of.self_attn.o_proj.weight
        for name in ("gate_proj", "up_proj"):
            getattr(layer.mlp, name).weight[:inner, :size] = getattr(of.mlp, name).weight
        layer.mlp.down_proj.weight[:size, :inner] = of.mlp.down_proj.weight
    norm(large.model.norm, small.model.norm)
    large.model.norm.weight[size] = 1
    embedding, lm_head, count = large.model.embed_tokens.weight, large.lm_head.weight, known.vocab_size
    embedding.zero_()
    embedding[:count, :size] = small.model.embed_tokens.weight
    embedding[:, size] = CONSTANT
    lm_head.zero_()
    lm_head[:count, :size] = small.lm_head.weight
    lm_head[count:, size] = -1e3 / CONSTANT  # far below any other logit
    large.generation_config = copy.deepcopy(small.generation_config)
    return large


def enlarge_heads(heads: MedusaHeads, shape: ModelShape) -> MedusaHeads:
    """Return heads for the larger model that propose what heads of the small one propose.

    Raises:
        ValueError: heads with own projections, a trimmed vocabulary or feature layers.
    """
    if not heads.shared_projection or heads.token_map is not None or heads.feature_layers:
        raise ValueError("heads: expected some that share the whole lm_head and read one state, got others")
    with torch.random.fork_rng(devices=[]):
        large = MedusaHeads(
            shape.hidden, shape.vocabulary, heads.num_heads, heads.num_layers, shared_projection=True,
            bias=heads.b1 is not None, root_rank=heads.root_rank, parent_rank=heads.parent_rank,
        )  # fmt: skip
    with torch.no_grad():
        for name, weight in large.named_parameters():
            weight.zero_()
            known = heads.get_parameter(name)
            # A root's embedding is scaled to a mean square of 1, here over more dimensions.
            scale = math.sqrt(heads.hidden_size / shape.hidden) if name == "root_down" else 1.0
            weight[tuple(slice(length) for length in known.shape)] = known * scale
    return large.eval().requires_grad_(False)


def save(config: PretrainedConfig, folder: Path, small: Path = CHECKPOINT) -> Path:
    """Write the larger model and its heads of a folder with `base` and `heads` to another such folder; return it."""
    base, heads = small / "base", small / "heads"
    shape = shape_of(config, "larger")
    enlarge(pretrained.load_model(base, dtype=torch.float32).eval(), shape).save_pretrained(folder / "base")
    pretrained.load_tokenizer(base).save_pretrained(folder / "base")
    write_heads(
        enlarge_heads(read_heads(heads, dtype=torch.float32).heads, shape), folder / "heads", base_model="../base"
    )
    shutil.copy(heads / "measured.json", folder / "heads")
    return folder
