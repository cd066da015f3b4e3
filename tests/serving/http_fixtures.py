"""The embedded demo model in float32, an engine of it, and a server that all tests of a session share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers import AutoTokenizer

from medusa_decoding.chat.template import ChatTemplate
from medusa_decoding.demo import CHECKPOINT
from medusa_decoding.model import MedusaModel
from medusa_decoding.serving.engine import Engine
from medusa_decoding.trees.tree import Tree

if TYPE_CHECKING:
    from http_server import Live


@pytest.fixture(scope="session")
def demo() -> MedusaModel:
    # "auto" would choose by this machine's step times.
    return MedusaModel.from_pretrained(CHECKPOINT / "heads", dtype=torch.float32, tree=Tree.cartesian([3, 2, 1]))


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(CHECKPOINT / "base")


@pytest.fixture(scope="session")
def encoder(tokenizer: Any) -> ChatTemplate:
    return ChatTemplate(tokenizer)


@pytest.fixture(scope="session")
def demo_engine(demo: MedusaModel) -> Iterator[Engine]:
    with Engine(demo, slots=4, queue=16) as engine:
        yield engine


@pytest.fixture(scope="session")
def server(demo_engine: Engine, encoder: ChatTemplate) -> Iterator[Live]:
    from http_server import live  # needs the server's packages, which a GPU machine may lack

    with live(demo_engine, encoder) as running:
        yield running
