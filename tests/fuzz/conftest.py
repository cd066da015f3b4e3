"""Hostile input to every entry point; models and command lines are those of the other tests."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "decode"))
