"""The demo model's corpus: sources of the running Python's standard library, split by module.

A module and its tests are always on the same side of the split, so that a held-out file's own tests are not trained on.
"""

from __future__ import annotations

import hashlib
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer

END = 0
"""The token that ends a text, of the embedded tokenizer and of those that `base` trains."""
HELD_OUT_ONE_IN = 25
# Generated tables and prose, not code; vendored or removed trees.
EXCLUDED = ("encodings", "pydoc_data", "site-packages", "__pycache__", "ensurepip", "lib2to3", "turtledemo")
MAX_FILE_BYTES = 200_000


@dataclass(frozen=True)
class Split:
    """Relative paths of the two sides of the corpus, sorted."""

    root: Path
    train: list[str]
    held_out: list[str]

    def read(self, name: str) -> str:
        """Return a file's text. A few test files are not in UTF-8; `split` leaves them out."""
        return (self.root / name).read_text(encoding="utf-8")


def module_group(name: str) -> str:
    """Return the module of a file: `json` for `json/decoder.py`, `test/test_json/x.py` and `test/json_tests.py`."""
    parts = Path(name).with_suffix("").parts
    top = parts[1] if parts[0] == "test" and len(parts) > 1 else parts[0]
    top = top.removeprefix("test_").removesuffix("_tests").lstrip("_")
    return top or "test"


def is_held_out(name: str) -> bool:
    """Return whether a file is held out, by a hash of its module: the same on every machine."""
    digest = hashlib.sha256(module_group(name).encode()).digest()
    return int.from_bytes(digest[:4], "big") % HELD_OUT_ONE_IN == 0


def split(root: Path | None = None) -> Split:
    """List the files under `root` (by default the running interpreter's standard library)."""
    root = Path(root or sysconfig.get_paths()["stdlib"])
    train: list[str] = []
    held_out: list[str] = []
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        if any(part in EXCLUDED for part in path.relative_to(root).parts) or path.stat().st_size > MAX_FILE_BYTES:
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        if len(text) < 400:
            continue
        (held_out if is_held_out(name) else train).append(name)
    if not train or not held_out:
        raise ValueError(f"expected a Python standard library with sources under {root}, found {len(train)} files")
    return Split(root, train, held_out)


def encode(corpus: Split, names: list[str], tokenizer: Tokenizer) -> np.ndarray:
    """Concatenate files as token ids (uint16), each after an end-of-text token."""
    encoded = tokenizer.encode_batch([corpus.read(name) for name in names])
    return np.concatenate([np.array([END, *item.ids], dtype=np.uint16) for item in encoded])


def random_prompts(data: np.ndarray, count: int, length: int, seed: int) -> torch.Tensor:
    """Draw `count` windows of `length` tokens as int64 [count, length], none of which crosses a file's start."""
    rng = np.random.default_rng(seed)
    found: list[np.ndarray] = []
    while len(found) < count:
        start = int(rng.integers(0, len(data) - length))
        window = data[start : start + length]
        if not (window[1:] == END).any():
            found.append(window.astype(np.int64))
    return torch.from_numpy(np.stack(found))
