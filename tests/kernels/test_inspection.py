"""Inspection of compiled kernels: reading of the disassembly, each rule, and kernels written to break the rules."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import triton
import triton.language as tl

from benchmarks import inspection
from benchmarks.inspection import TARGETS, Counts, Row, breaches, parse
from benchmarks.kernel_forms import forms
from benchmarks.launches import Specialisation
from medusa_kernels._registry import interpreted

needs_compiler = pytest.mark.skipif(interpreted(), reason="nothing is compiled in Triton's interpreter")

DISASSEMBLY = """
Fatbin elf code:
================
arch = sm_90

	code for sm_90a
		Function : first_kernel
	.headerflags	@"EF_CUDA_TEXMODE_UNIFIED"
        /*0000*/                   LDC R1, c[0x0][0x28] ;            /* 0x00000a00ff017b82 */
                                                                     /* 0x000fe20000000f00 */
        /*0010*/              @!P0 LDG.E.128 R4, desc[UR4][R2.64] ;  /* 0x0000000402040981 */
        /*0020*/                   LDG.E.LTC128B.CONSTANT R8, desc[UR4][R2.64] ; /* 0x0 */
        /*0030*/                   LDG.E.LTC128B.128.CONSTANT R8, desc[UR4][R2.64] ; /* 0x0 */
        /*0040*/              @P3  LDGSTS.E.BYPASS.LTC128B.128 [R5], desc[UR4][R2.64] ; /* 0x0 */
        /*0050*/                   LDGSTS.E [R5], desc[UR4][R2.64] ; /* 0x0 */
        /*0060*/                   STG.E.128 desc[UR4][R2.64], R4 ;  /* 0x0 */
        /*0070*/                   LDS.128 R4, [R2] ;                /* 0x0 */
        /*0080*/                   HMMA.16816.F32.BF16 R4, R8, R12, R4 ; /* 0x0 */
        /*0090*/              @UP0 UBLKCP [UR4], [UR6], UR8 ;        /* 0x0 */
        /*00a0*/                   UTMALDG.2D [UR8], [UR4] ;         /* 0x0 */
        /*00b0*/                   HGMMA.64x64x16.F32.BF16 R24, gdesc[UR4], R24 ; /* 0x0 */
        /*00c0*/                   IMMA.16832.S8.S8 R4, R8.ROW, R12.COL, R4 ; /* 0x0 */
        /*00d0*/                   QGMMA.64x64x32.F32.E4M3.E4M3 R24, gdesc[UR4], R24 ; /* 0x0 */
        /*00e0*/                   HFMA2.MMA R4, -RZ, RZ, 0, 0 ;     /* 0x0 */
        /*00f0*/                   IMAD.MOV.U32 R4, RZ, RZ, R2 ;     /* 0x0 */
		.........................

		Function : second_kernel
        /*0000*/                   LDG.E R4, desc[UR4][R2.64] ;      /* 0x0 */

Resource usage:
 Common:
  GLOBAL:0
 Function first_kernel:
  REG:96 STACK:24 SHARED:512 LOCAL:0 CONSTANT[0]:560 TEXTURE:0 SURFACE:0 SAMPLER:0
 Function second_kernel:
  REG:16 STACK:0 SHARED:0 LOCAL:0 CONSTANT[0]:560 TEXTURE:0 SURFACE:0 SAMPLER:0
