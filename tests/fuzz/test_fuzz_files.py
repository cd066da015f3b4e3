"""Files of every kind with hostile contents: read, or refused by a documented exception, in bounded time and memory."""

import argparse
import json

import pytest
from hostile import JSON, NESTED
from hypothesis import given, settings
from hypothesis import strategies as st
from limits import MIB, bounded

from medusa_decoding import Tree
from medusa_decoding.checkpoints.accuracies import read_accuracies
from medusa_decoding.cli import _arguments, chat
from medusa_decoding.cli.tree import find_shares
from medusa_decoding.decode.adaptive.step_times import StepTimes
from medusa_decoding.evaluation import read_prompts
from medusa_decoding.roofline.devices import read_device
from medusa_decoding.training import config_schema
from medusa_decoding.training.config import Config
from medusa_decoding.trees.calibration import Calibration

TREE = Tree([[0], [1], [0, 0]])
CALIBRATION = {
    "format": 2, "ranks": 2, "heads": 1, "positions": 4, "paths": {"0": 3, "1": 1}, "texts": None, "made": {},
}  # fmt: skip


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
    "step times": lambda path: StepTimes.from_json(path.read_bytes().decode("utf-8", "replace"), device="d", model="m"),
}
VALID = {
    "tree": {"choices": [[0], [1], [0, 0]], "lookup": 2, "keep": 3},
    "history": {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
    "prompts": {"turns": ["a", "b"], "category": "c", "question_id": 1},
    "accuracies": {"accuracies": [[0.5, 0.25], [0.5, 0.125]]},
    "calibration": CALIBRATION,
}


@pytest.mark.parametrize("reader", READERS)
def test_hostile_json_is_read_or_refused(reader, tmp_path):
    path = tmp_path / "hostile.jsonl" if reader == "prompts" else tmp_path / "hostile.json"
    for name, content in JSON.items():
        path.write_bytes(content)
        with bounded(ValueError, OSError, seconds=3, memory=128 * MIB) as said:
            READERS[reader](path)
        assert said or name not in NESTED, f"{reader} took {name}"


@pytest.mark.parametrize("reader", READERS)
def test_what_is_no_file_is_refused(reader, tmp_path):
    for path in (tmp_path, tmp_path / "missing", type(tmp_path)("/dev/zero"), tmp_path / ("x" * 5000)):
        if reader == "step times" or (reader, str(path)) == ("prompts", "/dev/zero"):
            continue  # given as text; lines of a device
        with bounded(ValueError, OSError, seconds=3, memory=200 * MIB) as said:
            READERS[reader](path)
        assert said


@pytest.mark.parametrize("kind", VALID)
@settings(max_examples=60, deadline=None, database=None)
@given(data=st.data())
def test_damaged_json_is_read_or_refused(kind, tmp_path_factory, data):
    """Bytes of a valid file changed, and values of it replaced by others."""
    path = tmp_path_factory.getbasetemp() / ("damaged.jsonl" if kind == "prompts" else "damaged.json")
    values = json.loads(json.dumps(VALID[kind]))
    if data.draw(st.booleans()):
        values[data.draw(st.sampled_from(sorted(values)))] = data.draw(
            st.recursive(
                st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
                lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner, max_size=3),
                max_leaves=6,
            )
        )
    content = bytearray(json.dumps(values).encode())
    for _ in range(data.draw(st.integers(0, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(bytes(content))
    with bounded(ValueError, OSError, seconds=2, memory=64 * MIB):
        READERS[kind](path)


@settings(max_examples=100, deadline=None, database=None)
@given(st.text(alphabet="ab:&*-[]{}?!|>'\"%@<# \n\t0129.~", max_size=40))
def test_any_yaml_is_read_or_refused(text):
    with bounded(ValueError, seconds=2, memory=64 * MIB):
        Config.of(config_schema.parse_yaml(text))
