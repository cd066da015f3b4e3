"""The list of faults fits the checkout; `make faults`, which applies them, takes half an hour."""

import shlex
from pathlib import Path

import pytest

from tests.faults.run import ROOT, read

LISTS = sorted(Path(__file__).parent.glob("*.yaml"))


@pytest.mark.parametrize("path", LISTS, ids=lambda path: path.stem)
def test_every_fault_has_its_place_and_its_test(path):
    for fault in read([path]):
        fault.broken()
        for test in [word for word in shlex.split(fault.test) if "::" in word]:
            file, *_, name = test.partition("[")[0].split("::")
            assert f"def {name}(" in (ROOT / file).read_text(encoding="utf-8"), test
