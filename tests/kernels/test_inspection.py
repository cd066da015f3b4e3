"""Inspection of compiled kernels: reading of the disassembly, each rule, and kernels written to break the rules."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl

from benchmarks import inspection
from benchmarks.inspection import TARGETS, Counts, Row, breaches, parse
from benchmarks.kernel_forms import FORMS, Specialisation
from medusa_kernels._registry import interpreted
from medusa_kernels._triton import rope_append

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


def test_a_kernel_within_every_limit_breaks_no_rule() -> None:
    assert breaches(GOOD) == []


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
    assert breaches(replace(without, dots_16_bit=False, streams=False)) == []
    assert breaches(with_counts(GOOD, wide_loads=0, bulk_copies=1)) == []
    for word in ("strided", "unit1"):
        assert breaches(with_counts(replace(GOOD, name=f"op bf16 {word}"), wide_loads=0)) == []
    # Only the whole word counts, and it exempts from this one rule alone.
    assert breaches(with_counts(replace(GOOD, name="op bf16 unit16"), wide_loads=0)) != []
    assert breaches(with_counts(replace(GOOD, name="op bf16 strided"), stack=4)) != []


@pytest.mark.parametrize(
    ("ttir", "warps", "wanted"),
    [
        ("%3 = tt.load %2 : tensor<8x64x!tt.ptr<bf16>> loc(#1)", 2, True),
        ("%3 = tt.load %2, %m, %o : tensor<8x64x!tt.ptr<f16>> loc(#1)", 4, False),
        ("%3 = tt.load %2 : tensor<1024x!tt.ptr<f32>>", 1, False),
        ("tt.store %2, %3 : tensor<1024x!tt.ptr<bf16>>", 1, False),
        ("%3 = tt.load %2 : !tt.ptr<bf16>", 1, False),
    ],
)
def test_kernels_that_stream_are_recognised(ttir: str, warps: int, wanted: bool) -> None:
    assert inspection.streams(ttir, warps) == wanted


@triton.jit
def softmax_kernel(x, y, SIZE: tl.constexpr):
    o = tl.arange(0, SIZE)
    b = tl.load(x + o)
    tl.store(y + o, tl.exp(b - tl.max(b, 0)))


@triton.jit
def matmul_kernel(x, y, out, size, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr):
    o, o_k = tl.arange(0, BLOCK), tl.arange(0, BLOCK_K)
    acc = tl.zeros([BLOCK, BLOCK], tl.float32)
    for k in range(0, size, BLOCK_K):
        b_x = tl.load(x + o[:, None] * 1024 + k + o_k[None, :])
        b_y = tl.load(y + o[None, :] * 1024 + k + o_k[:, None])
        acc = tl.dot(b_x, b_y, acc)
    tl.store(out + o[:, None] * BLOCK + o[None, :], acc)


def softmax_of(size: int, warps: int) -> Specialisation:
    return Specialisation("softmax", softmax_kernel, {"x": "*fp32", "y": "*fp32"}, {"SIZE": size}, warps, 1)


def matmul_of(kind: str, block: int, stages: int) -> Specialisation:
    signature = {"x": f"*{kind}", "y": f"*{kind}", "out": "*fp32", "size": "i32"}
    return Specialisation(
        f"matmul {kind}", matmul_kernel, signature, {"BLOCK": block, "BLOCK_K": 64}, 4, stages, ("size",)
    )


@needs_compiler
def test_a_kernel_that_spills_is_reported() -> None:
    """16,384 numbers in one warp are 512 per thread, and a thread has 255 registers."""
    row = inspection.compiled_row(softmax_of(16384, 1), "80", {})
    assert row.counts.stack > 0
    assert any("registers spill" in line for line in breaches(row))
    assert breaches(inspection.compiled_row(softmax_of(1024, 4), "80", {})) == []


@needs_compiler
def test_a_kernel_beyond_the_shared_memory_of_one_target_is_reported() -> None:
    """Two 128 x 64 tiles of bf16 are 32 KiB: four in flight fit the 163 KiB of sm_80, not the 99 KiB of sm_86."""
    spec = matmul_of("bf16", 128, 5)
    small = inspection.compiled_row(spec, "86", {})
    assert small.counts.shared >= 4 * 32 * 1024 > small.limit
    assert any("the limit of sm_86 is 101376" in line for line in breaches(small))
    large = inspection.compiled_row(spec, "80", {})
    assert large.limit == 163 * 1024
    assert not any("shared memory" in line for line in breaches(large))
    assert large.dots_16_bit
    assert large.streams
    assert min(large.counts.tensor_ops, large.counts.async_copies, large.counts.wide_loads) > 0


@needs_compiler
def test_a_kernel_that_does_not_compile_is_reported() -> None:
    row = inspection.compiled_row(softmax_of(1000, 4), "90", {})
    assert len(breaches(row)) == 1
    assert breaches(row)[0].startswith("does not compile: ")


@needs_compiler
def test_the_command_exits_with_an_error_on_a_breach(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "rows.json"
    monkeypatch.setattr(inspection, "inspect", lambda archs, only, jobs: ([GOOD], []))
    assert inspection.main(["--json", str(file)]) == 0
    assert "op bf16  sm_86" in capsys.readouterr().out
    assert json.loads(file.read_text())["rows"][0]["counts"]["shared"] == 101376
    monkeypatch.setattr(inspection, "inspect", lambda archs, only, jobs: ([GOOD], ["op: wrong"]))
    assert inspection.main([]) == 1
    assert "breach: op: wrong" in capsys.readouterr().out


@needs_compiler
def test_a_missing_op_is_reported(capfd: pytest.CaptureFixture[str]) -> None:
    rows, lines = inspection.inspect(["90"], "rope_append bf16 D64", 1, ops=("rope_append", "no_such_op"))
    assert [row.name for row in rows] == ["rope_append bf16 D64"]
    assert len(lines) == 1
    assert lines[0].startswith("no_such_op: missing: ")
    assert "[1/1] sm_90 rope_append bf16 D64" in capfd.readouterr().err


@needs_compiler
@pytest.mark.parametrize("arch", inspection.ARCHS)
@pytest.mark.parametrize("kind", ["bf16", "fp16", "fp32"])
def test_rope_append_rounds_every_product(kind: str, arch: str) -> None:
    """No multiply-add except x * y - 0 and x * 1 + y: any other would round once where PyTorch rounds twice."""
    specs = {spec.name: spec for spec in FORMS["rope_append"](TARGETS[arch])}
    spec = specs[f"rope_append {kind} D64"]
    assert fused(inspection.disassembled(inspection.compiled(spec, arch, rope_append.OPTIONS))) == []


@needs_compiler
def test_without_its_options_rope_append_would_fuse() -> None:
    specs = {spec.name: spec for spec in FORMS["rope_append"](TARGETS["90"])}
    kernel = inspection.compiled(specs["rope_append fp32 D64"], "90", {"enable_fp_fusion": True})
    assert fused(inspection.disassembled(kernel)) != []


def fused(text: str) -> list[str]:
    """Operands of multiply-adds that are neither a plain product nor a plain sum; fails if there is no arithmetic."""
    assert re.search(r"\b(FMUL|HMUL2|HFMA2.BF16)", text)
    operands = re.findall(r"\b(?:FFMA|HFMA2)[\w.]* (.*?);", text)
    return [these for these in operands if not re.search(r"-?RZ|, -?1, -?1,", these)]


def test_inspection_refuses_the_interpreter(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(inspection, "interpreted", lambda: True)
    assert inspection.main([]) == 2
    assert "TRITON_INTERPRET=1 is set" in capsys.readouterr().err


def test_native_kernels_are_named_by_their_unit() -> None:
    library = inspection._native.LIBRARY_FOLDER / "libmedusa_cuda.so"
    if not library.exists():
        pytest.skip(inspection._native.why_missing("cuda"))
    rows = inspection.native_rows(library, "90")
    assert sorted(row.name for row in rows) == sorted(f"kv_compact csrc {n}-byte units" for n in (1, 2, 4, 8, 16))
    assert [row.name for row in rows if row.streams] == ["kv_compact csrc 16-byte units"]
    assert all(breaches(row) == [] for row in rows)
    assert torch.version.cuda is None or rows[0].limit == 227 * 1024
