"""Time operations in a captured graph with a cold cache, and measure the device's copy bandwidth.

The inputs that matter (caches, weights) exist in so many copies that none is still in the L2 when its turn comes again;
one CUDA graph holds one call per copy, so that neither Python nor launch gaps are measured. On a CPU the same calls run
in a timed loop: that exercises the benchmarks where there is no GPU. This file knows no operation and writes no record.
"""

from __future__ import annotations

import functools
import itertools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

Call = Callable[[], object]

COPY_BYTES = 4 * 2**30
"""Size of the buffer that the copy bandwidth is measured on; a quarter of the free memory where that is less."""

FLUSH = 4
"""How many times the L2 the copies of an input add up to."""

HOST_CACHE = 32 * 2**20
MOST_SETS = 256
MOST_CALLS = 4096
LEAST_MS = 1.5


@dataclass(frozen=True)
class Timing:
    """What one call costs.

    Attributes:
        median_us: median over replays of a replay's time by its number of calls.
        p10_us: 10th percentile over replays.
        p90_us: 90th percentile over replays.
        captured: whether the calls were replayed from a CUDA graph.
        calls: calls in one replay.
        replays: replays timed.
        sets: copies of the inputs that the calls went through in turn.
        note: why the calls were not captured; empty if they were.
    """

    median_us: float
    p10_us: float
    p90_us: float
    captured: bool
    calls: int
    replays: int
    sets: int
    note: str = ""


def l2_bytes(device: torch.device) -> int:
    """Return the size of the device's last cache (on a CPU a nominal one)."""
    return int(torch.cuda.get_device_properties(device).L2_cache_size) if device.type == "cuda" else HOST_CACHE


def sets_needed(bytes_a_set: int, device: torch.device) -> int:
    """Return how many copies of an input of this size make the cache cold for each.

    Two at least, unless one alone is far beyond any cache; 256 at most, where launches and not bytes are measured.
    """
    least = 1 if bytes_a_set > 64 * l2_bytes(device) else 2
    return min(MOST_SETS, max(least, math.ceil(FLUSH * l2_bytes(device) / max(1, bytes_a_set))))


def copy_bandwidth(device: torch.device, repeats: int = 30) -> float:
    """Return bytes per second of a copy within the device's memory, read and written bytes both counted (median)."""
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 8 * HOST_CACHE
    size = min(COPY_BYTES, free // 4)
    # Random data: constant memory may be faster to move. 2-byte elements are the cheapest to fill.
    source = torch.empty(size // 2, dtype=torch.bfloat16, device=device).normal_()
    target = torch.empty_like(source)
    moved = 2 * source.numel() * source.element_size()
    for _ in range(3):
        target.copy_(source)
    times = _times_ms(functools.partial(target.copy_, source), repeats, device)
    return moved / (statistics.median(times) / 1e3)


def cold_replay(
    make_call: Callable[[int], Call],
    sets: int,
    device: torch.device,
    *,
    seconds: float = 0.15,
    least_ms: float = LEAST_MS,
) -> Timing:
    """Time an operation: one call per copy of its inputs in turn, captured in a CUDA graph and replayed.

    Args:
        make_call: returns the call on copy i of the inputs. Its inputs must stay alive as long as the call does.
        sets: how many copies there are (see `sets_needed`).
        device: where the calls run.
        seconds: about how long to measure.
        least_ms: how long one replay lasts at least; the graph goes through the copies several times for that.

    Returns:
        The timing. Calls that cannot be captured are timed in an uncaptured loop, with `captured` False and the reason.

    Raises:
        torch.OutOfMemoryError: the calls or the graph do not fit; nothing is measured then.
        RuntimeError: a call itself fails.
    """
    calls = [make_call(i) for i in range(sets)]
    if device.type != "cuda":
        for call in calls:
            call()
        return _timing(_timed(lambda: _run(calls), len(calls), seconds, device), calls, 1, captured=False, note="a CPU")
    stream = torch.cuda.Stream(device)
    _on_stream(calls, stream)
    try:
        graph = _capture(calls, stream, 1)
        rounds = _rounds(min(_times_ms(graph.replay, 3, device)), len(calls), least_ms)
        if rounds > 1:
            graph = _capture(calls, stream, rounds)
        times = _timed(graph.replay, len(calls) * rounds, seconds, device)
        return _timing(times, calls, rounds, captured=True)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        # A device that no longer works raises here, and is the caller's to handle.
        torch.cuda.synchronize(device)
        why = f"not captured: {type(error).__name__}: {first_line(error)}"
    _on_stream(calls, stream)
    return _timing(_timed(lambda: _run(calls), len(calls), seconds, device), calls, 1, captured=False, note=why)


def release(device: torch.device) -> None:
    """Give cached memory back, so that the next case finds all of it."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, cut to 200 characters."""
    text = str(error).strip()
    return text.splitlines()[0][:200] if text else ""


def _on_stream(calls: Sequence[Call], stream: torch.cuda.Stream) -> None:
    """Run every call once on a side stream: compilation, handles and workspaces come before the capture."""
    stream.wait_stream(torch.cuda.current_stream(stream.device))
    with torch.cuda.stream(stream):
        _run(calls)
    torch.cuda.current_stream(stream.device).wait_stream(stream)
    torch.cuda.synchronize(stream.device)


def _capture(calls: Sequence[Call], stream: torch.cuda.Stream, rounds: int) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(rounds):
            _run(calls)
    graph.replay()
    torch.cuda.synchronize(stream.device)
    return graph


def _rounds(round_ms: float, calls: int, least_ms: float) -> int:
    wanted = math.ceil(least_ms / max(round_ms, 1e-3))
    return max(1, min(wanted, MOST_CALLS // calls))


def _run(calls: Sequence[Call]) -> None:
    for call in calls:
        call()


def _timed(run: Call, calls: int, seconds: float, device: torch.device) -> list[float]:
    """Return microseconds per call of each run, for about `seconds`."""
    trial = min(_times_ms(run, 2, device))
    repeats = max(7, min(50, int(seconds * 1e3 / max(trial, 1e-3))))
    if trial > 500:
        repeats = 3
    return [t * 1e3 / calls for t in _times_ms(run, repeats, device)]


def _times_ms(run: Call, repeats: int, device: torch.device) -> list[float]:
    """Return the duration of each of several runs, queued in sequence on a GPU."""
    if device.type != "cuda":
        marks = [time.perf_counter()]
        for _ in range(repeats):
            run()
            marks.append(time.perf_counter())
        return [(b - a) * 1e3 for a, b in itertools.pairwise(marks)]
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for start, end in events:
        start.record()
        run()
        end.record()
    torch.cuda.synchronize(device)
    return [start.elapsed_time(end) for start, end in events]


def _timing(times: Sequence[float], calls: Sequence[Call], rounds: int, *, captured: bool, note: str = "") -> Timing:
    ordered = sorted(times)
    last = len(ordered) - 1
    return Timing(
        median_us=statistics.median(ordered),
        p10_us=ordered[round(0.1 * last)],
        p90_us=ordered[round(0.9 * last)],
        captured=captured,
        calls=len(calls) * rounds,
        replays=len(ordered),
        sets=len(calls),
        note=note,
    )
