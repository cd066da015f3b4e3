"""Check the sizes in a model's config.json, which may come from strangers, before memory is taken for them.

transformers loops over the numbers of layers and labels before weights could contradict them.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

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
    "num_labels": 2**16,
}
# They name other files of weights or settings, which would evade these checks.
_ELSEWHERE = ("configuration_files", "transformers_weights")
# Neither a path from the root nor an option; git allows no space, control character, backslash or any of ~^:?*[.
_REVISION = re.compile(r"(?![/-])[^\x00-\x20\x7f\\~^:?*\[]{1,256}")


read_settings = functools.partial(read_json_object, limit=2**24)
"""Read a JSON object of settings from a file of at most 16 MiB; errors as in `read_json_object`."""


def check_config(raw: Mapping[str, Any], file: Path) -> None:
    """Raise `ValueError` for impossible sizes in a config file or in the configs nested in it, or names of weights."""
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
        if key.endswith("_config") and isinstance(value, dict):
            check_config(value, file)


def check_revision(revision: Any) -> None:
    """Raise `ValueError` unless a revision is None or can name a branch, tag or commit.

    The hub's client uses it as a path in its cache: a revision that a checkpoint records must not lead elsewhere.
    """
    if revision is None or (isinstance(revision, str) and _REVISION.fullmatch(revision) and ".." not in revision):
        return
    raise ValueError(f"revision: expected a branch, tag or commit on the hub, got {shown(revision)}")
