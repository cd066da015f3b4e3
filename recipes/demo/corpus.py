"""The demo model's corpus: sources of the running Python's standard library, split by module.

A module and its tests always fall on the same side of the split, so that a held-out file's own tests are not trained
on. This file knows files and tokens; it does not know models.
"""

from __future__ import annotations

import hashlib
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

END_OF_TEXT = "<|endoftext|>"
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
        """Return one file's text; the standard library is UTF-8 but for a few test files, which `split` leaves out."""
        return (self.root / name).read_text(encoding="utf-8")


def module_group(name: str) -> str:
    """Name what a file belongs to: `json/decoder.py`, `test/test_json/x.py` and `test/json_tests.py` are all `json`."""
    parts = Path(name).with_suffix("").parts
    top = parts[1] if parts[0] == "test" and len(parts) > 1 else parts[0]
    top = top.removeprefix("test_").removesuffix("_tests").lstrip("_")
    return top or "test"


def is_held_out(name: str) -> bool:
    """Decide a file's side from its group's hash: the same on every machine."""
    digest = hashlib.sha256(module_group(name).encode()).digest()
    return int.from_bytes(digest[:4], "big") % HELD_OUT_ONE_IN == 0


def split(root: Path | None = None) -> Split:
    """List the corpus below `root` (the running interpreter's standard library by default)."""
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


def train_tokenizer(corpus: Split, vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE on the training files; runs of spaces become tokens, digits stand alone."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=sys.stderr.isatty(),
    )
    tokenizer.train_from_iterator((corpus.read(name) for name in corpus.train), trainer)
    return tokenizer


def encode(corpus: Split, names: list[str], tokenizer: Tokenizer) -> np.ndarray:
    """Concatenate files as token ids (uint16), each preceded by the end-of-text token."""
    end = tokenizer.token_to_id(END_OF_TEXT)
    encoded = tokenizer.encode_batch([corpus.read(name) for name in names])
    return np.concatenate([np.array([end, *item.ids], dtype=np.uint16) for item in encoded])
