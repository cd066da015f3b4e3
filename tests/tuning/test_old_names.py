"""Modules under the names that they had in 0.3."""

from __future__ import annotations

import importlib

import pytest


@pytest.mark.parametrize(
    ("old", "new", "name"),
    [
        ("trees.search", "search", "walked_tree"),
        ("trees.replay", "replay", "walk"),
        ("trees.calibration", "calibration", "Calibration"),
        ("calibration.collect", "collect", "calibrate"),
        ("calibration.expected", "expected", "expect"),
    ],
)
def test_old_names_give_the_same_object_and_a_warning(old: str, new: str, name: str) -> None:
    module = importlib.import_module(f"medusa_decoding.{old}")
    with pytest.warns(DeprecationWarning, match=f"{old} is medusa_decoding.tuning.{new} now"):
        found = getattr(module, name)
    assert found is getattr(importlib.import_module(f"medusa_decoding.tuning.{new}"), name)
    with pytest.warns(DeprecationWarning, match=old), pytest.raises(AttributeError, match="missing"):
        _ = module.missing
