"""The tiny models of the tests of `generate`, and engines of them."""

import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
sys.path += [str(TESTS / "decode"), str(TESTS / "cli")]

from http_fixtures import demo, demo_engine, encoder, server, tokenizer  # noqa: E402, F401  (fixtures for all tests)
