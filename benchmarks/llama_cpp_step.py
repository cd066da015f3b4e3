"""llama.cpp's decoding step on a model of transformers: written as a GGUF file, decoded through the low-level API.

Needs the packages `llama-cpp-python` and `gguf`.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import gguf
import llama_cpp
import numpy as np
import torch

VERSION: str = llama_cpp.__version__
MOST_TOKENS = 64
"""Of one step, after the prefix."""
_QUIET = llama_cpp.llama_log_callback(lambda *_: None)
# Names of llama.cpp for those of transformers.
LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
OUTER = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def write_gguf(base: Any, path: Path, layers: str, lm_head: str) -> int:
    """Write a Llama model of transformers, without a vocabulary.

    Args:
        base: the model, not quantised.
        path: of the file.
        layers: type of the layers' projections: "F32", "BF16" or "Q8_0".
        lm_head: type of lm_head and the embedding.

    Returns:
        The bytes of all weights but the embedding.
    """
    config = base.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("none")
    total = 0
    for name, weight in base.state_dict().items():
        name = name.removesuffix(".weight")
        if name in OUTER:
            new, kind = OUTER[name], lm_head
        else:
            _, _, index, inner = name.split(".", 3)
            new, kind = f"blk.{index}.{LAYER[inner]}", layers
            if inner in ("self_attn.q_proj", "self_attn.k_proj"):
                weight = _interleaved(weight, config.head_dim)
        kind = gguf.GGMLQuantizationType["F32" if weight.ndim == 1 else kind]
        data = gguf.quants.quantize(weight.float().numpy(), kind)
        writer.add_tensor(f"{new}.weight", data, raw_dtype=kind)
        total += 0 if new == "token_embd" else data.nbytes
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return total


def _interleaved(weight: torch.Tensor, dim: int) -> torch.Tensor:
    """Order the rows of each head as llama.cpp rotates them: neighbours, not halves, are pairs."""
    return weight.unflatten(0, (-1, 2, dim // 2)).transpose(1, 2).reshape(weight.shape)


class Decoder:
    """A model loaded by llama.cpp, with a prefix in its cache.

    Args:
        path: GGUF file.
        prefix: token ids.
        threads: of the computation.
        fp32: keep keys and values in fp32, and leave out flash attention, which adds up in fp16, instead of
            llama.cpp's defaults.
    """

    def __init__(self, path: Path, prefix: list[int], threads: int, fp32: bool) -> None:
        llama_cpp.llama_log_set(_QUIET, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        self.model = llama_cpp.llama_model_load_from_file(str(path).encode(), llama_cpp.llama_model_default_params())
        assert self.model, f"llama.cpp cannot load {path}"
        settings = llama_cpp.llama_context_default_params()
        rows = len(prefix) + MOST_TOKENS
        settings.n_ctx = settings.n_batch = settings.n_ubatch = rows
        settings.n_threads = settings.n_threads_batch = threads
        if fp32:
            settings.type_k = settings.type_v = llama_cpp.GGML_TYPE_F32
            settings.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
        self.context = llama_cpp.llama_init_from_model(self.model, settings)
        self.batch = llama_cpp.llama_batch_init(rows, 0, 1)
        self.vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))
        self.prefix = len(prefix)
        self._decode(prefix, 0)

    def _decode(self, tokens: list[int], start: int) -> None:
        """Make the logits of all tokens, the first of which is at position `start`, and wait for them."""
        batch = self.batch
        batch.n_tokens = len(tokens)
        for i, token in enumerate(tokens):
            batch.token[i], batch.pos[i], batch.logits[i] = token, start + i, 1
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
        if status := llama_cpp.llama_decode(self.context, batch):
            raise RuntimeError(f"llama_decode: status {status}")
        llama_cpp.llama_synchronize(self.context)

    def step(self, tokens: list[int]) -> None:
        """Take the cache back to the prefix, and decode tokens after it."""
        llama_cpp.llama_memory_seq_rm(llama_cpp.llama_get_memory(self.context), 0, self.prefix, -1)
        self._decode(tokens, self.prefix)

    def logits(self, tokens: list[int]) -> torch.Tensor:
        """Return the logits after each of some tokens, which follow the prefix: fp32 [tokens, V]."""
        self.step(tokens)
        logits = np.ctypeslib.as_array(llama_cpp.llama_get_logits(self.context), (len(tokens), self.vocab))
        return torch.from_numpy(logits.copy())

    def __del__(self) -> None:
        llama_cpp.llama_batch_free(self.batch)
        llama_cpp.llama_free(self.context)
        llama_cpp.llama_model_free(self.model)
