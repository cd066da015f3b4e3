"""Draws what `medusa demo` shows at a terminal: `python -m benchmarks.terminal_picture [--out FILE]`.

The picture is the demo's race at the moment when Medusa has written its answer. All generations are measured when the
picture is made, on this machine: the fastest of five each.
"""

from __future__ import annotations

import argparse
import io
import re
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console

from medusa_decoding import MedusaModel
from medusa_decoding.chat.template import prompt_encoder
from medusa_decoding.checkpoints import pretrained
from medusa_decoding.cli import _display, demo
from medusa_decoding.demo.requests import EXAMPLES

REQUEST = EXAMPLES[1]
WIDTH, HEIGHT = 144, 50
NEW_TOKENS = 128
REPEATS = 5


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, draw and write the picture."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("docs/figures/terminal.svg"), help="default: %(default)s")
    args = parser.parse_args(argv)
    console = Console(
        file=io.StringIO(), record=True, force_terminal=True, color_system="truecolor", width=WIDTH, height=HEIGHT
    )
    tokenizer = pretrained.load_tokenizer(demo.CHECKPOINT / "base")
    ids = torch.tensor([prompt_encoder(tokenizer, None, []).encode([{"role": "user", "content": REQUEST}])])
    base = pretrained.load_model(demo.CHECKPOINT / "base", dtype=torch.float32)
    with MedusaModel.from_pretrained(demo.CHECKPOINT / "heads", dtype="float32") as model:
        stored = demo.stored_tree(model, demo.CHECKPOINT / "heads")
        races = [demo.race(model, base, tokenizer, ids, NEW_TOKENS, stored) for _ in range(REPEATS)]
    runs = [min(same, key=lambda run: run.seconds) for same in zip(*races, strict=True)]
    race = _display.Race(console, runs)
    console.print(f"{REQUEST}\n", markup=False, highlight=False)
    console.print(race.picture(runs[-1].seconds, race.slower))
    svg = console.export_svg(title="medusa demo", unique_id="terminal")
    # Without fonts from other sites: readers' own monospaced font will do.
    args.out.write_text(re.sub(r"@font-face \{.*?\}", "", svg, flags=re.DOTALL), encoding="utf-8")


if __name__ == "__main__":
    main()
