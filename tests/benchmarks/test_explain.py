"""A step by stage: recorded launches, their bytes, the prediction's arithmetic, the grouping of measured kernels."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import bench_step, explain, grids
from benchmarks.bench_step import FORMS
from benchmarks.explain import Kernel, measured, predict, stages_of
from benchmarks.inspection import TARGETS
from benchmarks.launches import Launch, specialisation
from benchmarks.roofline import read_steps
from benchmarks.simulator.devices import Attained, Device
from benchmarks.simulator.operators import Operator
from medusa_kernels._registry import interpreted

pytestmark = pytest.mark.skipif(interpreted(), reason="the interpreter launches in another way")
PEAKS = Device(
    "h200-mine", flops=1e12, bandwidth=1e9, l2_bandwidth=4e9, launch_us=2.0,
    linear=Attained(bandwidth=0.5, compute=0.25), attention=Attained(compute=0.5, tile=4),
)  # fmt: skip


def empty(*shape: int) -> torch.Tensor:
    return torch.empty(*shape, dtype=torch.bfloat16, device="meta")


def launch_of(op: str, name: str, grid: tuple[int, ...], weight: str = "", **arguments: Any) -> Launch:
    weights = {"w0": weight} if weight else {}
    return Launch(op, name, object(), grid, arguments, {"num_warps": 4, "num_stages": 3}, weights)


def linear(weight: str = "model.layers.0.mlp.down_proj.weight") -> Launch:
    """A product of 4 rows of 64 columns and a weight of 96 rows, in tiles of 32: 3 programs."""
    x, w, out = empty(4, 64), empty(96, 64), empty(1, 4, 96)
    return launch_of(
        "decode_linear", "_decode_linear_kernel", (3,), weight, x=x, w0=w, w1=w, b0=x, residual=x.view(-1, 64),
        out=out, rows=4, PARTS=1, GATE=False, BLOCK_N=32, BLOCK_K=16,
    )  # fmt: skip


def test_the_longest_time_and_the_launches_are_predicted() -> None:
    """By hand: 1e9 bytes/s, half of it attained; 4e9 bytes/s through the L2; 1e12 operations/s, a quarter attained."""
    norm = launch_of(
        "add_rms_norm", "_add_rms_norm_kernel", (4,), "model.layers.0.input_layernorm.weight", w0=empty(64)
    )
    attend = launch_of(
        "tree_attention", "attend_kernel", (1, 1, 1), q=empty(1, 3, 2, 64), k_cache=empty(1, 2, 8, 64),
        v_cache=empty(1, 2, 8, 64), nodes=3, groups=1, BLOCK_M=16, BLOCK_N=32, BLOCK_D=64,
    )  # fmt: skip
    operators = [
        Operator("down", "linear", 4, 49152, 6144, 640, times=2),
        Operator("attention", "attention", 3, 9 * 10**6, 0, 1000),
    ]
    launches = [norm, linear(), linear(), attend]
    found = {one.name: one for one in predict(launches, operators, PEAKS, multiprocessors=2, keys=8)}
    assert list(found) == ["norms", "down", "attention"]
    # Two products of 13,568 bytes; 14,592 bytes each through the L2, two thirds of them to one of 2 multiprocessors.
    assert found["down"].times == pytest.approx(
        {
            "memory": 2 * 13568 / 0.5e9 * 1e6,
            "L2": 2 * 14592 * 2 / 3 / 2e9 * 1e6,
            "arithmetic": 2 * 49152 / 0.25e12 * 1e6,
        }
    )
    assert (found["down"].launches, found["down"].bytes, found["down"].flops) == (2, 27136, 98304)
    assert found["down"].limit == "memory"
    assert found["down"].predicted_us == pytest.approx(54.272 + 2 * 2.0)
    # 3 rows count as 4: 12e6 operations at half of 1e12.
    assert found["attention"].times["arithmetic"] == pytest.approx(24.0)
    assert found["attention"].limit == "arithmetic"
    # The norm has no operator: its weight's 128 bytes pass the L2, to 4 programs, and the launch takes longer.
    assert (found["norms"].bytes, found["norms"].l2_bytes, found["norms"].limit) == (0, 128, "launches")
    assert found["norms"].predicted_us == pytest.approx(2.0 + 0.032)


LAUNCHES = [
    launch_of("heads_topk", "residual_kernel", (1,)),
    launch_of("add_rms_norm", "_add_rms_norm_kernel", (1,), "model.layers.0.input_layernorm.weight"),
    linear(weight="model.layers.0.self_attn.q_proj.weight"),
    launch_of("add_rms_norm", "_add_rms_norm_kernel", (1,), "model.norm.weight"),
    launch_of("tree_verify", "project_kernel", (1,)),
    launch_of("tree_accept", "_tree_accept_kernel", (1,)),
    Launch("kv_compact", "compact_kernel", None, (), {}, {}, {}),
]
STEP = [
    ("residual_kernel", "heads"),
    ("void at::native::gather<long>()", "arrange"),
    ("void at::native::embedding<int>()", "arrange"),
    ("_add_rms_norm_kernel", "norms"),
    ("_decode_linear_kernel", "qkv"),
    ("Memset (Device)", None),
    ("_add_rms_norm_kernel", "norms"),
    ("void at::native::reduce_kernel<float>()", "verify"),
    ("project_kernel", "verify"),
    ("_tree_accept_kernel", "accept"),
    ("void at::native::add<long>()", "accept"),
    ("void (anonymous namespace)::compact_kernel<Unit16>(Arguments)", "compact"),
]
NAMES = [name for name, _ in STEP]


def test_kernels_that_ran_get_the_stages_of_recorded_launches() -> None:
    assert stages_of(NAMES, LAUNCHES) == [stage for _, stage in STEP]


def kernels(durations: list[float], start: float = 0.0, gap: float = 1.0) -> list[Kernel]:
    ends = list(itertools.accumulate(duration + gap for duration in durations))
    return [
        Kernel(name, start + end - gap - duration, start + end - gap)
        for name, duration, end in zip(NAMES, durations, ends, strict=True)
    ]


def test_microseconds_are_medians_over_steps() -> None:
    slow = [10.0] * len(NAMES)
    steps = [kernels([float(i + 1) for i in range(12)], 1000 * k) for k in range(3)] + [kernels(slow, 5000)]
    found = measured(reversed([one for step in steps for one in step]), 4, LAUNCHES)
    # Of 1, 2, .. 12 microseconds thrice and 10 once, in the order of STEP.
    assert found.stages == {
        "heads": 1, "arrange": 2 + 3, "norms": 4 + 7, "qkv": 5, "verify": 8 + 9, "accept": 10 + 11, "compact": 12
    }  # fmt: skip
    assert found.others == {"Memset (Device)": 6}
    assert found.gaps == pytest.approx(11)
    assert found.span == 78 + 11


def test_the_launches_of_a_whole_step_are_recorded() -> None:
    model, layers = "Qwen3-8B", 36
    launches = grids.step_launches(model, 64, 1024, "shared", TARGETS["80"])
    counts = {stage: sum(one.stage == stage for one in launches) for stage in dict.fromkeys(o.stage for o in launches)}
    for stage in ("qkv", "rope, append", "output", "gate, up", "down"):
        assert counts[stage] == layers
    assert (counts["norms"], counts["heads"], counts["verify"], counts["accept"]) == (2 * layers + 1, 3, 2, 1)
    assert launches[-1].stage == "compact"
    assert not any("launch_pdl" in one.options for one in launches)  # an A100 has no programmatic launches
    plain = grids.step_launches(model, 1, 1024, "shared", TARGETS["80"])
    assert "heads" not in {one.stage for one in plain}
    assert sum(one.stage == "down" for one in plain) == layers
    last = [one for one in plain if one.stage == "down"][-1]
    assert last.weights["w0"] == f"model.layers.{layers - 1}.mlp.down_proj.weight"


def shown(form: dict[str, Any] | None, model: str, nodes: int) -> list[Any]:
    way = bench_step.Way("graph", constants=form or {})
    found = []
    with way.settings():
        for one in grids.step_launches(model, nodes, 8192, "shared, trimmed 8192", TARGETS["90"]):
            spec = None if one.kernel is None else specialisation(one)
            found.append((one.name, one.grid, spec and (spec.constants, spec.num_warps, spec.num_stages)))
    return found


def test_a_form_launches_other_kernels() -> None:
    """In one process, before and after: nothing remembers the form."""
    case, form = ("Llama-3-8B", 64), FORMS["narrow tiles"]
    before = shown(None, *case)
    assert shown(form, *case) != before
    assert shown(None, *case) == before


def test_without_a_gpu_the_command_predicts_for_a_named_device(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], results: Any
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["explain.py", "--device", "h200", "--ways", "graph"])
    explain.main()
    said = capsys.readouterr().out
    assert "Llama-2-7B, 64 nodes, prefix 1024, heads shared, h200: graph" in said
    assert "us predicted; nothing was measured" in said
    assert results.records() == []
    line = next(line for line in said.splitlines() if line.startswith("gate, up"))
    # 32 layers of 2 x 11,008 x 4,096 weights, and 64 rows of activations in and 22,016 out, in bf16.
    assert float(line.split()[4]) == pytest.approx(32 * 2 * (22016 * 4096 + 64 * (4096 + 22016)) / 1e6, abs=0.06)


@pytest.mark.gpu
def test_a_captured_step_runs_the_recorded_launches(results: Any) -> None:
    (record,) = explain.explain("Llama-127M", 16, 128, "shared", "h200", ["graph"], 0.05)
    assert results.records()[0]["measured"] == record["measured"]
    found = record["measured"]
    assert {stage["name"] for stage in record["stages"]} - {"compact"} <= set(found["stages"])
    assert all(time > 0 for time in found["stages"].values())
    # Medians of parts do not quite add up.
    total = sum(found["stages"].values()) + sum(found["others"].values()) + found["gaps"]
    assert total == pytest.approx(found["span"], rel=0.2)


@pytest.mark.parametrize(
    ("model", "heads", "prefix"), [("Llama-2-7B", "shared", 1024), ("Llama-3-8B", "shared, trimmed 8192", 8192)]
)
def test_steps_took_what_is_predicted_for_them(
    model: str, heads: str, prefix: int, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plain steps within 6 %, 64 nodes within 9 (docs/benchmarks.md); without the L2, no step with a tree is."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    case = {"benchmark": "step", "model": model, "prefix": prefix, "batch": 1}
    for nodes, more in ((1, {"way": "plain graph"}), (64, {"way": "medusa graph", "nodes": 64, "heads": heads})):
        records = read_steps(root / "benchmarks" / "results" / "nvidia-h200.jsonl")
        (step,) = [one for one in records if one.items() >= (case | more).items()]
        (predicted,) = explain.explain(model, nodes, prefix, heads, "h200-attained", ["graph"], 0.1)
        assert predicted["predicted_us"] == pytest.approx(step["median_us"], rel=0.06 if nodes == 1 else 0.09)
