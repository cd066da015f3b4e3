"""Figures from made-up records: which records count, and that every figure is drawn with its labels."""

from __future__ import annotations

import builtins
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import (
    bench_heads_topk,
    bench_kv_compact,
    bench_rope_append,
    bench_tree_attention,
    bench_tree_verify,
    plot,
)

SOURCE = {
    "machine": {"name": "Some GPU"},
    "versions": {"torch": "2.11", "triton": "3.6"},
    "commit": "abc123",
    "date": "2026-01-02",
}


def record(benchmark: str, shapes: dict[str, Any], implementation: str, us: float) -> dict[str, Any]:
    timing = {"median_us": us, "bytes": 4_000_000, "fraction": 1 / us, "copy_gb_per_s": 4000.0}
    return {
        "benchmark": benchmark, "shapes": shapes, "dtype": "bfloat16", "implementation": implementation,
    } | timing | SOURCE  # fmt: skip


def step(way: str, us: float, **more: Any) -> dict[str, Any]:
    case = {"model": "Llama-2-7B", "way": way, "nodes": 1, "heads": None, "prefix": 1024, "batch": 1} | more
    timing = {"median_us": us, "bytes": 13_200_000_000, "fraction": 0.8, "ratio_to_plain": us / 4000}
    return {"benchmark": "step"} | case | timing | SOURCE


def test_the_last_record_of_a_case_counts() -> None:
    shapes = {"vocabulary": 32000, "nodes": 64}
    old, new = (
        record("tree_verify", shapes, "torch", 9.0),
        record("tree_verify", dict(reversed(shapes.items())), "torch", 7.0),
    )
    other = record("tree_verify", shapes | {"nodes": 1}, "torch", 8.0)
    assert plot.latest([old, other, new]) == [new, other]


def test_a_peer_found_wrong_later_has_no_figure() -> None:
    shapes = {"vocabulary": 32000, "nodes": 64}
    wrong = record("tree_verify", shapes, "torch", 9.0)
    del wrong["median_us"]
    wrong["wrong"] = True
    assert plot.latest([record("tree_verify", shapes, "torch", 9.0), wrong]) == []


def test_records_of_the_run_itself_have_no_figure() -> None:
    assert plot.latest([{"benchmark": "tree_verify", "not_reached": []} | SOURCE]) == []


def test_steps_differ_by_way_tree_and_heads() -> None:
    steps = [
        step("plain graph", 4000),
        step("medusa graph", 4300, nodes=64, heads="trimmed"),
        step("medusa graph", 4400, nodes=64, heads="full"),
    ]
    assert plot.latest([*steps, step("plain graph", 3900)]) == [step("plain graph", 3900), *steps[1:]]


def test_copy_time() -> None:
    # 4 MB at 4 TB/s.
    assert plot.copy_us(record("tree_verify", {}, "torch", 9.0)) == pytest.approx(1.0)
    # A step's record has the fraction only.
    assert plot.copy_us(step("plain graph", 4000)) == pytest.approx(3200)


def everything() -> list[dict[str, Any]]:
    found = []
    for bench in (bench_tree_attention, bench_heads_topk, bench_tree_verify, bench_kv_compact, bench_rope_append):
        for case in bench.cases():
            for i, name in enumerate(("medusa_kernels", "sdpa", "sdpa unmasked")):
                found.append(record(bench.OP, case.shapes(), name, 1.3 + i))
    found += [step("transformers eager", 16000), step("plain graph", 4000)]
    return [*found, step("medusa graph", 4300, nodes=64, heads="trimmed")]


@pytest.mark.slow
def test_every_figure_is_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    pytest.importorskip("matplotlib")
    results = tmp_path / "gpu.jsonl"
    results.write_text("".join(json.dumps(line) + "\n" for line in everything()))
    monkeypatch.setattr("sys.argv", ["plot", str(results), "--out", str(tmp_path / "figures")])
    plot.main()
    attention = [f"tree_attention-batch-{batch}" for batch in (1, 4, 16)]
    names = [f"{name}.svg" for name in (*attention, *plot.BARS, "step")]
    assert sorted(path.name for path in (tmp_path / "figures").iterdir()) == sorted(names)
    assert capsys.readouterr().out.split() == [str(tmp_path / "figures" / name) for name in names]
    drawn = (tmp_path / "figures" / "tree_attention-batch-1.svg").read_text()
    for text in ("Llama-3-8B, Qwen3-8B: 64 nodes", "Llama-2-13B: 1 node", "128k", "sdpa unmasked", "commit abc123"):
        assert text in drawn
    assert "medusa graph, 64 nodes, trimmed heads" in (tmp_path / "figures" / "step.svg").read_text()


def test_no_matplotlib_is_said_clearly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ValueError, match=r"expected matplotlib, got none; pip install -e \"\.\[bench\]\""):
        plot.draw([], tmp_path, "svg")


def test_a_missing_file_is_said_clearly(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("sys.argv", ["plot", str(tmp_path / "none.jsonl")])
    with pytest.raises(SystemExit, match="does not exist"):
        plot.main()