"""


def test_disassembly_is_parsed() -> None:
    """128 in a cache hint, shared memory or a store is not a 16-byte load; HFMA2.MMA and IMAD are not tensor cores."""
    assert parse(DISASSEMBLY) == {
        "first_kernel": Counts(
            registers=96, stack=24, shared=512, wide_loads=3, bulk_copies=2, async_copies=4, tensor_ops=4
        ),
        "second_kernel": Counts(registers=16),
    }


GOOD = Row(
    name="op bf16",
    arch="86",
    warps=4,
    stages=3,
    counts=Counts(registers=255, shared=101376, wide_loads=1, tensor_ops=1),
    limit=101376,
    dots_16_bit=True,
    streams=True,
)


def with_counts(row: Row, **counts: int) -> Row:
    return replace(row, counts=replace(row.counts, **counts))


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (with_counts(GOOD, stack=8), "8 bytes of stack, expected 0"),
        (with_counts(GOOD, shared=101377), "101377 bytes of shared memory, the limit of sm_86 is 101376"),
        (with_counts(GOOD, tensor_ops=0), "without a tensor-core operation"),
        (with_counts(GOOD, wide_loads=0), "nothing 16 bytes at once"),
        (replace(GOOD, failed="does not compile: X"), "does not compile: X"),
    ],
    ids=["stack", "shared", "tensor", "wide", "failed"],
)
def test_each_rule_is_reported_in_one_line(row: Row, said: str) -> None:
    (line,) = breaches(row)
    assert said in line


def test_kernels_that_the_rules_allow() -> None:
    without = with_counts(GOOD, wide_loads=0, tensor_ops=0)
    assert breaches(GOOD) == []
    assert breaches(replace(without, dots_16_bit=False, streams=False)) == []
    assert breaches(with_counts(GOOD, wide_loads=0, bulk_copies=1)) == []
    for word in ("strided", "unit1"):
        assert breaches(with_counts(replace(GOOD, name=f"op bf16 {word}"), wide_loads=0)) == []
    # Only the whole word counts, and it exempts from this one rule alone.
    assert breaches(with_counts(replace(GOOD, name="op bf16 unit16"), wide_loads=0)) != []
    assert breaches(with_counts(replace(GOOD, name="op bf16 strided"), stack=4)) != []


@triton.jit
def softmax_kernel(x, y, SIZE: tl.constexpr):
    o = tl.arange(0, SIZE)
    b = tl.load(x + o)
    tl.store(y + o, tl.exp(b - tl.max(b, 0)))


@triton.jit
def power_kernel(x, out, count, LOSES: tl.constexpr):
    power = tl.load(x)
    following = power if LOSES else power * 2
    for _ in range(count):
        power = following
        following = following * 2
    tl.store(out, power)


def softmax_of(size: int, warps: int) -> Specialisation:
    return Specialisation("softmax", softmax_kernel, {"x": "*fp32", "y": "*fp32"}, {"SIZE": size}, warps, 1)


@needs_compiler
def test_a_kernel_that_spills_is_reported() -> None:
    """16,384 numbers in one warp are 512 per thread, and a thread has 255 registers."""
    row = inspection.compiled_row(softmax_of(16384, 1), "80")
    assert row.counts.stack > 0
    assert any("registers spill" in line for line in breaches(row))
    assert breaches(inspection.compiled_row(softmax_of(1024, 4), "80")) == []


@needs_compiler
def test_a_variable_that_a_loop_does_not_carry_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`power` is assigned the value that it has, in the first iteration: Triton takes it for unchanged."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    signature = {"x": "*fp32", "out": "*fp32", "count": "i32"}
    for loses in (True, False):
        spec = Specialisation("power", power_kernel, signature, {"LOSES": loses}, 1, 1)
        row = inspection.compiled_row(spec, "80")
        lost = [line for line in breaches(row) if "not carried" in line]
        assert bool(lost) == loses
        assert all(line.startswith("power in line ") for line in lost)


@needs_compiler
@pytest.mark.parametrize(("kind", "arch"), [("bf16", "80"), ("fp32", "90")])
def test_rope_append_rounds_every_product(kind: str, arch: str) -> None:
    """No multiply-add except x * y - 0 and x * 1 + y: any other would round once where PyTorch rounds twice."""
    specs = {spec.name: spec for spec in forms("rope_append", TARGETS[arch])}
    spec = specs[f"rope_append {kind} 64"]
    assert fused(inspection.disassembled(inspection.compiled(spec, arch))) == []


def fused(text: str) -> list[str]:
    """Operands of multiply-adds that are neither a plain product nor a plain sum; fails if there is no arithmetic."""
    assert re.search(r"\b(FMUL|HMUL2|HFMA2.BF16)", text)
    operands = re.findall(r"\b(?:FFMA|HFMA2)[\w.]* (.*?);", text)
    return [these for these in operands if not re.search(r"-?RZ|, -?1, -?1,", these)]


@pytest.mark.slow
@needs_compiler
def test_the_launches_of_a_plain_step_fill_an_a100(capsys: pytest.CaptureFixture[str]) -> None:
    """Compiled for real: 4,096 rows of weights, however divided, are at least 72 programs."""
    from benchmarks import grids

    assert grids.main(["--device", "a100", "--model", "Llama-2-7B", "--nodes", "1", "--jobs", "1"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("a100")]
    assert [line[3] for line in lines if "decode_linear" in line] == ["qkv", "output", "gate,", "down"]
    # Each kernel of a layer 32 times; the first norm adds nothing up.
    assert sum(int(line[line.index("attend") + 4]) for line in lines if "attend" in line) == 32
