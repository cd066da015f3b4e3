"""Launch configurations for given device properties, and the options that all launches pass."""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any

import pytest
import torch
import triton
from triton.runtime.jit import JITFunction

from benchmarks import inspection
from benchmarks.inspection import TARGETS
from medusa_kernels import _registry, selftest
from medusa_kernels._registry import Implementation, interpreted
from medusa_kernels._triton import (
    decode_linear,
    heads_topk,
    launch,
    tree_attention,
    tree_verify,
)
from medusa_kernels._triton.decode_linear_configs import best_parts
from medusa_kernels._triton.launch import Device

pytestmark = pytest.mark.skipif(interpreted(), reason="the interpreter has configurations of its own")
BF16, INT8 = torch.bfloat16, torch.int8
H200 = Device((9, 0), 132, 232448, 233472)

SMALL = {
    "A6000": TARGETS["86"],
    "L40S": TARGETS["89"],
    "RTX 5090": TARGETS["120"],
    "DGX Spark": Device((12, 1), 48, 99 * 1024, 100 * 1024),
    "a later GPU": Device((13, 0), 200, 99 * 1024, 100 * 1024),
}


@pytest.mark.parametrize("device", SMALL.values(), ids=SMALL)
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_attention_fits_blocks_of_99_kib(device: Device, head_dim: int) -> None:
    """Blocks of keys and values in flight, one stage of which is in use, plus the queries."""
    padded = triton.next_power_of_2(head_dim)
    for rows in (1, 4, 16, 17, 32, 33, 64, 65, 256, 1024):
        for keys in (256, 1024, 16384, 131072):
            config = tree_attention.configuration(device, BF16, head_dim, rows, keys=keys)
            flying = (config.num_stages - 1) * 2 * config.block_n * padded * 2
            assert flying + config.block_m * padded * 2 <= 99 * 1024


GPUS = {**TARGETS, "H100 PCIe": dataclasses.replace(H200, multiprocessors=114)}
PROJECTIONS = {
    # model: hidden size, width of q, of k and of v, intermediate size
    "Llama-2-7B": (4096, 4096, 4096, 11008),
    "Llama-3-8B": (4096, 4096, 1024, 14336),
    "Llama-2-13B": (5120, 5120, 5120, 13824),
    "Qwen3-8B": (4096, 4096, 1024, 12288),
}


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("model", PROJECTIONS)
@pytest.mark.parametrize("rows", [1, 16, 64])
def test_no_projection_leaves_a_third_of_a_gpu_idle(rows: int, model: str, gpu: str) -> None:
    """Counted here from tiles and shared memory: the multiprocessors without a program in the last wave, over waves."""
    device, (hidden, q, kv, width) = GPUS[gpu], PROJECTIONS[model]
    divisible = [(q + 2 * kv, hidden), (hidden, q), (hidden, width)]
    for features, size, gate in [*((*shape, False) for shape in divisible), (2 * width, hidden, True)]:
        parts = 1 if gate else best_parts(device, BF16, rows, features, size)
        config = decode_linear.configuration(device, BF16, rows, features, size, gate, parts=parts)
        kept = config.num_stages if device.hopper else config.num_stages - 1
        tile = (config.block_m + config.block_n * (1 + gate)) * config.block_k * 2
        held = device.multiprocessor_memory // (tile * kept + 1024)
        left, waves = features // (config.block_n * (1 + gate)) * parts, 0
        while left > 0:
            last, left, waves = left, left - held * device.multiprocessors, waves + 1
        idle = max(0, device.multiprocessors - last) / device.multiprocessors / waves
        assert idle <= 1 / 3, (features, size, config, parts)


def test_parts_are_no_more_than_they_must_be() -> None:
    """Wide weights fill the device by themselves; fp32, more than 64 rows, and on Hopper 64 are not divided."""
    h200 = TARGETS["90"]
    assert best_parts(h200, BF16, 64, 128256, 4096) == 1
    assert best_parts(h200, BF16, 16, 4096, 4096) > 1
    assert best_parts(h200, BF16, 64, 4096, 4096) == 1
    assert best_parts(TARGETS["80"], BF16, 64, 4096, 4096) > 1
    assert best_parts(TARGETS["80"], BF16, 65, 4096, 4096) == 1
    assert best_parts(h200, torch.float32, 64, 4096, 4096) == 1


