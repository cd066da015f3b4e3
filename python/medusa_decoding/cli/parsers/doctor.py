"""Check the installation: versions, devices, and every op.

The report says which implementation serves each op and why, and compares each op with its reference. Exit code 1 if an
op fails its check.

    medusa doctor
    medusa doctor --json
    medusa doctor --model HEADS
"""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--model", help="heads or a model: also say how its layers run here, and why")
