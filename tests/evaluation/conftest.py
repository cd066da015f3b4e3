"""Tiny models with letters for tokens: of the decode tests' families, with the command line tests' tokenizers."""

import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
sys.path += [str(TESTS / "decode"), str(TESTS / "cli")]


@pytest.fixture
def make():
    """Build (model with heads, tokenizer): `make(template=..., seed=.., **of the model)`; undone at the end."""
    from chats import chat_tokenizer
    from models import heads_for, tiny

    from medusa_decoding import MedusaModel, Tree

    made = []

    def build(template=None, tree=None, heads=None, **overrides):
        tokenizer = chat_tokenizer([], template)
        settings = {"vocab_size": len(tokenizer), "max_position_embeddings": 512} | overrides
        base = tiny(**settings)
        model = MedusaModel(base, heads_for(base) if heads is None else heads(base), tree or Tree.chain(2))
        made.append(model)
        return model, tokenizer

    yield build
    for model in made:
        model.undo()
