"""Put faults into the kernels' source, one at a time, and record who finds them.

Each fault is made in a copy of the checkout. Then a few of the project's tests run there three times: in Triton's
interpreter, on compiled kernels comparing values, and on compiled kernels with races looked for.

    PYTHONPATH=tests python -m emulator.kernel_faults [--only WORDS] [--write]
"""

# ruff: noqa: E501 - a fault per line
from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from emulator import native

ROOT = native.HERE.parents[1]
TABLE = ROOT / "benchmarks" / "results" / "kernel-faults.md"
TRITON = "medusa_kernels/_triton/"


@dataclass(frozen=True)
class Fault:
    """One change of a kernel's source.

    Attributes:
        what: what is wrong then.
        file: the file, from the root.
        old, new: texts; the old one must occur exactly once.
        tests: arguments of pytest that choose a few tests of the kernel.
        sm: the target.
    """

    what: str
    file: str
    old: str
    new: str
    tests: str
    sm: int = 80


ATTENTION = TRITON + "tree_attention_kernels.py"
MERGED = "tests/kernels/test_tree_attention.py -k 'merges_to_the_same_bits and None and float16'"
MATCHES = "tests/kernels/test_tree_attention.py -k 'caches_of_any_strides or no_edges'"
LINEAR = TRITON + "decode_linear.py"
LINEAR_TESTS = "tests/kernels/test_decode_linear.py -k '(do_not_fill or parts_add_up or biases_are_added) and float16 and not bfloat16'"
SELECT_TESTS = "tests/kernels/test_tree_select.py -k 'matches_a_sort or by_hand or many_candidates'"
ACCEPT_TESTS = "tests/kernels/test_tree_accept.py -k 'matches_a_walk or by_hand or ends_at_eos'"
ROPE_TESTS = "tests/kernels/test_rope_append.py -k 'transformers or outside_the_cache or any_strides'"
VERIFY_TESTS = "tests/kernels/test_tree_verify.py -k '(fp64_in_every_dtype or more_nodes) and float16 and not bfloat16 or outside_of_the_noise'"
HEADS_TESTS = "tests/kernels/test_heads_topk.py -k '(fp64_in_every_dtype or more_rows) and float16 and not bfloat16'"
NORM_TESTS = "tests/kernels/test_add_rms_norm.py -k '(all_rows_sizes or parts) and float16 and not bfloat16'"
DRAW_TESTS = "tests/kernels/test_draw_tokens.py -k 'of_equal_logits or out_of_range or several_tiles'"
NOISE_TESTS = "tests/kernels/test_gumbel_noise.py -k 'matches_fp64 or vocabularies or nothing_but'"
STREAM_TESTS = "tests/emulator/test_generation.py -k 'overlapped_launches and bf16'"

