"""The emulator computes what PTX says, and finds faults that are put into kernels.

Run with `pytest -p emulator.plugin tests/emulator`, or `make test-emulated`.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from emulator import EmulationError, Emulator
from medusa_kernels import add_rms_norm, reference

U32, S32 = 2**32, 2**31
EDGES = [*range(4), 31, 32, 33, 255, 256, 65535, 65536, S32 - 1, S32, S32 + 1, U32 - 2, U32 - 1, 0x12345678]


@pytest.fixture
def fresh(machine: Emulator) -> Iterator[Emulator]:
    """The emulator with no findings, whose settings may be changed."""
    before = dict(vars(machine.settings))
    machine.findings.clear()
    machine.forget_programs()
    yield machine
    machine.change_ptx = None
    machine.forget_programs()
    machine.findings.clear()
    vars(machine.settings).update(before)


def execute(machine: Emulator, body: str, tensors: list[torch.Tensor], threads: int = 32, blocks: int = 1) -> None:
    """Execute a body of PTX, in which %p0, %p1, .. are the addresses of tensors and %t the thread."""
    parameters = ", ".join(f".param .u64 q{n}" for n in range(len(tensors)))
    loads = "".join(f"ld.param.u64 %p{n}, [q{n}];\n" for n in range(len(tensors)))
    text = (
        f".visible .entry k({parameters}) {{\n.reg .b64 %p<9>;\n.reg .b32 %t;\n.reg .b32 %r<40>;\n.reg .b64 %d<40>;\n"
        f".reg .b16 %h<40>;\n.reg .pred %q<9>;\n{loads}mov.u32 %t, %tid.x;\n{body}\nret;\n}}\n"
    )
    machine.launch(machine.load((text,), text, "k"), (blocks,), threads, 0, tensors)


def signed(x: int) -> int:
    return (x + S32) % U32 - S32


def bits_of(x: int) -> int:
    return x % U32


WORDS: dict[str, Callable[..., int]] = {
    "add.s32": lambda a, b: a + b,
    "sub.u32": lambda a, b: a - b,
    "mul.lo.s32": lambda a, b: a * b,
    "mul.hi.u32": lambda a, b: a * b >> 32,
    "mul.hi.s32": lambda a, b: signed(a) * signed(b) >> 32,
    "div.u32": lambda a, b: a // b if b else U32 - 1,
    "rem.s32": lambda a, b: abs(signed(a)) % abs(signed(b)) * (-1 if signed(a) < 0 else 1) if b else a,
    "min.s32": lambda a, b: min(signed(a), signed(b)),
    "max.u32": max,
    "shl.b32": lambda a, b: a << b if b < 32 else 0,
    "shr.u32": lambda a, b: a >> b if b < 32 else 0,
    "shr.s32": lambda a, b: signed(a) >> min(b, 31),
    "mad.lo.s32": lambda a, b, c: a * b + c,
    "mad.hi.u32": lambda a, b, c: (a * b >> 32) + c,
    "bfe.u32": lambda a, b, c: a >> (b & 255) & ((1 << (c & 255)) - 1) if b & 255 < 32 else 0,
    "shf.l.wrap.b32": lambda a, b, c: (b << 32 | a) << (c & 31) >> 32,
    "shf.r.clamp.b32": lambda a, b, c: (b << 32 | a) >> min(c, 32),
    "lop3.b32 0x96": lambda a, b, c: a ^ b ^ c,
    "lop3.b32 0xe8": lambda a, b, c: (a & b) | (a & c) | (b & c),
    "prmt.b32": lambda a, b, c: int.from_bytes(
        (
            (255 * (byte >> 7) if c >> 4 * n & 8 else byte)
            for n in range(4)
            for byte in [(b << 32 | a) >> 8 * (c >> 4 * n & 7) & 255]
        ),
        "little",
    ),
    "popc.b32": lambda a: a.bit_count(),
    "clz.b32": lambda a: 32 - a.bit_length(),
    "brev.b32": lambda a: int(f"{a:032b}"[::-1], 2),
    "abs.s32": lambda a: abs(signed(a)),
}


@pytest.mark.parametrize("opcode", WORDS)
def test_integers_are_those_of_python(opcode: str, fresh: Emulator) -> None:
    expected = WORDS[opcode]
    count = expected.__code__.co_argcount if expected is not max else 2
    generator = torch.Generator().manual_seed(0)
    pool = torch.tensor(EDGES + torch.randint(U32, (12,), generator=generator).tolist())
    numbers = pool[torch.randint(len(pool), (3, 32 * 8), generator=generator)]
    given = (numbers - (numbers >= S32).long() * U32).int()
    out = torch.zeros_like(given[0])
    name, _, table = opcode.partition(" ")
    body = "mul.wide.u32 %d1, %t, 4;\nadd.s64 %d2, %p0, %d1;\nadd.s64 %d3, %p1, %d1;\n"
    body += "".join(f"ld.global.b32 %r{n}, [%d2+{n * out.nbytes}];\n" for n in range(count))
    body += f"{name} %r9, {', '.join(f'%r{n}' for n in range(count))}{', ' + table if table else ''};\n"
    execute(fresh, body + "st.global.b32 [%d3], %r9;", [given, out], threads=len(out))
    wanted = [bits_of(expected(*row)) for row in numbers[:count].T.tolist()]
    assert [bits_of(x) for x in out.tolist()] == wanted


@pytest.mark.parametrize(
    ("opcode", "source", "result"),
    [
        ("cvt.f32.f16", torch.float16, torch.float32),
        ("cvt.f32.bf16", torch.bfloat16, torch.float32),
        ("cvt.rn.f16.f32", torch.float32, torch.float16),
        ("cvt.rn.bf16.f32", torch.float32, torch.bfloat16),
        ("cvt.rzi.s32.f32", torch.float32, torch.int32),
    ],
)
def test_conversions_are_those_of_torch(opcode: str, source: torch.dtype, result: torch.dtype, fresh: Emulator) -> None:
    """All numbers of 16 bits, and floats next to each of them and halfway between neighbours."""
    halves = torch.arange(2**16).to(torch.uint16)
    if source.itemsize == 2:
        given = halves.view(source)
    else:
        near = halves.view(result if result.is_floating_point else torch.float16).float()
        middle = (near[:-1].double() + near[1:].double()).div(2).float()
        given = torch.cat([near, middle, torch.nextafter(middle, near[1:]), torch.nextafter(middle, near[:-1])])
        if result == torch.int32:
            given = given[given.abs() < 2**31]  # torch does not say what becomes of others
        given = given[: len(given) // 1024 * 1024]
    out = torch.zeros(len(given), dtype=result)
    load, store = ("%h" if kind.itemsize == 2 else "%r" for kind in (source, result))
    execute(
        fresh,
        "mov.u32 %r30, %ctaid.x;\nmad.lo.u32 %r32, %r30, 1024, %t;\n"
        f"mul.wide.u32 %d1, %r32, {source.itemsize};\nmul.wide.u32 %d2, %r32, {result.itemsize};\n"
        "add.s64 %d3, %p0, %d1;\nadd.s64 %d4, %p1, %d2;\n"
        f"ld.global.b{8 * source.itemsize} {load}1, [%d3];\n{opcode} {store}2, {load}1;\n"
        f"st.global.b{8 * result.itemsize} [%d4], {store}2;",
        [given, out],
        threads=1024,
        blocks=len(given) // 1024,
    )
    assert torch.equal(out.nan_to_num(), given.to(result).nan_to_num())
    assert torch.equal(out.isnan(), given.to(result).isnan())


def test_a_branch_that_divides_a_warp_runs_both_sides_and_joins(fresh: Emulator) -> None:
    """Each lane counts in a loop as often as its number says, then lanes exchange results."""
    out = torch.zeros(2, 32, dtype=torch.int32)
    execute(
        fresh,
        "mov.u32 %r1, 0;\nLOOP:\nsetp.ge.u32 %q1, %r1, %t;\n@%q1 bra DONE;\nadd.u32 %r1, %r1, 1;\nbra.uni LOOP;\n"
        "DONE:\nshfl.sync.bfly.b32 %r2, %r1, 1, 31, -1;\nmul.wide.u32 %d1, %t, 4;\nadd.s64 %d2, %p0, %d1;\n"
        "st.global.b32 [%d2], %r1;\nst.global.b32 [%d2+128], %r2;",
        [out],
    )
    lanes = torch.arange(32)
    assert torch.equal(out.long(), torch.stack([lanes, lanes ^ 1]))


def test_an_unknown_instruction_is_refused_by_name(fresh: Emulator) -> None:
    with pytest.raises(EmulationError, match=r"line \d+, `tcgen05.alloc.*`: the emulator does not know"):
        execute(fresh, "tcgen05.alloc.cta_group::1.sync.aligned.b32 [%r1], 32;", [])


def test_a_warp_that_waits_for_one_that_has_to_wait_for_it_is_a_deadlock(fresh: Emulator) -> None:
    body = "setp.lt.u32 %q1, %t, 32;\n@%q1 bra ONE;\nbar.sync 1;\nbra.uni END;\nONE:\nbar.sync 2;\nEND:\n"
    with pytest.raises(EmulationError, match="DEADLOCK"):
        execute(fresh, body, [], threads=64)


@triton.jit
def _product(
    a,
    b,
    c,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    A_MN: tl.constexpr,
    B_MN: tl.constexpr,
    SCALED: tl.constexpr,
):
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    x = tl.load(a + k[:, None] * M + m[None, :]).T if A_MN else tl.load(a + m[:, None] * K + k[None, :])
    y = tl.load(b + k[:, None] * N + n[None, :]) if B_MN else tl.load(b + n[:, None] * K + k[None, :]).T
    if SCALED:  # so that A is in registers
        x = (x.to(tl.float32) * 2).to(x.dtype)
    tl.store(c + m[:, None] * N + n[None, :], tl.dot(x, y))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("m", "n", "k", "a_mn", "b_mn", "scaled"),
    [
        (64, 16, 16, False, False, False),  # swizzles of 32, 64 and 128 bytes
        (64, 64, 32, True, False, False),
        (128, 128, 64, True, True, False),
        (64, 256, 16, False, True, False),
        (64, 64, 128, False, False, True),
    ],
)
def test_products_of_small_integers_are_exact(
    m: int, n: int, k: int, a_mn: bool, b_mn: bool, scaled: bool, dtype: torch.dtype, fresh: Emulator
) -> None:
    a, b = torch.randint(-4, 5, (m, k)).to(dtype), torch.randint(-4, 5, (k, n)).to(dtype)
    out = torch.empty(m, n)
    given = a.T.contiguous() if a_mn else a, b if b_mn else b.T.contiguous()
    kernel = _product[(1,)](*given, out, m, n, k, a_mn, b_mn, scaled, num_warps=4)
    assert ("wgmma.mma_async" in kernel.asm["ptx"]) == (fresh.settings.sm == 90)
    assert torch.equal(out, (a.float() @ b.float()) * (2 if scaled else 1))


@triton.jit
def _pipelined(a, b, c, N: tl.constexpr, K, BLOCK_K: tl.constexpr):
    m, n, k = tl.arange(0, 64), tl.arange(0, N), tl.arange(0, BLOCK_K)
    total = tl.zeros((64, N), tl.float32)
    for start in tl.range(0, K, BLOCK_K, num_stages=3):
        x = tl.load(a + m[:, None] * K + start + k[None, :])
        y = tl.load(b + (start + k)[:, None] * N + n[None, :])
        total = tl.dot(x, y, total)
    tl.store(c + m[:, None] * N + n[None, :], total)


def pipeline() -> bool:
    a, b = torch.randint(-4, 5, (64, 512)).bfloat16(), torch.randint(-4, 5, (512, 64)).bfloat16()
    out = torch.empty(64, 64)
    _pipelined[(1,)](a, b, out, 64, 512, 64, num_warps=4)
    return torch.equal(out, a.float() @ b.float())


def norm() -> bool:
    x, delta = torch.randn(2, 3, 4096).bfloat16()
    given = (x, delta, x[0], 1e-5)
    return torch.allclose(add_rms_norm(*given)[1], reference.add_rms_norm(*given)[1])


def one_less(instruction: str) -> Callable[[str], str]:
    """Wait for one group less."""
    return lambda text: re.sub(rf"{instruction}(\s+)(\d+)", lambda m: instruction + m[1] + str(int(m[2]) + 1), text)


FAULTS: dict[str, tuple[Callable[[], bool], Callable[[str], str], str]] = {
    "no wait for copies": (
        pipeline,
        lambda t: re.sub(r"(cp\.async\.wait_group\s+)\d+", r"\g<1>99", t),
        "copy in flight",
    ),
    "one copy too few": (pipeline, one_less(r"cp.async.wait_group"), "copy in flight"),
    "no barriers in a pipeline": (pipeline, lambda t: re.sub(r"bar\.sync\s+0;", ";", t), "RACE in shared memory"),
    "no barrier in the norm": (
        norm,
        lambda t: re.sub(r"bar\.sync\s+0;", ";", t),
        "RACE in shared memory within a block",
    ),
    "a store past the end": (
        norm,
        lambda t: re.sub(r"(st\.global\.v4\.b32 \[ %rd\d+ \+ )0", r"\g<1>1048576", t),
        "OUT OF BOUNDS",
    ),
    "misaligned": (
        norm,
        lambda t: re.sub(r"(st\.global\.v4\.b32 \[ %rd\d+ \+ )0", r"\g<1>4", t),
        "MISALIGNED|OUT OF BOUNDS",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_faults_in_ptx_are_found(name: str, fresh: Emulator) -> None:
    run, change, expected = FAULTS[name]
    settings = fresh.settings
    settings.races, settings.order, settings.residents, settings.burst, settings.strict = True, 2, 6, 20, False
    assert run(), "wrong before there is a fault"
    assert not fresh.findings
    fresh.forget_programs()
    changed: list[bool] = []
    fresh.change_ptx = lambda text: changed.append((new := change(text)) != text) or new  # type: ignore[func-returns-value]
    for _ in range(4):
        try:
            run()
        except EmulationError:
            break
    assert any(changed)
    assert any(re.search(expected, finding.kind) for finding in fresh.findings), fresh.summary()


def test_products_that_are_not_waited_for_give_wrong_results(fresh: Emulator) -> None:
    if fresh.settings.sm != 90:
        pytest.skip("asynchronous products exist on sm_90")
    fresh.settings.copies, fresh.settings.strict = 1, False
    assert pipeline()
    fresh.forget_programs()
    fresh.change_ptx = one_less("wgmma.wait_group.sync.aligned")
    assert not pipeline() or any("not waited for" in finding.kind for finding in fresh.findings)


@triton.jit
def _neighbours(x, SIZE: tl.constexpr):
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    values = tl.load(x + at)
    tl.store(x + at + SIZE, values)


def test_a_finding_says_where_both_accesses_are(fresh: Emulator) -> None:
    fresh.settings.races, fresh.settings.residents, fresh.settings.burst = True, 2, 5
    with pytest.raises(EmulationError) as error:
        _neighbours[(2,)](torch.arange(384, dtype=torch.float32), 128, num_warps=4)
    report = str(error.value)
    assert re.search(r"^RACE in global memory between blocks", report)
    for line in ("values = tl.load(x + at)", "tl.store(x + at + SIZE, values)"):
        assert re.search(rf"test_emulator\.py:\d+  {re.escape(line)}", report), report
    assert (
        len(
            re.findall(
                r"_neighbours, launch 0, block [01], thread \d+\n +PTX line \d+: (?:@%\w+ )?(?:ld|st)\.global", report
            )
        )
        >= 2
    )


def test_overlapping_launches_race_unless_they_wait(fresh: Emulator) -> None:
    """The second of two programmatic launches reads what the first writes."""
    settings = fresh.settings
    settings.races, settings.residents, settings.burst, settings.strict = True, 4, 3, False

    def text(name: str, wait: str, body: str) -> str:
        return (
            f".visible .entry {name}(.param .u64 q0) {{\n.reg .b64 %d<4>;\n.reg .b32 %r<9>;\nld.param.u64 %d1, [q0];\n"
            f"griddepcontrol.launch_dependents;\n{wait}\nmov.u32 %r1, %tid.x;\nmul.wide.u32 %d2, %r1, 4;\n"
            f"add.s64 %d3, %d1, %d2;\n{body}\nret;\n}}\n"
        )

    write, read = "st.global.b32 [%d3], %r1;", "ld.global.b32 %r2, [%d3];"
    for wait, expected in (("griddepcontrol.wait;", False), ("", True)):
        fresh.findings.clear()
        for _ in range(8):  # schedules
            given: list[Any] = [torch.zeros(64, dtype=torch.int32)]
            with fresh.stream():
                for name, body in (("first", write), ("second", read)):
                    source = text(name, wait, body)
                    fresh.launch(fresh.load((source,), source, name), (1,), 64, 0, given, programmatic=True)
        assert any("between launches" in finding.kind for finding in fresh.findings) == expected, fresh.summary()


def test_numbers_are_passed_as_they_are(fresh: Emulator) -> None:
    out = torch.zeros(2)
    text = (
        ".visible .entry k(.param .u64 q0, .param .f32 q1, .param .s32 q2) {\n.reg .b64 %d1;\n.reg .b32 %r<4>;\n"
        "ld.param.u64 %d1, [q0];\nld.param.f32 %r1, [q1];\nld.param.s32 %r2, [q2];\ncvt.rn.f32.s32 %r3, %r2;\n"
        "st.global.v2.b32 [%d1], {%r1, %r3};\nret;\n}\n"
    )
    fresh.launch(
        fresh.load((text,), text, "k"), (1,), 1, 0, [out, struct.pack("f", 0.75), (-3 % 2**64).to_bytes(8, "little")]
    )
    assert out.tolist() == [0.75, -3]
