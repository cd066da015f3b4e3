"""The plain loop that our trainer is timed against has its losses: it is written without this package's losses."""

import pytest

from benchmarks.training_step import WAYS, Size, measure


@pytest.mark.parametrize("way", WAYS)
def test_the_plain_loop_has_the_trainer_s_losses(way):
    found = measure("tiny", Size(64, 96, 2, 1, 128, 32, 3), way, "float32", 2, compiled=False)
    assert found["loss_difference"] < 1e-5
    assert found["ours_s"] > 0
