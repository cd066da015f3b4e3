"""Check a model's settings files (config.json, generation_config.json, ..), which may come from strangers.

transformers trusts most of what it reads. It loops over the number of layers before weights could contradict it, sets
any key as an attribute, and uses the numbers of rotary embeddings in the first forward.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig

from medusa_decoding.checks import shown
from medusa_decoding.files import read_json_object

# Above those of any existing model.
_MOST = {
    "num_hidden_layers": 2**10,
    "hidden_size": 2**18,
    "intermediate_size": 2**21,
    "num_attention_heads": 2**13,
    "num_key_value_heads": 2**13,
    "head_dim": 2**13,
    "vocab_size": 2**24,
    "max_position_embeddings": 2**40,
    "num_labels": 2**16,
}
_ROPE_NUMBERS = {
    "factor", "rope_theta", "attention_factor", "partial_rotary_factor", "original_max_position_embeddings",
    "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim",
}  # fmt: skip
# They name other files of weights or settings, which would evade these checks.
_ELSEWHERE = ("configuration_files", "transformers_weights")
# Neither a path from the root nor an option; git allows no space, control character, backslash or any of ~^:?*[.
_REVISION = re.compile(r"(?![/-])[^\x00-\x20\x7f\\~^:?*\[]{1,256}")


read_settings = functools.partial(read_json_object, limit=2**24)
"""Read a JSON object of settings from a file of at most 16 MiB; errors as in `read_json_object`."""


def check_config(raw: Mapping[str, Any], file: Path) -> None:
    """Raise `ValueError` for impossible or dangerous values in a config file, or in the configs nested in it."""
    check_keys(raw, file, PretrainedConfig)
    for key in _ELSEWHERE:
        if raw.get(key) is not None:
            raise ValueError(f"{file}: expected no {key}, got {raw[key]!r}")
    for key, most in _MOST.items():
        value = raw.get(key)
        if value is None or isinstance(value, list):
            continue  # the default, or one value per layer, which transformers checks
        least = 0 if key == "num_labels" else 1
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise ValueError(f"{file}: expected {key} from {least} to {most}, got {shown(value)}")
    heads, kv_heads = raw.get("num_attention_heads"), raw.get("num_key_value_heads")
    if isinstance(heads, int) and isinstance(kv_heads, int) and heads % kv_heads:
        raise ValueError(f"{file}: expected num_key_value_heads that divides {heads} heads, got {kv_heads}")
    for key, value in raw.items():
        if key.startswith("rope_") or key in _ROPE_NUMBERS:
            _check_rope(key, value, file)
        if key.endswith("_config") and isinstance(value, dict):
            check_config(value, file)


def check_keys(raw: Mapping[str, Any], file: Path, kind: type) -> None:
    """Raise `ValueError` for keys that would replace a method, such as `to_dict`, and for invalid token ids."""
    for key, value in raw.items():
        if callable(getattr(kind, key, None)):
            raise ValueError(f"{file}: expected settings, got {key!r}, which names a method of {kind.__name__}")
        if key.endswith("_token_id") and value is not None:
            for token in value if isinstance(value, list) else [value]:
                if isinstance(token, bool) or not isinstance(token, int) or abs(token) >= 2**31:
                    raise ValueError(f"{file}: expected {key} to be a token id or a list of them, got {shown(value)}")


def _check_rope(key: str, value: Any, file: Path) -> None:
    single = key in _ROPE_NUMBERS
    if isinstance(value, dict) and not single:
        for inner, found in value.items():
            _check_rope(inner, found, file)
    elif key not in ("rope_type", "type") and (value is not None or key == "factor"):
        most = 1.0 if key == "partial_rotary_factor" else 1e15
        for number in value if isinstance(value, list) and not single else [value]:
            if not isinstance(number, (int, float)) or not abs(number) <= most:
                raise ValueError(f"{file}: expected {key} in numbers of at most {most:g}, got {shown(value)}")


def check_revision(revision: Any) -> None:
    """Raise `ValueError` unless a revision is None or can name a branch, tag or commit.

    The hub's client uses it as a path in its cache: a revision that a checkpoint records must not lead elsewhere.
    """
    if revision is None or (isinstance(revision, str) and _REVISION.fullmatch(revision) and ".." not in revision):
        return
    raise ValueError(f"revision: expected a branch, tag or commit on the hub, got {shown(revision)}")
