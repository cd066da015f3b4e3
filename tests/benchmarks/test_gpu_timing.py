"""The timing of captured calls on a simulated device (a clock that calls advance), and the harness around it."""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from benchmarks import gpu, harness, suite

CUDA = torch.device("cuda")


class Device:
    """Replaces torch.cuda: calls advance a clock, and within a capture they are recorded instead."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clock_ms = 0.0
        self.capturing: list[Callable[[], None]] | None = None
        self.allows_capture = True
        self.graphs: list[list[Callable[[], None]]] = []
        device = self

        class Graph:
            def replay(self) -> None:
                for call in self.calls:  # type: ignore[attr-defined]
                    call()

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                self.at = 0.0

            def record(self) -> None:
                self.at = device.clock_ms

            def elapsed_time(self, other: Event) -> float:
                return other.at - self.at

        @contextlib.contextmanager
        def graph(target: Any, stream: Any) -> Iterator[None]:
            device.capturing = []
            try:
                if not device.allows_capture:
                    raise RuntimeError("operation not permitted when stream is capturing\nand more")
                yield
                target.calls = device.capturing
                device.graphs.append(target.calls)
            finally:
                device.capturing = None

        stream = types.SimpleNamespace(wait_stream=lambda other: None, device=CUDA)
        for name, stand_in in {
            "Stream": lambda where: stream,
            "stream": lambda stream: contextlib.nullcontext(),
            "current_stream": lambda where: stream,
            "synchronize": lambda where=None: None,
            "CUDAGraph": Graph,
            "graph": graph,
            "Event": Event,
            "get_device_properties": lambda where: types.SimpleNamespace(L2_cache_size=1000),
        }.items():
            monkeypatch.setattr(torch.cuda, name, stand_in)

    def work(self, ms: float) -> None:
        def done() -> None:
            self.clock_ms += ms

        if self.capturing is not None:
            self.capturing.append(done)
        else:
            self.clock_ms += ms + 1.0  # an uncaptured call also pays for its launch


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    return Device(monkeypatch)


def test_a_replay_goes_through_all_copies_several_times(device: Device) -> None:
    # Three copies of 0.1 ms: a replay of at least 1 ms needs four rounds.
    timing = gpu.cold_replay(lambda i: lambda: device.work(0.1), 3, CUDA, least_ms=1.0)
    assert timing.captured
    assert (timing.sets, timing.calls) == (3, 12)
    assert [len(calls) for calls in device.graphs] == [3, 12]
    assert timing.median_us == pytest.approx(100)
    assert timing.p10_us == pytest.approx(100)


def test_calls_that_cannot_be_captured_are_timed_in_a_loop(device: Device) -> None:
    device.allows_capture = False
    timing = gpu.cold_replay(lambda i: lambda: device.work(0.5), 2, CUDA)
    assert not timing.captured
    assert timing.note == "not captured: RuntimeError: operation not permitted when stream is capturing"
    assert timing.median_us == pytest.approx(1500)


@pytest.mark.parametrize(("size", "sets"), [(10, 256), (1000, 4), (1001, 4), (3000, 2), (64_000, 2), (64_001, 1)])
def test_copies_exceed_four_times_the_cache(device: Device, size: int, sets: int) -> None:
    assert gpu.sets_needed(size, CUDA) == sets


class Line:
    """A case of the tests below."""

    def __init__(self, name: str) -> None:
        self.name = name

    def shapes(self) -> dict[str, Any]:
        return {"name": self.name}


def a_run(**settings: Any) -> suite.Run:
    return suite.Run("op", torch.device("cpu"), dtype=torch.float32, seconds=0.001, copy=2e9, **settings)


def test_a_record_has_bandwidth_and_its_fraction(results: Any) -> None:
    timing = gpu.Timing(4.0, 3.0, 5.0, captured=True, calls=6, replays=7, sets=2)
    a_run().write_timing(Line("x"), "mine", timing, bytes=4000, flop=8_000_000, served_by="triton")
    [record] = results.records()
    # 4,000 bytes in 4 us are 1 GB/s, half of the copy's 2; 8 MFLOP in 4 us are 2 TFLOP/s.
    expected = {
        "benchmark": "op", "op": "op", "shapes": {"name": "x"}, "dtype": "float32", "implementation": "mine",
        "bytes": 4000, "flop": 8_000_000, "median_us": 4.0, "p10_us": 3.0, "p90_us": 5.0, "gb_per_s": 1.0,
        "fraction": 0.5, "tflop_per_s": 2.0, "captured": True, "served_by": "triton", "copy_gb_per_s": 2.0,
    }  # fmt: skip
    assert expected.items() <= record.items()
    assert {"machine", "versions", "commit", "command", "date"} <= record.keys()


@pytest.mark.parametrize("error", [0.2, float("nan")])
def test_a_wrong_peer_is_recorded(results: Any, error: float) -> None:
    assert not a_run().agrees(Line("x"), "peer", error, 0.1)
    assert results.records()[0]["wrong"] is True


def test_ways_run_in_turn_in_changing_order() -> None:
    called: list[str] = []
    ways = {name: lambda item, name=name: called.append(name) or item for name in "abc"}
    found = harness.interleaved(ways, [1, 2, 3, 4], rounds=2)
    turns = [tuple(called[i : i + 3]) for i in range(0, 24, 3)]
    assert all(set(turn) == set("abc") for turn in turns)
    assert len(set(turns)) > 2
    assert [[units for units, _ in samples] for samples in found.values()] == [[2, 4, 6, 8]] * 3


def test_ratio_of_rates_by_hand() -> None:
    # 8 and 4 units in 1 second each, against the same in 4 and 1 seconds; half of the resamples draw one input twice.
    found = harness.ratio([(8, 1.0), (4, 1.0)], [(8, 4.0), (4, 1.0)])
    assert (found["ratio"], found["low"], found["high"]) == ((12 / 2) / (12 / 5), 1.0, 4.0)
    assert (found["median_of_inputs"], found["p10_of_inputs"], found["p90_of_inputs"]) == (2.5, 1.0, 4.0)


def test_a_record_names_the_command_without_folders(results: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/at/benchmarks/variants/__main__.py", "--out=/home/me/runs", "--n", "8"])
    harness.write_record("some", {"files": ["/home/me/prompts.jsonl", "runs/heads"]})
    [record] = results.records()
    assert record["command"] == "python -m benchmarks.variants --out=runs --n 8"
    assert record["files"] == ["prompts.jsonl", "runs/heads"]
