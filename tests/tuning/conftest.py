"""Tiny models with letters for tokens: of the decode tests' families, with the command line tests' tokenizers."""

import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
sys.path += [str(TESTS / "decode"), str(TESTS / "cli")]


@pytest.fixture(scope="module")
def make():
    """Build (model with heads, tokenizer): `make(template=..., heads=3, **of the base model)`; undone at the end."""
    from chats import chat_tokenizer
    from models import heads_for, tiny

    from medusa_decoding import MedusaModel, Tree

    made = []

    def build(template=None, heads=3, **overrides):
        tokenizer = chat_tokenizer([], template)
        base = tiny(**({"vocab_size": len(tokenizer), "max_position_embeddings": 256} | overrides))
        model = MedusaModel(base, heads_for(base, heads), Tree.chain(2))
        made.append(model)
        return model, tokenizer

    yield build
    for model in made:
        model.undo()
