"""Beginnings of code for the demo model to continue: pieces of the standard library, as a file of plain texts.

    python -m recipes.demo.seeds runs/demo/seeds.jsonl --count 1000
    medusa distill --config recipes/demo-cpu.yaml

From the training side of the corpus's split by module, so that nothing of the held-out files is seen.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from pathlib import Path

from recipes.demo import corpus

CHARACTERS = 1200
"""Of a piece: more than 128 of the demo model's tokens, nearly always."""


def write_seeds(file: Path, count: int, seed: int = 0, *, held_out: bool = False) -> None:
    """Write pieces that begin at a line's start, each drawn from a file in proportion to the file's length.

    Args:
        file: JSON lines of `text`.
        count: how many.
        seed: of the choice.
        held_out: from the held-out side instead.

    Raises:
        ValueError: fewer than one.
    """
    if count < 1:
        raise ValueError(f"count: expected at least 1, got {count}")
    split = corpus.split()
    names = split.held_out if held_out else split.train
    texts = [text for text in map(split.read, names) if len(text) > 2 * CHARACTERS]
    chooser = random.Random(seed)
    file.parent.mkdir(parents=True, exist_ok=True)
    with open(file, "w", encoding="utf-8") as lines:
        for text in chooser.choices(texts, weights=[len(text) for text in texts], k=count):
            start = text.find("\n", chooser.randrange(len(text) - CHARACTERS)) + 1
            piece = text[start : start + CHARACTERS]
            if not piece.strip():
                piece = text[:CHARACTERS]
            lines.write(json.dumps({"text": piece}) + "\n")


def main() -> int:
    """Parse the command line and write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="to write, JSON lines")
    parser.add_argument("--count", type=int, default=1000, help="pieces (default: 1000)")
    parser.add_argument("--seed", type=int, default=0, help="of the choice (default: 0)")
    parser.add_argument("--held-out", action="store_true", help="from the held-out files instead")
    args = parser.parse_args()
    write_seeds(args.file, args.count, args.seed, held_out=args.held_out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
