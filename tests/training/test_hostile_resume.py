"""Resuming from a damaged output folder: a ValueError that names the file, and never different heads."""

import json
import random
import re
import shutil
from pathlib import Path

import pytest
import torch
import workshop
from limits import MIB, bounded

from medusa_decoding.training.loop import saving
from medusa_decoding.training.loop.run import train

pytestmark = pytest.mark.usefixtures("without_plots")


@pytest.fixture(scope="module")
def trained(tmp_path_factory, without_plots):
    """A run up to a checkpoint that has the best weights in a file of their own."""
    folder = tmp_path_factory.mktemp("trained")
    base, data = workshop.make_base(folder / "base"), workshop.make_data(folder / "data.jsonl")
    config = workshop.config(folder / "run", base, data, output={"keep_checkpoints": 9})
    train(config)
    for later in ("heads", "checkpoints/step-000006"):
        shutil.rmtree(folder / "run" / later)
    shutil.copytree(folder / "run", folder / "kept")
    return config


@pytest.fixture
def run(trained):
    """The run's configuration, and its newest checkpoint in a fresh copy of its folder."""
    folder = Path(trained.output.folder)
    shutil.rmtree(folder)
    shutil.copytree(folder.with_name("kept"), folder)
    return trained, max((folder / "checkpoints").iterdir())


def flipped(checkpoint):
    """Change one bit of one weight, which torch reads without an error."""
    file = checkpoint / saving.WEIGHTS
    weights = torch.load(file, weights_only=True)
    stored = max(weights.values(), key=torch.numel).numpy().tobytes()
    content = bytearray(file.read_bytes())
    content[content.index(stored) + len(stored) // 2] ^= 1
    file.write_bytes(content)


def older(checkpoint):
    """Exchange the weights for those of an earlier checkpoint: right names and shapes, another step's values."""
    shutil.copy(min(checkpoint.parent.iterdir()) / saving.WEIGHTS, checkpoint / saving.WEIGHTS)


def stated(**changes):
    """Write another state, with the digest of it."""

    def damage(checkpoint):
        state = json.loads((checkpoint / saving.STATE).read_text()) | changes
        saving._write_state(checkpoint, {key: value for key, value in state.items() if key not in ("digest", "files")})

    return damage


DAMAGES = {
    "state {}": (lambda checkpoint: (checkpoint / saving.STATE).write_text("{}"), "no digest"),
    "state []": (lambda checkpoint: (checkpoint / saving.STATE).write_text("[]"), "expected a JSON object"),
    "no state": (lambda checkpoint: (checkpoint / saving.STATE).unlink(), "No such file"),
    "no weights": (lambda checkpoint: (checkpoint / saving.WEIGHTS).unlink(), "weights.pt"),
    "no tensors": (lambda checkpoint: (checkpoint / saving.WEIGHTS).write_text("none"), "weights.pt: "),
    "one bit": (flipped, "weights.pt: another checksum"),
    "another checkpoint's weights": (older, "weights.pt: not the file"),
    "rows": (stated(rows=1), "got one of 1"),
    "divided": (stated(sharded=True), "expected whole weights"),
    "config": (stated(config="[" * 5), "state.json: config: "),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_checkpoint_is_refused(run, name):
    config, checkpoint = run
    damage, words = DAMAGES[name]
    damage(checkpoint)
    with pytest.raises(ValueError, match=re.escape(words)) as error:
        train(config, resume=True)
    heads = Path(config.output.folder) / "heads"
    assert not heads.exists()
    if name == "state {}":
        assert f"{checkpoint}: " in str(error.value)
        assert "remove this folder to go on from the one before it" in str(error.value)
        shutil.rmtree(checkpoint)
        train(config, resume=True)
        assert heads.is_dir()


@pytest.mark.parametrize("name", [saving.STATE, saving.WEIGHTS, saving.OPTIMISER, saving.BEST])
def test_any_changed_byte_is_refused_or_has_no_effect(run, name):
    """Bytes between the records of a file have no meaning; data that is read must equal what was written."""
    _, checkpoint = run
    checkpoints = saving.Checkpoints(checkpoint.parent, 1)
    file, random_ones = checkpoint / name, random.Random(name)
    content = file.read_bytes()
    expected = read(checkpoints, checkpoint)
    refused = 0
    for number in range(150):
        mutated = bytearray(content)
        for _ in range(random_ones.choice((1, 1, 3))):
            mutated[random_ones.randrange(len(content))] = random_ones.randrange(256)
        if number % 10 == 0:
            mutated = mutated[: random_ones.randrange(len(content))]
        file.write_bytes(mutated)
        with bounded(ValueError, seconds=5, memory=64 * MIB) as said:
            assert repr(read(checkpoints, checkpoint)) == repr(expected)
        refused += bool(said)
        assert not said or str(checkpoint) in said[0]
    assert refused > 50


def read(checkpoints, path):
    state = saving.read_state(path)
    weights, optimiser, best = checkpoints.load(path, state)
    sums = [(name, value.sum()) for part in (weights, best) for name, value in part.items()]
    return [state, sums, optimiser["schedule"]]