FAULTS = [
    Fault(
        "carried value lost: both begin as one value (finding 60)",
        ATTENTION,
        "            b_sum = b_sum * b_shrink + b_part\n            b_p, b_part, b_shrink, b_high = _softmax(b_scores, b_high,",
        "            b_sum = b_sum * b_shrink + b_part\n            b_high = b_next\n"
        "            b_p, b_part, b_shrink, b_next = _softmax(b_scores, b_high,",
        "tests/kernels/test_tree_attention.py -k 'overlapped_products'",
        90,
    ),
    Fault("mask of the tree's rows missing", ATTENTION, "m_kv = m_t[:, None] & m_d[None, :]", "m_kv = m_d[None, :]", MATCHES),
    Fault("keys' stride for the values", ATTENTION, "o_v = o_t[:, None] * stride_v_s", "o_v = o_t[:, None] * stride_k_s", MATCHES),
    Fault("batch stride of the values missing", ATTENTION, "v_cache + slot * stride_v_b", "v_cache", "tests/kernels/test_tree_attention.py -k ragged_rows"),
    Fault("slot of another row", ATTENTION, "tl.load(slots + i_b) if HAS_SLOTS", "tl.load(slots) if HAS_SLOTS", "tests/kernels/test_tree_attention.py -k slots_name"),
    Fault("ancestor word of another block", ATTENTION, ">> (first_node % 64)", ">> (first_node % 32)", MATCHES),
    Fault("window one key wider", ATTENTION, "b_key_position[None, :] < window)", "b_key_position[None, :] <= window)", MATCHES),
    Fault("barrier before the counter missing", ATTENTION, "            tl.debug_barrier()\n", "", MERGED),
    Fault("counter not reset", ATTENTION, "                tl.store(counter, 0)\n", "", MERGED),
    Fault("relaxed counter", ATTENTION, 'sem="acq_rel"', 'sem="relaxed"', MERGED),
    Fault("last but one program merges", ATTENTION, "== used - 1", "== used - 2", MERGED),
    Fault("share of another tile", ATTENTION, "rows + i_tile * BLOCK_M\n", "rows\n", "tests/kernels/test_tree_attention.py -k many_small_parts"),
    Fault(
        "scale of earlier sums missing", ATTENTION, "b_acc * b_shrink[:, None], input", "b_acc, input", MATCHES
    ),
    Fault("rows of the weight not limited", LINEAR, "tl.minimum(o_n, features - 1)", "o_n", LINEAR_TESTS),
    Fault("mask of the last columns missing", LINEAR, "b_w = tl.load(p_w + k, mask=m_k, other=0.0)", "b_w = tl.load(p_w + k)", LINEAR_TESTS),
    Fault("bias in every part", LINEAR, "tl.where(i_s == 0, features, 0)", "features", LINEAR_TESTS),
    Fault("parts overlap by one step", LINEAR, "begin, end = i_s * steps // PARTS * BLOCK_K,", "begin, end = tl.maximum(i_s * steps // PARTS - 1, 0) * BLOCK_K,", LINEAR_TESTS),
    Fault("no wait for the launch before", LINEAR, "        tl.extra.cuda.gdc_wait()\n", "", STREAM_TESTS, 90),
    Fault(
        "compensation lost", TRITON + "streaming.py", "return total, (total - b_acc) - b_y", "return total, b_comp",
        "tests/kernels/test_decode_linear.py -k 'do_not_fill and float32'",
    ),
    Fault("mask of the sum missing", TRITON + "add_rms_norm.py", "tl.store(total + i_m * size + o_h, b_x, mask=m_h)", "tl.store(total + i_m * size + o_h, b_x)", NORM_TESTS),
    Fault("stride between parts", TRITON + "add_rms_norm.py", "part * rows.to(tl.int64) * stride_delta_m", "part * stride_delta_m", NORM_TESTS),
    Fault("sign of the rotation", TRITON + "rope_append.py", "(-b_second.to(tl.float32))", "(b_second.to(tl.float32))", ROPE_TESTS),
    Fault("rows outside the cache are written", TRITON + "rope_append.py", "m_out = m_in & (o_s >= 0) & (o_s < tl.where((slot >= 0) & (slot < sequences), cache_rows, 0))", "m_out = m_in", ROPE_TESTS),
    Fault("threads read what faster ones write", TRITON + "tree_accept.py", "    tl.debug_barrier()\n", "", ACCEPT_TESTS),
    Fault("one token too many", TRITON + "tree_accept.py", "mask=(o_p < found) & (emitted", "mask=(o_p <= found) & (emitted", ACCEPT_TESTS),
    Fault("numbers read before they are written", TRITON + "tree_select.py", "    tl.debug_barrier()\n", "", SELECT_TESTS),
    Fault("of equal costs one too many", TRITON + "tree_select.py", "tl.cumsum(b_equal, 0) <= room", "tl.cumsum(b_equal, 0) <= room + 1", SELECT_TESTS),
    Fault("masked words not excluded", TRITON + "tree_verify.py", "        b_x = tl.where(m_v[None, :], b_x, -float(\"inf\"))\n", "", VERIFY_TESTS),
    Fault("noise of any row", TRITON + "tree_verify.py", "mask=m_noise[:, None] & m_v[None, :], other=0.0)", "mask=m_v[None, :], other=0.0)", VERIFY_TESTS),
    Fault("share of the sum not scaled", TRITON + "heads_topk.py", "b_sum = b_sum * tl.exp(b_peak - b_high)", "b_sum = b_sum", HEADS_TESTS),
    Fault("words beyond the vocabulary", TRITON + "heads_topk.py", "tl.where(m_x, ordered(b_x), NO_ORDER)", "ordered(b_x)", HEADS_TESTS),
    Fault("ties seen are not counted", TRITON + "draw_tokens.py", "            seen += tl.sum(b_in_row, 0)\n", "", DRAW_TESTS),
    Fault("last piece of noise not masked", TRITON + "gumbel_noise.py", "-tl.log(b_wait), mask=o_v < vocabulary)", "-tl.log(b_wait))", NOISE_TESTS),
]  # fmt: skip


