"""Write pieces of the standard library as a file of plain texts: prompts to continue, or whole files to learn.

    python -m recipes.demo.seeds runs/demo/seeds.jsonl --count 1200
    python -m recipes.demo.seeds runs/demo-model/text.jsonl --whole

They come from the training side of the corpus, so that nothing of the held-out files is seen.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from recipes.demo import corpus

CHARACTERS = 1200
"""Length of a piece: nearly always more than 128 of the demo model's tokens."""


def write_seeds(
    file: Path, count: int | None, seed: int = 0, *, held_out: bool = False, names: Sequence[str] | None = None
) -> None:
    """Write pieces that begin at a line's start, drawn from the files in proportion to their lengths.

    Args:
        file: JSON lines of `text`.
        count: number of pieces; None writes every file as a whole instead.
        seed: of the choice.
        held_out: take them from the held-out side instead.
        names: take them from these files only.

    Raises:
        ValueError: a count below 1.
    """
    if count is not None and count < 1:
        raise ValueError(f"count: expected at least 1, got {count}")
    split = corpus.split()
    chosen = (split.held_out if held_out else split.train) if names is None else names
    texts = [split.read(name) for name in chosen]
    file.parent.mkdir(parents=True, exist_ok=True)
    with open(file, "w", encoding="utf-8") as lines:
        for text in texts if count is None else _pieces(texts, count, random.Random(seed)):
            lines.write(json.dumps({"text": text}) + "\n")


def _pieces(texts: list[str], count: int, chooser: random.Random) -> Iterator[str]:
    long = [text for text in texts if len(text) > 2 * CHARACTERS]
    for text in chooser.choices(long, weights=[len(text) for text in long], k=count):
        start = text.find("\n", chooser.randrange(len(text) - CHARACTERS)) + 1
        piece = text[start : start + CHARACTERS]
        yield piece if piece.strip() else text[:CHARACTERS]


def main() -> int:
    """Write the file that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="to write, JSON lines")
    parser.add_argument("--count", type=int, default=1000, help="pieces (default: 1000)")
    parser.add_argument("--whole", action="store_true", help="every file as a whole instead of pieces")
    parser.add_argument("--seed", type=int, default=0, help="of the choice (default: 0)")
    parser.add_argument("--held-out", action="store_true", help="from the held-out files instead")
    args = parser.parse_args()
    write_seeds(args.file, None if args.whole else args.count, args.seed, held_out=args.held_out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
