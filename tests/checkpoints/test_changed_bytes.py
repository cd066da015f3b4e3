"""Real checkpoints with some bytes changed: read, or refused with an exception that `read_heads` documents."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from limits import MIB, bounded
from safetensors.torch import save

from medusa_decoding.checkpoints import read_heads

VOCAB = 11
PT, SAFE = "medusa_lm_head.pt", "medusa_lm_head.safetensors"
WHOLE = {"0.0.linear.weight": torch.ones(8, 8), "0.1.weight": torch.ones(VOCAB, 8)}


def _originals() -> dict[str, dict[str, bytes]]:
    """Files of each format as they are written, by folder and name."""
    plain, zipped, old = {}, io.BytesIO(), io.BytesIO()
    torch.save(WHOLE, zipped)
    torch.save(WHOLE, old, _use_new_zipfile_serialization=False)
    heads = {f"medusa_head.{name}": tensor for name, tensor in WHOLE.items()}
    plain["config.json"] = json.dumps(
        {"base_model_name_or_path": "x", "medusa_num_heads": 1, "vocab_size": 11}
    ).encode()
    vllm_tensors = {"blocks.0.layers.0.weight": torch.ones(8, 8), "lm_heads.0.weight": torch.ones(11, 8)}
    vllm_config = {"model_type": "medusa", "vocab_size": 11, "truncated_vocab_size": None, "num_heads": 1}
    mapped = {"weight_map": dict.fromkeys(heads, "model-1.safetensors")}
    return {
        "safetensors": plain | {SAFE: save(WHOLE | {"token_map": torch.arange(11)})},
        "pt": plain | {PT: zipped.getvalue()},
        "older pt": plain | {PT: old.getvalue()},
        "vllm": {"config.json": json.dumps(vllm_config).encode(), "model.safetensors": save(vllm_tensors)},
        "sharded": plain
        | {"model.safetensors.index.json": json.dumps(mapped).encode(), "model-1.safetensors": save(heads)},
    }


ORIGINALS = _originals()
_PLACE, _BYTES = st.floats(0, 1, exclude_max=True), st.binary(min_size=1, max_size=9)
_CHANGE = st.tuples(_PLACE, st.sampled_from(["set", "cut", "insert", "repeat"]), _BYTES)
_CHANGES = st.lists(_CHANGE, min_size=1, max_size=3)


def changed(content: bytes, changes: list[tuple[float, str, bytes]]) -> bytes:
    for where, how, new in changes:
        place = int(where * len(content))
        if how == "cut":
            content = content[:place]
        elif how == "repeat":
            content = content[:place] + content[place : place + 40] * 3 + content[place:]
        else:
            content = content[:place] + new + content[place + (len(new) if how == "set" else 0) :]
    return content


@pytest.mark.parametrize("form", ORIGINALS)
def test_changed_bytes_raise_what_is_documented(tmp_path: Path, form: str) -> None:
    outcomes = set()

    @settings(max_examples=60, deadline=None, derandomize=True, database=None)
    @given(st.data())
    def change(data: st.DataObject) -> None:
        files = ORIGINALS[form]
        chosen = data.draw(st.sampled_from(sorted(files)))
        for name, content in files.items():
            (tmp_path / name).write_bytes(changed(content, data.draw(_CHANGES)) if name == chosen else content)
        with bounded(ValueError, seconds=2, memory=64 * MIB) as said:
            read_heads(tmp_path, vocab_size=VOCAB)
        outcomes.add(bool(said))

    change()
    assert outcomes == {True, False}, "expected some to be refused and some to be read"