@dataclasses.dataclass(frozen=True)
class Streamed:
    """A launch that streams weights: its programs, the rows of a tile that has some, and the bytes of a stage."""

    programs: int
    rows: int
    options: dict[str, Any]
    stage_bytes: int


def streamed(monkeypatch: pytest.MonkeyPatch, device: Device, run: Any) -> dict[str, Streamed]:
    """Record what `run` launches on such a device, by the kernel's name."""
    found: dict[str, Streamed] = {}

    def record(kernel: Any, *given: Any, grid: Any, **options: Any) -> None:
        arguments = dict(zip(kernel.arg_names, given, strict=False))
        names = {
            "residual_kernel": ("x", "w1"),
            "vocabulary_kernel": ("states", "w2"),
            "project_kernel": ("hidden", "weight"),
        }
        if (name := kernel.fn.__name__) in names:
            factors = zip((options["BLOCK_M"], options["BLOCK_V"]), names[name], strict=True)
            stage = sum(rows * arguments[factor].itemsize for rows, factor in factors) * options["BLOCK_K"]
            step = arguments["step"] * options.get("VECTOR", 1)
            found[name] = Streamed(grid[0] * grid[1] * (grid[2] if len(grid) > 2 else 1), step, options, stage)

    monkeypatch.setattr(JITFunction, "run", record)
    for module in (heads_topk, tree_verify):
        monkeypatch.setattr(module, "describe", lambda _: device)
    run()
    return found


