"""Models and calls are those of tests/decode."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "decode"))
