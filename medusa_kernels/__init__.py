"""The operations of a Medusa decode step: tensors in, tensors out.

This package knows torch and triton. It knows nothing of models, trees as objects, tokenizers or acceptance rules, and
never imports transformers. Each operation is a `torch.library` op in the namespace `medusa_kernels`; its specification
is the function of the same name in `medusa_kernels.reference`.
"""

from medusa_kernels._registry import OPS, Implementation, served_by
from medusa_kernels.add_rms_norm import add_rms_norm
from medusa_kernels.decode_linear import decode_linear, linear_parts
from medusa_kernels.decoder_layers import LayerWeights, Projection, decoder_layers, packed
from medusa_kernels.draw_tokens import draw_tokens
from medusa_kernels.gumbel_noise import gumbel_noise
from medusa_kernels.heads_topk import heads_topk
from medusa_kernels.kv_compact import kv_compact
from medusa_kernels.reference import ancestor_words
from medusa_kernels.rope_append import rope_append
from medusa_kernels.tree_accept import tree_accept
from medusa_kernels.tree_attention import tree_attention
from medusa_kernels.tree_select import tree_select
from medusa_kernels.tree_verify import tree_verify

__all__ = [
    "OPS",
    "Implementation",
    "LayerWeights",
    "Projection",
    "add_rms_norm",
    "ancestor_words",
    "decode_linear",
    "decoder_layers",
    "draw_tokens",
    "gumbel_noise",
    "heads_topk",
    "kv_compact",
    "linear_parts",
    "packed",
    "rope_append",
    "served_by",
    "tree_accept",
    "tree_attention",
    "tree_select",
    "tree_verify",
]
