"""Fixtures for the tests of training."""

import pytest

from medusa_decoding.training.loop import card


@pytest.fixture(scope="module")
def without_plots():
    """Skip the plot of model cards: drawing takes as long as the rest of a short run. The card's own tests draw it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(card, "_plot", lambda facts, path: None)
        yield
