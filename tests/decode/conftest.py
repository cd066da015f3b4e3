"""A tiny model, heads for it and a tokenizer, for the tests of `generate`."""

import pytest
from calls import one_letter_per_token
from models import heads_for, tiny


@pytest.fixture
def model():
    return tiny()


@pytest.fixture
def heads(model):
    return heads_for(model)


@pytest.fixture(scope="session")
def tokenizer():
    return one_letter_per_token()
