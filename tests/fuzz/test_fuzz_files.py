"""Files of every kind with hostile contents: read, or refused by a documented exception, in bounded memory."""

import argparse

import pytest
from hostile import JSON, NESTED
from hypothesis import given, settings
from hypothesis import strategies as st
from limits import MIB, bounded

from benchmarks.simulator.devices import read_device
from medusa_decoding import Tree
from medusa_decoding.checkpoints.accuracies import read_accuracies
from medusa_decoding.cli import _arguments, chat
from medusa_decoding.cli.tree import find_shares
from medusa_decoding.decode.adaptive.step_times import StepTimes
from medusa_decoding.evaluation import read_prompts
from medusa_decoding.files import read_json
from medusa_decoding.training import config_schema
from medusa_decoding.training.config import Config
from medusa_decoding.tuning.calibration import Calibration

TREE = Tree([[0], [1], [0, 0]])


def tree_argument(path):
    try:
        _arguments.tree(str(path))
    except argparse.ArgumentTypeError as error:
        raise ValueError(str(error)) from error


READERS = {
    "tree": Tree.load,
    "tree argument": tree_argument,
    "history": chat.load,
    "prompts": lambda path: read_prompts([path]),
    "accuracies": read_accuracies,
    "calibration": Calibration.load,
    "shares": lambda path: find_shares(TREE, path),
    "device": read_device,
    "step times": lambda path: StepTimes.from_json(read_json(path), device="d", model="m"),
}


@pytest.mark.parametrize("reader", READERS)
def test_hostile_json_is_read_or_refused(reader, tmp_path):
    path = tmp_path / "hostile.jsonl" if reader == "prompts" else tmp_path / "hostile.json"
    for name, content in JSON.items():
        path.write_bytes(content)
        with bounded(ValueError, OSError, memory=128 * MIB) as said:
            READERS[reader](path)
        assert said or name not in NESTED, f"{reader} took {name}"


@settings(max_examples=60, deadline=None, database=None)
@given(st.text(alphabet="ab:&*-[]{}?!|>'\"%@<# \n\t0129.~", max_size=40))
def test_any_yaml_is_read_or_refused(text):
    with bounded(ValueError, memory=64 * MIB):
        Config.of(config_schema.parse_yaml(text))