def weight(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    """A tensor of this shape whose rows are all one."""
    return torch.empty(shape[-1], dtype=dtype).as_strided(shape, (*[0] * (len(shape) - 1), 1))


def check_one_full_wave(device: Device, launch: Streamed) -> None:
    """The programs run at once, on two thirds of the multiprocessors at least, and their tiles are not mostly empty."""
    options = launch.options
    # One stage is in use on most devices, while the others are loaded; Hopper and 10.0 hold all of 64 rows or more.
    kept = options["num_stages"] - (options["BLOCK_M"] < 64 or device.capability[0] not in (9, 10))
    by_memory = device.multiprocessor_memory // (launch.stage_bytes * kept + 1024)
    assert launch.programs <= device.multiprocessors * min(by_memory, 12 // options["num_warps"])
    assert launch.programs >= 2 / 3 * device.multiprocessors
    assert launch.rows > options["BLOCK_V"] / 2 or options["BLOCK_V"] == 32


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("stored", [BF16, INT8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("shape", [(4, 32000), (128256,), (8192,)], ids=str)
@pytest.mark.parametrize("batch", [1, 64])
def test_heads_fill_every_gpu_in_one_wave(
    monkeypatch: pytest.MonkeyPatch, gpu: str, stored: torch.dtype, shape: tuple[int, ...], batch: int
) -> None:
    scale = None if stored == BF16 else torch.empty(()).expand(shape)

    def run() -> None:
        heads_topk.heads_topk(
            weight(batch, 4096), weight(4, 4096, 4096), None, weight(*shape, 4096, dtype=stored), 10, w2_scale=scale
        )

    found = streamed(monkeypatch, GPUS[gpu], run)
    assert found.keys() == {"residual_kernel", "vocabulary_kernel"}
    for one in found.values():
        check_one_full_wave(GPUS[gpu], one)


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("vocabulary", [32000, 128256, 151936])
@pytest.mark.parametrize("nodes", [1, 64, 255])
def test_verification_fills_every_gpu_in_one_wave(
    monkeypatch: pytest.MonkeyPatch, gpu: str, vocabulary: int, nodes: int
) -> None:
    for want_stats in (False, True):

        def run(want_stats: bool = want_stats) -> None:
            candidates = torch.zeros(1, nodes, dtype=torch.int64)
            tree_verify.tree_verify(weight(1, nodes, 4096), weight(vocabulary, 4096), candidates, want_stats=want_stats)

        check_one_full_wave(GPUS[gpu], streamed(monkeypatch, GPUS[gpu], run)["project_kernel"])


def test_states_are_fp16_for_8_bit_weights_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless that is turned off; float32 states stay what they are."""

    def states(dtype: torch.dtype, stored: torch.dtype) -> tuple[torch.dtype, str]:
        """The dtype of the states that meet the vocabulary, and how the weights are converted."""
        seen = []
        monkeypatch.setattr(JITFunction, "run", lambda self, *given, **options: seen.append((given, options)))
        scale = torch.empty(()).expand(4096) if stored.itemsize == 1 else None
        heads_topk.heads_topk(
            weight(1, 64, dtype=dtype),
            weight(4, 3, 64, 64, dtype=dtype),
            None,
            weight(4096, 64, dtype=stored),
            4,
            w2_scale=scale,
        )
        assert [given[4].dtype for given, _ in seen[:2]] == [dtype] * 2  # between residual blocks
        given, options = seen[3]
        return given[0].dtype, options["DECODE"]

    monkeypatch.setattr(heads_topk, "describe", lambda _: H200)
    fp16, fp32, fp8 = torch.float16, torch.float32, torch.float8_e4m3fn
    assert states(BF16, INT8) == states(fp16, INT8) == (fp16, "int8")
    assert states(BF16, fp8) == states(fp16, fp8) == (fp16, "")
    assert states(BF16, BF16) == (BF16, "")
    assert states(fp32, INT8) == states(fp32, fp8) == (fp32, "")
    monkeypatch.setattr(heads_topk, "describe", lambda _: TARGETS["80"])
    assert states(BF16, fp8) == (fp16, "e4m3")
    monkeypatch.setattr(heads_topk, "HALF_PRECISION_BYTES", False)
    assert states(BF16, INT8) == (BF16, "")
    assert states(fp16, INT8) == (fp16, "")
    assert states(BF16, fp8) == (BF16, "e4m3")


def name_of(kernel: Any) -> str:
    return f"{kernel.fn.__module__}.{kernel.fn.__name__}"


def launches(monkeypatch: pytest.MonkeyPatch, *, pdl: bool = False) -> list[tuple[str, dict[str, Any]]]:
    """Every launch of every op, by the kernel's module and name, recorded instead of run."""
    found: list[tuple[str, dict[str, Any]]] = []
    modules = {op: importlib.import_module(f"medusa_kernels._triton.{op}") for op in inspection.OPS}
    cpu = torch.device("cpu")
    chosen = {(op, cpu): Implementation("triton", getattr(module, op), "") for op, module in modules.items()}
    monkeypatch.setattr(_registry, "_chosen", chosen)
    for module in (launch, *modules.values()):
        monkeypatch.setattr(module, "describe", lambda device: H200, raising=False)
    monkeypatch.setattr(launch, "programmatic", lambda device: pdl)
    monkeypatch.setattr(tree_attention, "_splits", lambda *_: 2)  # so that there is something to merge
    monkeypatch.setattr(JITFunction, "run", lambda self, *_, **options: found.append((name_of(self), options)))
    selftest.run("cpu")
    return found


def test_every_launch_sets_enable_fp_fusion(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's default is on up to 3.9 and off from 3.10; the kernels' errors and times were measured with it on.

    It is off where transformers rounds a product before it is added: rotations, and the norm of what is added. So it is
    where threads that add the same products in other orders must get the same: the merge of attention's shares.
    """
    kernels = {
        name_of(kernel)
        for op in inspection.OPS
        for kernel in vars(importlib.import_module(f"medusa_kernels._triton.{op}")).values()
        if isinstance(kernel, JITFunction) and name_of(kernel).endswith("_kernel")
    }
    found = launches(monkeypatch)
    assert {name for name, _ in found} == kernels
    never = ("._rope_append_kernel", ".tree_attention_kernels.merge_kernel")
    off = {(name, False) for name in kernels if name.endswith((*never, "._add_rms_norm_kernel"))}
    on = {(name, True) for name in kernels if not name.endswith(never)}
    assert {(name, options["enable_fp_fusion"]) for name, options in found} == off | on
