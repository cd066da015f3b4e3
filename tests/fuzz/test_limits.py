"""The bounds themselves: each of them can fail."""

import time

import pytest
from limits import MIB, bounded


def busy(seconds):
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass


def test_a_documented_exception_passes_and_its_message_is_kept():
    with bounded(ValueError) as said:
        raise ValueError("name: expected this, got that")
    assert said == ["name: expected this, got that"]


def test_another_exception_fails():
    with pytest.raises(pytest.fail.Exception, match="expected ValueError, got KeyError"), bounded(ValueError):
        {}["missing"]


def test_an_exception_without_a_message_fails():
    with pytest.raises(pytest.fail.Exception, match="without a message"), bounded(ValueError):
        raise ValueError


def test_time_beyond_the_bound_fails():
    with pytest.raises(pytest.fail.Exception, match="CPU seconds"), bounded(seconds=0.05):
        busy(0.2)


def test_memory_beyond_the_bound_fails():
    with pytest.raises(pytest.fail.Exception, match="MiB more"), bounded(memory=16 * MIB):
        bytearray(b"x") * (64 * MIB)
