"""Times every launch configuration of the Triton kernels in `kernel_candidates`, on the shapes that matter.

    python -m benchmarks.tune_kernels --budget 500
    python -m benchmarks.tune_kernels --only tree_verify --budget 120

Each candidate takes the place of what the kernel's `configuration` returns for the same arguments; its result must
agree with that of the chosen configuration before it is timed, cold and graph-replayed. The tables are printed and kept
in benchmarks/results/tune-<op>-<machine>.json.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib
import inspect
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from benchmarks import (
    bench_decode_linear,
    bench_heads_topk,
    bench_rope_append,
    bench_tree_attention,
    bench_tree_verify,
    gpu,
    harness,
    suite,
)
from medusa_decoding.files import write_json

# Largest difference of a candidate's result, relative to the result's norm; of integer results, the share that differs.
TOLERANCE = 1e-2
MOST_DIFFERENT = 0.1
Arguments = tuple[tuple[str, Any], ...]
"""Name and value of each argument of `configuration`."""


def _attention_cases() -> list[Any]:
    names = ("Llama-3-8B, Qwen3-8B", "Llama-2-7B")
    return [
        bench_tree_attention.Case(tuple(name.split(", ")), *bench_tree_attention.HEADS[name], nodes, prefix, 1)
        for prefix in (8192, 1024, 32768)
        for nodes in (64, 1, 16)
        for name in names
    ]


# Of each op its benchmark, which knows inputs and bytes, and the cases, most telling first.
PROBLEMS: dict[str, tuple[ModuleType, Sequence[Any]]] = {
    "decode_linear": (bench_decode_linear, bench_decode_linear.cases()),
    "tree_attention": (bench_tree_attention, _attention_cases()),
    "heads_topk": (
        bench_heads_topk,
        [
            bench_heads_topk.Case(*form, batch=1)
            for form in (
                ("own", 32000, 32000, "full"), ("shared", 128256, 128256, "full"), ("own", 32000, 32000, "int8"),
                ("own", 32000, 32000, "fp8"), ("gather", 32768, 128256, "full"),
            )
        ],
    ),
    "tree_verify": (
        bench_tree_verify,
        [
            bench_tree_verify.Case(size, nodes, stats, batch=1)
            for size, nodes, stats in (
                (128256, 64, False), (128256, 1, False), (32000, 64, False), (32000, 1, False), (128256, 64, True)
            )
        ],
    ),
    "rope_append": (
        bench_rope_append,
        [bench_rope_append.Case(("Llama-2-7B",), 32, 32, 128, nodes, bench_rope_append.PREFIX, 1) for nodes in (64, 1)],
    ),
}  # fmt: skip


def bound(function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Arguments:
    """Return a call's arguments by name, however it passed them."""
    call = inspect.signature(function).bind(*args, **kwargs)
    call.apply_defaults()
    return tuple(call.arguments.items())


@contextlib.contextmanager
def overridden(module: ModuleType, choice: dict[Arguments, Any]) -> Iterator[list[Arguments]]:
    """Let the module's `configuration` return `choice[arguments]` where there is one; collect what it is asked for."""
    original, seen = module.configuration, []

    def configuration(*args: Any, **kwargs: Any) -> Any:
        asked = bound(original, args, kwargs)
        if asked not in seen:
            seen.append(asked)
        return choice[asked] if asked in choice else original(*args, **kwargs)

    module.configuration = configuration  # type: ignore[attr-defined]
    try:
        yield seen
    finally:
        module.configuration = original  # type: ignore[attr-defined]


def candidates(module: ModuleType, args: Arguments) -> list[Any]:
    """Return the configurations to time for some arguments; a kernel that lists none has its chosen one."""
    from benchmarks.kernel_candidates import CANDIDATES  # imports the kernels, which may be missing

    listed = CANDIDATES.get(module.__name__.rpartition(".")[2])
    if listed is None:
        return [module.configuration(**dict(args))]
    takes = inspect.signature(listed).parameters
    return list(listed(**{name: value for name, value in args if name in takes}))


def difference(one: Any, other: Any) -> float:
    """Return how far two results of an op are apart: at most 1 where a candidate may be timed (not a number: never).

    Floating results are compared by norm; where there are none (tokens only), few may differ, as tied logits do.
    """
    pairs = list(zip(_tensors(one), _tensors(other), strict=True))
    floating = [(a.float(), b.float()) for a, b in pairs if a.is_floating_point() and a.numel()]
    if floating:
        apart = [float((a - b).norm() / b.norm().clamp(min=1e-6)) / TOLERANCE for a, b in floating]
    else:
        apart = [float((a != b).float().mean()) / MOST_DIFFERENT for a, b in pairs if a.numel()]
    return float(torch.tensor(apart).max())


