"""Checkpoints made by hand, tensor by tensor, without the package's own writer."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

HIDDEN, VOCAB = 6, 11


@pytest.fixture(autouse=True)
def _no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any access to the hub that a test has not replaced fails."""

    def refuse(*args: object, **kwargs: object) -> str:
        raise AssertionError(f"the hub was asked for {args}")

    monkeypatch.setattr("medusa_decoding.checkpoints.reading.snapshot_download", refuse)


@pytest.fixture
def paper_tensors() -> Callable[..., dict[str, torch.Tensor]]:
    """Random tensors of K heads under the paper's names."""

    def make(
        heads: int = 3,
        layers: int = 1,
        *,
        rows: int | None = VOCAB,
        bias: bool = True,
        dtype: torch.dtype = torch.float32,
        prefix: str = "",
        hidden: int = HIDDEN,
    ) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(heads * 100 + layers)
        tensors = {}
        for head in range(heads):
            for layer in range(layers):
                block = f"{prefix}{head}.{layer}.linear"
                tensors[f"{block}.weight"] = torch.randn(hidden, hidden, generator=generator).to(dtype)
                if bias:
                    tensors[f"{block}.bias"] = torch.randn(hidden, generator=generator).to(dtype)
            if rows is not None:
                tensors[f"{prefix}{head}.{layers}.weight"] = torch.randn(rows, hidden, generator=generator).to(dtype)
        return tensors

    return make


@pytest.fixture
def write_paper_folder(tmp_path: Path) -> Callable[..., Path]:
    """Write tensors as a heads-only folder; `config=None` leaves config.json out."""

    def write(
        tensors: dict[str, torch.Tensor],
        config: dict[str, Any] | None = {"base_model_name_or_path": "someone/base"},  # noqa: B006 (never changed)
        *,
        file: str = "medusa_lm_head.safetensors",
        folder: str = "heads",
    ) -> Path:
        target = tmp_path / folder
        target.mkdir(parents=True, exist_ok=True)
        if config is not None:
            (target / "config.json").write_text(json.dumps(config))
        if file.endswith(".safetensors"):
            save_file(tensors, target / file)
        else:
            torch.save(tensors, target / file)
        return target

    return write


@pytest.fixture
def tiny_llama() -> LlamaForCausalLM:
    """A random Llama of two layers whose hidden size and vocabulary fit `paper_tensors(hidden=8)`."""
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=8,
        intermediate_size=12,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=32,
        tie_word_embeddings=False,
    )
    return LlamaForCausalLM(config).eval()
