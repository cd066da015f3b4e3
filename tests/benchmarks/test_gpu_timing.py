"""The timing of captured calls on a simulated device (a clock that calls advance), and the harness around it."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from benchmarks import gpu, harness, suite

CUDA = torch.device("cuda")
CPU = torch.device("cpu")


class Device:
    """Replaces torch.cuda: calls advance a clock, and within a capture they are recorded instead."""

    def __init__(self) -> None:
        self.clock_ms = 0.0
        self.capturing: list[Callable[[], None]] | None = None
        self.allows_capture = True
        self.alive = True
        self.graphs: list[list[Callable[[], None]]] = []
        self.on_side_stream = False
        self.warmed_up = 0

    def work(self, ms: float) -> None:
        def done() -> None:
            self.clock_ms += ms

        if self.capturing is not None:
            self.capturing.append(done)
        else:
            self.warmed_up += self.on_side_stream
            # An uncaptured call also pays for its launch.
            self.clock_ms += ms + 1.0

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
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

        @contextlib.contextmanager
        def on_stream(stream: Any) -> Iterator[None]:
            device.on_side_stream = True
            yield
            device.on_side_stream = False

        def synchronize(where: Any = None) -> None:
            if not device.alive:
                raise RuntimeError("CUDA error: an illegal memory access was encountered")

        stream = types.SimpleNamespace(wait_stream=lambda other: None, device=CUDA)
        for name, stand_in in {
            "Stream": lambda where: stream,
            "stream": on_stream,
            "current_stream": lambda where: stream,
            "synchronize": synchronize,
            "CUDAGraph": Graph,
            "graph": graph,
            "Event": Event,
            "get_device_properties": lambda where: types.SimpleNamespace(L2_cache_size=1000),
        }.items():
            monkeypatch.setattr(torch.cuda, name, stand_in)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    simulated = Device()
    simulated.install(monkeypatch)
    return simulated


def test_a_replay_goes_through_all_copies_several_times(device: Device) -> None:
    # Three copies of 0.1 ms: a replay of at least 1 ms needs four rounds.
    timing = gpu.cold_replay(lambda i: lambda: device.work(0.1), 3, CUDA, least_ms=1.0)
    assert timing.captured
    assert (timing.sets, timing.calls) == (3, 12)
    assert device.warmed_up == 3
    assert [len(calls) for calls in device.graphs] == [3, 12]
    assert timing.median_us == pytest.approx(100)
    assert timing.p10_us == pytest.approx(100)


def test_copies_take_turns(device: Device) -> None:
    order: list[int] = []

    def make(i: int) -> Callable[[], None]:
        def call() -> None:
            if device.capturing is not None:
                order.append(i)
            device.work(1.0)

        return call

    gpu.cold_replay(make, 3, CUDA, least_ms=6.0)
    assert order == [0, 1, 2] + [0, 1, 2] * 2


def test_calls_that_cannot_be_captured_are_timed_in_a_loop(device: Device) -> None:
    device.allows_capture = False
    timing = gpu.cold_replay(lambda i: lambda: device.work(0.5), 2, CUDA)
    assert not timing.captured
    assert timing.note == "not captured: RuntimeError: operation not permitted when stream is capturing"
    assert timing.median_us == pytest.approx(1500)


def test_a_lost_device_is_not_timed_in_a_loop(device: Device) -> None:
    def call() -> None:
        if device.capturing is not None:
            device.alive = False
            raise RuntimeError("lost")

    with pytest.raises(RuntimeError, match="illegal memory access"):
        gpu.cold_replay(lambda i: call, 1, CUDA)


def test_out_of_memory_is_raised(device: Device) -> None:
    def call() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        gpu.cold_replay(lambda i: call, 1, CUDA)


@pytest.mark.parametrize(("size", "sets"), [(10, 256), (1000, 4), (1001, 4), (3000, 2), (64_000, 2), (64_001, 1)])
def test_copies_exceed_four_times_the_cache(device: Device, size: int, sets: int) -> None:
    assert gpu.sets_needed(size, CUDA) == sets


def test_quantiles() -> None:
    timing = gpu._timing([float(t) for t in range(11, 0, -1)], [lambda: None] * 2, 3, captured=True)
    assert (timing.p10_us, timing.median_us, timing.p90_us, timing.calls) == (2, 6, 10, 6)


class Line:
    """A case of the tests below."""

    def __init__(self, name: str) -> None:
        self.name = name

    def shapes(self) -> dict[str, Any]:
        return {"name": self.name}


def a_run(**settings: Any) -> suite.Run:
    return suite.Run("op", CPU, dtype=torch.float32, seconds=0.001, copy=2e9, **settings)


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


def test_one_failure_is_recorded_and_the_rest_goes_on(results: Any) -> None:
    def measure(case: Line, run: suite.Run) -> None:
        if case.name == "big":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")
        run.time(case, "mine", lambda i: lambda: None, 1, bytes=1)

    suite.go(a_run(), [Line("big"), Line("small")], measure)
    big, small = results.records()
    assert big["skipped"].startswith("out of memory")
    assert small["captured"] is False
    assert small["median_us"] > 0


def test_cases_beyond_the_budget_are_named(results: Any) -> None:
    run = a_run(budget=1000.0)

    def measure(case: Line, run: suite.Run) -> None:
        run.budget = -1.0

    suite.go(run, [Line("a"), Line("b"), Line("c")], measure)
    assert results.records()[-1]["not_reached"] == [{"name": "b"}, {"name": "c"}]


def test_a_lost_device_ends_the_run(results: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(case: Line, run: suite.Run) -> None:
        monkeypatch.setattr(torch, "zeros", lambda *args, **kwargs: 1 / 0)
        raise RuntimeError("an illegal memory access")

    with pytest.raises(suite.DeviceLostError, match="illegal memory access"):
        suite.go(a_run(), [Line("a"), Line("b")], measure)
    assert results.records()[0]["skipped"] == "RuntimeError: an illegal memory access"
    assert results.records()[-1]["not_reached"] == [{"name": "b"}]


@pytest.mark.parametrize("error", [0.2, float("nan")])
def test_a_wrong_peer_is_recorded(results: Any, error: float) -> None:
    assert not a_run().agrees(Line("x"), "peer", error, 0.1)
    assert results.records()[0]["wrong"] is True


def test_summary_names_our_time_and_the_peers_ratios() -> None:
    run = a_run()
    for name, us in (("slow", 12.0), ("medusa_kernels", 4.0), ("near", 5.0)):
        timing = gpu.Timing(us, us, us, captured=True, calls=1, replays=1, sets=1)
        run.write_timing(Line("x"), name, timing, bytes=4000)
    run.skip(Line("x"), "absent", "not installed")
    assert suite.summary(run.records) == ["x: 4.0 us 50%, near 1.25 x, slow 3.00 x"]


def test_by_rank_puts_the_fronts_of_all_axes_first() -> None:
    got = [(c["x"], c["y"]) for c in suite.by_rank({"x": (1, 2, 3), "y": "ab"})]
    assert got[:3] == [(1, "a"), (1, "b"), (2, "a")]
    assert got[-1] == (3, "b")
    assert len(set(got)) == 6


def test_machine_slug() -> None:
    assert harness.machine_slug({"name": "NVIDIA H200"}) == "nvidia-h200"
    assert harness.machine_slug({"name": "AMD EPYC", "isa": "AVX2"}) == "amd-epyc-avx2"


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