def _tensors(result: Any) -> tuple[Tensor, ...]:
    return (result,) if isinstance(result, Tensor) else tuple(result)


@dataclass
class Search:
    """One op's candidates on one device.

    Attributes:
        op: the op.
        bench: its benchmark.
        module: its kernel's module, whose `configuration` is replaced.
        run: device, dtype, budget and copy bandwidth.
    """

    op: str
    bench: ModuleType
    module: ModuleType
    run: suite.Run

    def time_case(self, case: Any) -> list[dict[str, Any]]:
        """Time every candidate of a case, best first for each of the configuration's arguments."""
        read = case.bytes(self.run.dtype.itemsize)
        calls = [copy.ways[suite.OURS] for copy in self.run.copies(self.bench.prepare, case, read)]
        with overridden(self.module, {}) as asked:
            expected = [tensor.clone() for tensor in _tensors(calls[0]())]
        tables = []
        for args in asked:
            chosen = self.module.configuration(**dict(args))
            rows = []
            for config in candidates(self.module, args):
                if self.run.left() <= 0:
                    break
                row: dict[str, Any] = {"config": dataclasses.asdict(config), "chosen": config == chosen}
                rows.append(row | self._time(calls, args, config, expected, read))
            rows.sort(key=lambda row: row.get("median_us", float("inf")))
            tables.append(
                {"case": case.shapes(), "arguments": {k: str(v) for k, v in args}, "bytes": read, "rows": rows}
            )
            self._show(tables[-1])
        return tables

    def _time(
        self, calls: Sequence[suite.Way], args: Arguments, config: Any, expected: list[Tensor], read: int
    ) -> dict[str, Any]:
        try:
            with overridden(self.module, {args: config}):
                apart = difference(calls[0](), expected)
                if not apart <= 1:
                    return {"error": f"wrong: {apart:.1f} times the tolerated difference"}
                timing = gpu.cold_replay(calls.__getitem__, len(calls), self.run.device, seconds=self.run.seconds / 2)
        except Exception as error:
            reason = f"{type(error).__name__}: {gpu.first_line(error)}"
            self.run.check_device(f"{config}: {reason}")
            return {"error": reason}
        rate = read / (timing.median_us * 1e-6)
        figures = {key: round(getattr(timing, key), 2) for key in ("median_us", "p10_us", "p90_us")}
        return figures | {"fraction": round(rate / self.run.copy, 4), "captured": timing.captured}

    def _show(self, table: dict[str, Any]) -> None:
        print(f"{self.op} {table['case']}\n  for {table['arguments']}")
        for row in table["rows"]:
            figure = f"{row['median_us']:10.1f} us {row['fraction']:6.1%}" if "median_us" in row else " " * 20
            config = " ".join(f"{k}={v}" for k, v in row["config"].items())
            print(f"  {figure}  {config}{'  (chosen)' if row['chosen'] else ''}  {row.get('error', '')}", flush=True)


def tune(op: str, budget: float) -> None:
    """Time all candidates of an op within the budget and write the table."""
    run = suite.Run(op, torch.device("cuda"), budget)
    bench, cases = PROBLEMS[op]
    search = Search(op, bench, importlib.import_module(f"medusa_kernels._triton.{op}"), run)
    tables: list[dict[str, Any]] = []
    reached = 0
    path = harness.RESULTS / f"tune-{op}-{harness.machine_slug()}.json"
    with torch.inference_mode():
        try:
            for case in cases:
                if run.left() <= 0:
                    break
                tables += search.time_case(case)
                reached += 1
                gpu.release(run.device)
        finally:
            missed = [case.shapes() for case in cases[reached:]]
            copy = {"copy_gb_per_s": round(run.copy / 1e9, 1)}
            record = {"op": op, "tables": tables, "not_reached": missed, **copy, **harness.provenance()}
            write_json(path, record)
            print(f"{path}: {len(tables)} tables, {len(missed)} cases not reached", flush=True)


def main() -> None:
    """Tune from the command line, the budget shared by the ops in the order given."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=list(PROBLEMS), help="an op; repeatable (default: all)")
    parser.add_argument("--budget", type=float, default=500, metavar="SECONDS", help="for all ops (default: 500)")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit(f"tune_kernels: {suite.NO_GPU}")
    began = time.monotonic()
    ops = args.only or list(PROBLEMS)
    weights = {"tree_attention": 3.0, "decode_linear": 3.0, "rope_append": 0.3}
    for i, op in enumerate(ops):
        left = args.budget - (time.monotonic() - began)
        share = weights.get(op, 1.5) / sum(weights.get(other, 1.5) for other in ops[i:])
        try:
            tune(op, left * share)
        except ImportError as error:
            print(f"{op}: no kernel to tune: {error}", flush=True)


if __name__ == "__main__":
    main()
