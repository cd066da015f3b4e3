"""Words for names: those in the sources of the standard library, and made-up ones.

Held-out requests have names of held-out words only, so that a model that does well on them has learnt to use the names
of a request and not to know them.
"""

from __future__ import annotations

import builtins
import functools
import hashlib
import keyword
import random
import re
import string
import sysconfig
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from medusa_decoding.demo.requests import SQL

FEWEST_FILES = 5
HELD_OUT_ONE_IN = 10
LETTERS = 0.04
"""Share of single letters among the words drawn."""
RESERVED = {
    *keyword.kwlist, *keyword.softkwlist, *dir(builtins), "self", "other", "value", "word", "parser", "argv"
}  # fmt: skip
"""Words of Python and of the answers; they name nothing."""


def is_held_out(word: str) -> bool:
    """Return whether a word or a combination of words is held out, by its hash: the same on every machine."""
    return int.from_bytes(hashlib.sha256(word.encode()).digest()[:4], "big") % HELD_OUT_ONE_IN == 0


@functools.cache
def stdlib_words(root: Path | None = None) -> tuple[str, ...]:
    """Return the words of identifiers in the running interpreter's standard library, sorted.

    Raises:
        ValueError: no sources under `root`.
    """
    root = Path(root or sysconfig.get_paths()["stdlib"])
    files: Counter[str] = Counter()
    for path in sorted(root.rglob("*.py")):
        if "site-packages" in path.parts:
            continue
        names = re.findall(r"\b[a-z_]{3,}\b", path.read_text(encoding="utf-8", errors="ignore"))
        files.update({word for name in names for word in name.split("_") if 3 <= len(word) <= 12})
    known = RESERVED | SQL
    found = tuple(sorted(word for word, count in files.items() if count >= FEWEST_FILES and word not in known))
    if not found:
        raise ValueError(f"expected a Python standard library with sources under {root}, found none")
    return found


class Words:
    """Draws words of one side.

    Args:
        words: all words.
        held_out: draw held-out ones.
        made_up: share of made-up words among those drawn: a model that cannot know a word has to copy it.
    """

    def __init__(self, words: Sequence[str], held_out: bool = False, made_up: float = 0.0) -> None:
        self.held_out, self.made_up = held_out, made_up
        self.words = [word for word in words if is_held_out(word) == held_out]

    def draw(self, chooser: random.Random) -> str:
        """Return a word."""
        while True:
            kind = chooser.random()
            if kind < LETTERS:
                word = chooser.choice(string.ascii_lowercase)
            else:
                word = _made_up(chooser, self.words) if kind < LETTERS + self.made_up else chooser.choice(self.words)
            if word not in RESERVED | SQL and is_held_out(word) == self.held_out:
                return word

    def name(self, chooser: random.Random) -> str:
        """Return a name of one or two words."""
        words = [self.draw(chooser) for _ in range(1 + (chooser.random() < 0.25))]
        return "_".join(words)

    def names(self, chooser: random.Random, count: int) -> list[str]:
        """Return different names."""
        found: list[str] = []
        while len(found) < count:
            if (name := self.name(chooser)) not in found:
                found.append(name)
        return found


def _made_up(chooser: random.Random, words: Sequence[str]) -> str:
    """Return syllables, or the beginning of one word and the end of another."""
    if chooser.random() < 0.5:
        one, other = chooser.choice(words), chooser.choice(words)
        return one[: chooser.randint(1, len(one))] + other[chooser.randrange(len(other)) :]
    syllables = [chooser.choice("bcdfghjklmnprstvwz") + chooser.choice("aeiou") for _ in range(chooser.randint(1, 3))]
    return "".join(syllables) + chooser.choice("nrstlmkd")
