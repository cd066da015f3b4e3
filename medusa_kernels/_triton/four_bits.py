"""Weights in 4 bits in a kernel: bytes of two codes become the numbers of the even and of the odd columns.

The two are never put next to each other: x W^T is the product over the even columns plus that over the odd ones. The
codes are those of `medusa_kernels.quantised`; scales and zero points are the kernel's.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl

from medusa_kernels._triton.streaming import COMPILED
from medusa_kernels.quantised import CODES, MIDDLE, TABLES

_SMALL_CODES = {
    # The code below a constant that makes it 1024 or 128 plus the code (fp16 from the upper half: 16 times the code),
    # and the multiply-add, exact, that takes the constant and the zero point away.
    ("fp16", False): ("and.b32 codes, $2, 0x0f0f0f0f;", 0x64, "0x3c003c00", "0xe408e408", "f16x2"),
    ("fp16", True): ("and.b32 codes, $2, 0xf0f0f0f0;", 0x64, "0x2c002c00", "0xd480d480", "f16x2"),
    ("bf16", False): ("and.b32 codes, $2, 0x0f0f0f0f;", 0x43, "0x3f803f80", "0xc308c308", "bf16x2"),
    ("bf16", True): ("shr.u32 codes, $2, 4; and.b32 codes, codes, 0x0f0f0f0f;", 0x43, "0x3f803f80", "0xc308c308",
                     "bf16x2"),
}  # fmt: skip

_TORCH = {"fp16": torch.float16, "bf16": torch.bfloat16}


def _assembly(codes: str, dtype: str, upper: bool) -> str:
    """Return PTX that converts the codes in one half of the four bytes in $2 to 16-bit numbers in $0 and $1."""
    if codes == "int4":
        taken, byte, factor, less, suffix = _SMALL_CODES[dtype, upper]
        return f"""
        {{
            .reg .b32 codes, factor, less;
            {taken}
            mov.b32 factor, {factor};
            mov.b32 less, {less};
            prmt.b32 $0, codes, {byte * 0x01010101}, 0x4140;
            prmt.b32 $1, codes, {byte * 0x01010101}, 0x4342;
            fma.rn.{suffix} $0, $0, factor, less;
            fma.rn.{suffix} $1, $1, factor, less;
        }}
        """
    # prmt takes four bytes out of eight. Eight tables of four bytes: the lower and the upper bytes of 16 numbers. The
    # lower three bits of a code select from the lower and from the upper eight numbers, its uppermost bit from both.
    numbers = torch.tensor(TABLES[codes]).to(_TORCH[dtype]).view(torch.uint8).view(16, 2).T.contiguous()
    tables = [f"{int(word) & 0xFFFFFFFF:#x}" for word in numbers.view(torch.int32).flatten()]
    lines = ["and.b32 low, $2, 0x77777777;", "shr.u32 top, $2, 1;", "lop3.b32 top, top, 0x44444444, 0x32103210, 0xea;"]
    for place, out in enumerate(("$0", "$1")):
        if place:
            lines += ["shr.u32 low, low, 16;", "shr.u32 top, top, 16;"]
        for name, words in (("less", tables[:4]), ("more", tables[4:])):
            lines += [f"mov.b32 t{i}, {word};" for i, word in enumerate(words)]
            lines += [f"prmt.b32 {name}, t0, t1, low;", "prmt.b32 other, t2, t3, low;"]
            lines += [f"prmt.b32 {name}, {name}, other, top;"]
        lines += [f"prmt.b32 {out}, less, more, {'0x7351' if upper else '0x6240'};"]
    return "{ .reg .b32 low, top, less, more, other, t0, t1, t2, t3;\n" + "\n".join(lines) + "\n}"


ASSEMBLY = tl.constexpr(
    {(c, dtype, upper): _assembly(c, dtype, upper) for c in CODES for dtype in _TORCH for upper in (False, True)}
)
NUMBERS = tl.constexpr(TABLES)
EIGHT = tl.constexpr(MIDDLE)


@triton.constexpr_function
def _assembly_of(codes, dtype, upper):
    return ASSEMBLY.value[codes, dtype.name, upper]


@triton.constexpr_function
def _number(codes, code):
    return NUMBERS.value[codes][code]


@triton.jit
def _half(b_bytes, CODES: tl.constexpr, DTYPE: tl.constexpr, UPPER: tl.constexpr):
    """Return the numbers of the codes in the upper or the lower halves of bytes."""
    if COMPILED and not DTYPE.is_fp32():
        return tl.inline_asm_elementwise(
            _assembly_of(CODES, DTYPE, UPPER), "=&r,=&r,r", [b_bytes],
            dtype=tl.float16 if DTYPE.is_fp16() else tl.bfloat16, is_pure=True, pack=4,
        )  # fmt: skip
    else:
        b_codes = (b_bytes >> 4 if UPPER else b_bytes & 15).to(tl.int32)
        if CODES == "int4":
            b_numbers = (b_codes - EIGHT).to(tl.float32)
        else:
            b_numbers = tl.full(b_bytes.shape, _number(CODES, 0), tl.float32)
            for i in tl.static_range(1, 16):
                b_numbers = tl.where(b_codes == i, _number(CODES, i), b_numbers)
        return b_numbers.to(DTYPE)


@triton.jit
def decode_codes(b_bytes, CODES: tl.constexpr, DTYPE: tl.constexpr):
    """Return the numbers of the even and of the odd columns in bytes of two codes each, both in the shape of b_bytes.

    int4: the code less 8, exact in DTYPE; nf4 and fp4: the table's number rounded to DTYPE. Compiled for 16 bits, four
    codes are converted at once, and the compiler shares what the two halves have in common.
    """
    b_low, b_high = _half(b_bytes, CODES, DTYPE, False), _half(b_bytes, CODES, DTYPE, True)
    if CODES == "int4":
        return b_low, b_high
    else:
        return b_high, b_low