def _copy(target: Path) -> None:
    """Copy what tests of kernels need; the rest is linked."""
    for name in ("medusa_kernels", "tests", "csrc", "pyproject.toml"):
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, target / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, target / name)
    for name in ("benchmarks", "python", "build"):
        (target / name).symlink_to(ROOT / name)


def _failures(folder: Path, tests: str, options: str, **variables: str) -> list[str]:
    """Run tests in a copy; return the errors of those that failed, and complain if none ran."""
    paths = [folder, folder / "python", folder / "tests"]
    # pytest leaves errors out of its summary where the terminal is narrow.
    wide = {"COLUMNS": "500", "OMP_NUM_THREADS": "1"}
    environment = os.environ | wide | {"PYTHONPATH": os.pathsep.join(map(str, paths)), **variables}
    words = [word.strip("'") for word in re.findall(r"'[^']*'|\S+", tests)]
    command = [sys.executable, "-m", "pytest", "-q", "-rf", "--maxfail=1", "--tb=line", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, *options.split(), *words], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode < 0:
        return ["CRASHED"]
    if done.returncode not in (0, 1):
        raise RuntimeError(f"{tests}: no test ran to its end:\n{done.stdout[-3000:]}{done.stderr[-2000:]}")
    return [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]


def try_fault(fault: Fault) -> tuple[str, str, str]:
    """Return what the interpreter's tests, the compiled kernels' values and the emulator's own checks found."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _copy(folder)
        path = folder / fault.file
        text = path.read_text()
        if text.count(fault.old) != 1:
            raise ValueError(f"{fault.file}: expected {fault.old!r} once, got it {text.count(fault.old)} times")
        text = text.replace(fault.old, fault.new)
        if "b_next" in fault.new:  # begins as the value of another variable, before the loop
            before = "        b_part, b_shrink = b_sum, b_sum\n"
            text = text.replace(before, before + "        b_next = b_high\n")
        path.write_text(text)
        interpreted = fault.tests.startswith("tests/kernels") and _failures(
            folder, fault.tests, "", TRITON_INTERPRET="1"
        )
        options = f"-p emulator.plugin --sm {fault.sm}"
        values = _failures(folder, fault.tests, options)
        checks = [] if _stopped(values) else _failures(folder, fault.tests, options + " --races")
    found = "found" if interpreted else "-" if fault.tests.startswith("tests/kernels") else "cannot run"
    found = "crashes" if interpreted == ["CRASHED"] else found
    return found, "found" if _wrong(values) else "-", _stopped(values) or _stopped(checks) or "-"


def _wrong(failures: list[str]) -> bool:
    return any("EmulationError" not in line for line in failures)


def _stopped(failures: list[str]) -> str:
    """Return the kind of the emulator's first finding."""
    kinds = (re.search(r"EmulationError: ([A-Z]{3,}[^:(]*)", line) for line in failures)
    return next((kind[1].strip() for kind in kinds if kind), "")


def main() -> None:
    """Try faults and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="faults with these words in their description")
    parser.add_argument("--write", action="store_true", help=f"write {TABLE.relative_to(ROOT)}")
    options = parser.parse_args()
    lines = ["| fault | kernel | interpreter | values, compiled | checks of the emulator |", "|---|---|---|---|---|"]
    for fault in FAULTS:
        if options.only in fault.what:
            kernel = Path(fault.file).stem.removesuffix("_kernels")
            lines.append(f"| {fault.what} | {kernel} | " + " | ".join(try_fault(fault)) + " |")
            print(lines[-1], flush=True)
    if options.write:
        TABLE.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
