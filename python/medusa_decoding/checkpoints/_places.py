"""Names of the files that folders with heads hold, and what else is in a folder that is to be replaced.

This module does not read files.
"""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from pathlib import Path

OF_HEADS = ("medusa_tree.json", "measured.json", "calibration.json", "tuning.json")
"""What is measured with heads, or chosen for them."""

CARD, PLOT = "README.md", "accuracy.png"

TOKENIZER = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "vocab.txt", "merges.txt", "spiece.model", "sentencepiece.bpe.model", "chat_template.jinja",
    "chat_template.json",
)  # fmt: skip

_SMALL = ("config.json", "generation_config.json", ".gitattributes", CARD, PLOT, *OF_HEADS, *TOKENIZER)
_TERMS = ("LICENSE*", "NOTICE*", "USE_POLICY*")
_LOCK = ".*.lock"
"""Of `files.only_writer`; a writer that was killed leaves its file."""
_HEADS_ALONE = re.compile(r"medusa_lm_head\.(safetensors|pt)")
_PART = r"(-\d{5}-of-\d{5})?"
_MODEL = re.compile(
    rf"model{_PART}\.safetensors|model-medusa-heads\.safetensors|pytorch_model{_PART}\.bin"
    r"|model\.safetensors\.index\.json|pytorch_model\.bin\.index\.json"
)


def foreign(folder: Path) -> str | None:
    """Return the name of an entry that no checkpoint of heads has, or None.

    A folder with heads alone in one file has no model's weights; any other has.
    """
    entries = sorted(folder.iterdir())
    weights = _HEADS_ALONE if any(_HEADS_ALONE.fullmatch(entry.name) for entry in entries) else _MODEL
    for entry in entries:
        name = entry.name
        known = name in _SMALL or weights.fullmatch(name) or any(fnmatchcase(name, terms) for terms in (*_TERMS, _LOCK))
        if entry.is_dir() or not known:
            return name
    return None
