"""Devices from files, what is refused of them, and a device that is measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.simulator.devices import Attained, Device, read_device
from benchmarks.simulator.shapes import find_shape

GOOD = {"name": "mine", "flops": 1e12, "bandwidth": 1e11}


def test_a_short_file_has_the_ideal_rooflines_defaults(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(GOOD | {"linear": {"bandwidth": 0.5}}))
    device = read_device(path)
    assert device == Device("mine", 1e12, 1e11, linear=Attained(bandwidth=0.5))
    assert device.attention == Attained(1.0, 1.0, 0.0, 1)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"name": "x", "flops": 1e12}, "bandwidth: Field required"),
        (GOOD | {"bandwith": 1}, "bandwith: Unexpected keyword argument, got 1"),
        (GOOD | {"flops": 0}, "flops: Input should be greater than 0, got 0"),
        (GOOD | {"dtype": "int8"}, "dtype: Input should be 'float32', 'bfloat16' or 'float16', got 'int8'"),
        (GOOD | {"linear": {"bandwidth": 1.5}}, "linear.bandwidth: Input should be less than or equal to 1, got 1.5"),
    ],
)
def test_what_is_no_device_is_refused_by_name(tmp_path: Path, values: Any, message: str) -> None:
    path = tmp_path / "bad.json"
    path.write_text(json.dumps(values))
    with pytest.raises(ValueError, match=message) as caught:
        read_device(path)
    assert str(caught.value).startswith(str(path))


def test_shapes_of_a_folder(tmp_path: Path) -> None:
    config = {
        "model_type": "mistral", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 100,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    shape = find_shape(str(tmp_path))
    assert (shape.hidden, shape.intermediate, shape.layers, shape.heads) == (32, 48, 2, 4)
    assert (shape.kv_heads, shape.head_dim, shape.vocabulary) == (2, 8, 100)
