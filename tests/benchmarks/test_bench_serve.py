"""benchmarks.bench_serve: small loads on real servers, and the figures that are made of them."""

import sys

import pytest

from benchmarks import bench_serve
from benchmarks.bench_serve import Cell
from benchmarks.serve_load import Answer

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
pytest.importorskip("httpx")


def answer(request, began, times, text="abcd", tokens=8):
    size = len(text) // len(times)
    return Answer(request, began, [(time, size) for time in times], times[-1], text, tokens)


def test_a_cell_counts_what_arrived_in_its_seconds():
    cell = Cell(seconds=10.0)
    cell.add(10.0, [answer("a", 0.0, [1.0, 2.0]), answer("b", 2.0, [4.0, 12.0]), answer("c", 9.0, [10.5])])
    cell.add(110.0, [answer("d", 101.0, [103.0])])
    figures = cell.figures()
    assert figures["tokens_per_second_of_rounds"] == [1.2, 0.8]
    assert figures["tokens_per_second"] == pytest.approx(1.0)
    assert figures["requests_per_second"] == pytest.approx(2.5 / 20)
    assert figures["answers"] == 4
    assert figures["latency"]["p50"] == pytest.approx(2.0)
    assert figures["first_token"]["p50"] == pytest.approx((1.5 + 2.0) / 2)
    assert figures["latency"]["p50"] < figures["latency"]["p90"] < figures["latency"]["p99"] <= 10.0


@pytest.mark.slow
def test_servers_write_the_same_texts_under_load(results, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["bench_serve", "--servers", "medusa", "plain", "--clients", "1", "3",
                                      "--seconds", "0.5", "--rounds", "2", "--threads", "1"])  # fmt: skip
    bench_serve.main()
    [record] = results.records()
    assert record["benchmark"] == "serve-demo"
    for of in record["clients"].values():
        assert all(of[name]["tokens_per_second"] > 0 < of[name]["answers"] for name in ("medusa", "plain"))
    assert all(pair["compared"] == pair["same"] > 0 for pair in record["same_text"].values())


def test_the_engine_is_compared_with_the_loop():
    found = bench_serve.measure_scheduler(3)
    assert found["trees"].keys() == {"plain", "8 nodes"}
    for figures in found["trees"].values():
        ratio = figures["engine_over_loop_seconds"]
        assert 0 < ratio["low"] <= ratio["ratio"] <= ratio["high"]
        assert figures["seconds_per_step"]["loop"] > 0
    assert found["trees"]["8 nodes"]["steps"] < found["trees"]["plain"]["steps"]
