"""Measure the CPU figures of README and docs again, on an idle machine: `python -m benchmarks.campaign --help`.

Models are trained first, two at a time. Then everything that is timed runs alone, and what is only counted, such as
tokens per step, runs two at a time. A command takes at most ten minutes. A stage that succeeded leaves a stamp for this
commit, so the same command continues a campaign that was stopped. Records are appended to
benchmarks/results/MACHINE.jsonl.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness import own_file

ROOT = Path(__file__).resolve().parents[1]
LIMIT = 590
"""Seconds of one command."""
NOT_MEASURED = ("docs", "*.md", "tests", "mkdocs.yml", "Makefile", "*.mk", "benchmarks/results", "benchmarks/plot*.py",
                "benchmarks/trace.py", "benchmarks/campaign.py")  # fmt: skip
"""Changes of these repeat no stage."""
CHAT = "runs/chat/heads/heads"
MODELS = [f"Llama-{size}-{dtype}" for size in ("254M", "127M") for dtype in ("bfloat16", "float32", "int8")]
SHORT_DTYPES = {"bfloat16": "bf16", "float32": "fp32", "int8": "int8"}
MADE = {
    "chat": CHAT,
    "draft": "{runs}/draft",
    "table-2-heads": "{runs}/table2/medusa-2/heads",
}
"""What is trained for other stages, and where it is afterwards."""


@dataclass(frozen=True)
class Stage:
    """One or more commands whose figures belong together.

    Attributes:
        commands: `bench_x ARGUMENTS` stands for `python -m benchmarks.bench_x ARGUMENTS`. In braces: an option of the
            campaign, `runs`, `medusa`, `python` or `records`.
        needs: options that name files.
        after: stages of `MADE`.
        pieces: whether a command that runs out of time is started again, because it continues where it was stopped.
        limit: whether a command may take only `LIMIT`.
    """

    commands: tuple[str, ...]
    needs: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    pieces: bool = False
    limit: bool = True


def _models(name: str, arguments: str, **options: tuple[str, ...]) -> Stage:
    shape, dtype = name.rsplit("-", 1)
    return Stage((f"bench_models --models {shape} --dtypes {dtype} {arguments}",), **options)  # type: ignore[arg-type]


def _steps(name: str, arguments: str) -> Stage:
    shape, dtype = name.rsplit("-", 1)
    return Stage((f"bench_cpu_step --models {shape} {arguments.format(dtype=SHORT_DTYPES[dtype])}",))


def _kinds(arguments: str, first: str, *kinds: str, chat: bool = False) -> Stage:
    names = shlex.join([first, *kinds])
    command = f"variants heads --seeds 0 --training-prompts 600 --first {shlex.quote(first)} --only {names} {arguments}"
    if not chat:
        return Stage((command,), pieces=True)
    command += " --model runs/chat/model/model --prompts 50 --prompts-from {chats} --held-out-from {other_chats}"
    return Stage((command,), ("chats", "other_chats"), ("chat",), pieces=True)


def _chat_ablation(name: str) -> Stage:
    """Three questions of each of MT-Bench's categories, and two to choose trees by."""
    command = (
        f"ablations {name} --dtype float32 --prompts {{mt_bench}} --limit 5 --out benchmarks/results/chat-ablations "
        f"--model {CHAT} --max-new-tokens 128"
    )
    return Stage((command,), ("mt_bench",), ("chat",))


TRAINED = {
    "chat": Stage(
        (
            "{python} -m recipes.demo.base --data {chats} --out runs/chat/base",
            "{medusa} train --config recipes/chat-cpu.yaml --resume --set 'data.train=[{{path: {chats}}}]' "
            "--set model.dtype={chat_dtype}",
            "{medusa} distill --config recipes/chat-heads-cpu.yaml --resume --set 'data.train=[{{path: {chats}}}]'",
        ),
        ("chats",),
        limit=False,
    ),
    "draft": Stage(("ablations draft --out {runs}/draft",), limit=False),
    "table-2-heads": Stage(("variants table-2 --out {runs}/table2 --train-only",), pieces=True),
}
# In float32 every way must write the plain loop's text.
ABLATIONS = {
    "figure-4": Stage(("ablations figure-4 --dtype float32",)),
    "dynamic": Stage(("ablations dynamic --dtype float32",)),
    "table-3": Stage(
        (
            "ablations table-3 --dtype float32 --medusa-1 {runs}/table2/medusa-1/heads "
            "--medusa-2 {runs}/table2/medusa-2/heads",
        ),
        after=("table-2-heads",),
    ),
    "figure-7": Stage(("ablations figure-7 --dtype float32 --draft {runs}/draft",), after=("draft",)),
    "figure-5": Stage(("ablations figure-5 --dtype float32",)),
    "figure-3b": Stage(
        (f"ablations figure-3b --prompts {{mt_bench}} --dtype float32 --model {CHAT} --nodes 4 --max-new-tokens 128",),
        ("mt_bench",),
        ("chat",),
    ),
}
TIMED = {
    "ops": Stage(("{python} -m pytest benchmarks/ --benchmark-only -q",)),
    "generate": Stage(("bench_generate --prompts 100",)),
    "adaptive": Stage(("bench_adaptive --prompts 60",)),
    "linear": Stage(("bench_decode_linear",)),
    "prefill-float32": Stage(("bench_prefill --shapes 254M --dtypes float32 --tokens 2048 4096 --rounds 3",)),
    "prefill-bfloat16": Stage(("bench_prefill --shapes 254M --dtypes bfloat16 --tokens 1024 2048 --rounds 3",)),
    **{
        f"steps-{name}": _steps(name, "--dtypes {dtype} --ways eager transformers-eager transformers-compiled")
        for name in MODELS
    },
    # What bytes and arithmetic predict for these steps on this machine.
    "roofline": Stage(("roofline --device cpu --write",)),
    **{f"models-{name}": _models(name, "--prompts 2 --draft {runs}/draft", after=("draft",)) for name in MODELS},
    **{
        f"long-{name}": _steps(name, "--prefix 4000 --dtypes {dtype} --ways eager transformers-eager")
        for name in MODELS[:3]
    },
    **{f"batch-4-{name}": _models(name, "--batches 4 --prompts 1 --nodes 4 8") for name in MODELS[:3]},
    **{f"batch-8-{name}": _models(name, "--batches 8 --prompts 1 --nodes 4") for name in MODELS[:3]},
    # The same with the small chat model within, whose text is harder to foresee.
    **{
        f"chat-models-{name}": _models(
            name,
            f"--prompts 4 --nodes 4 8 16 --heads {CHAT} --prompts-from {{mt_bench}} --max-new-tokens 64",
            needs=("mt_bench",),
            after=("chat",),
        )
        for name in MODELS[:3]
    },
    # Servers under load, next to `transformers serve`; the engine against the loop.
    "serve": Stage(
        (
            "bench_serve --seconds 5 --rounds 1",
            "bench_serve --model Llama-254M --clients 1 2 4 8 --seconds 8 --rounds 1 "
            "--servers medusa plain transformers",
            "bench_serve --scheduler",
        )
    ),
    **ABLATIONS,
    "alpaca": Stage(
        (
            "ablations figure-3b --dtype float32 --prompts {other_chats} --limit 80 --turns 1 "
            f"--out benchmarks/results/alpaca --model {CHAT} --nodes 4 --max-new-tokens 128",
        ),
        ("other_chats",),
        ("chat",),
    ),
    **{f"chat-{name}": _chat_ablation(name) for name in ("figure-4", "dynamic", "figure-5")},
    "tune": Stage(
        (
            f"{{medusa}} calibrate --model {CHAT} --prompts {{other_chats}} --dtype float32 --max-new-tokens 128 "
            "--turns 1 --out {runs}/calibration.json",
            f"{{medusa}} tune --model {CHAT} --dtype float32 --calibration {{runs}}/calibration.json --undecided auto",
            f"tune_sweep --model {CHAT} --dtype float32 --prompts {{mt_bench}} --rounds 2 --out {{records}}",
        ),
        ("other_chats", "mt_bench"),
        ("chat",),
        limit=False,
    ),
    "table-2": Stage(("variants table-2 --out {runs}/table2",), pieces=True),
}
_OWN = ("version 0.2", "parents, rank 32", "root and parents", "root, parents, kl")
# One training seed and half of the prompts, for time's sake.
COUNTED = {
    "heads": _kinds("--out {runs}/heads", *_OWN),
    "heads-sampled": _kinds("--out {runs}/heads-sampled --temperature 0.8", *_OWN),
    "chat-heads": _kinds("--out {runs}/chat-heads", *_OWN, chat=True),
    "chat-heads-sampled": _kinds("--out {runs}/chat-heads-sampled --temperature 0.8", *_OWN, chat=True),
    "chat-kinds": _kinds(
        "--out {runs}/chat-kinds", "own projections", "own, int8", "own, fp8", "own, two blocks", "shared lm_head",
        "shared, two blocks", chat=True,
    ),
}  # fmt: skip
# More than a day, so only if it is named.
APART = {
    "published": Stage(
        ("bench_published --model {gguf} --data {prompt_files} {published_heads} {llama}",),
        ("gguf", "prompt_files"),
        limit=False,
    )
}
STAGES = TRAINED | TIMED | COUNTED | APART


class Campaign:
    """Runs stages with the options of one command line."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.commit = os.environ.get("MEDUSA_COMMIT") or _measured_commit()
        has_bf16 = Path("/proc/cpuinfo").exists() and "avx512_bf16" in Path("/proc/cpuinfo").read_text()
        given = {name: shlex.quote(str(value)) for name, value in vars(options).items() if isinstance(value, Path)}
        self.words = given | {
            "python": sys.executable,
            "medusa": str(Path(sys.executable).with_name("medusa")),
            "runs": f"runs/campaign/{self.commit}",
            "records": str(own_file().relative_to(ROOT)),
            "chat_dtype": "bfloat16" if has_bf16 else "float32",
            "published_heads": f"--heads {given['published_heads']}" if options.published_heads else "",
            "llama": f"--llama {given['llama']}" if options.llama else "",
        }

    def run(self, names: Iterable[str]) -> bool:
        """Run stages in the order of training, timing and counting; return whether all of them succeeded."""
        names = set(names)
        names |= {needed for name in names for needed in STAGES[name].after}
        good = self._phase([name for name in TRAINED if name in names], together=2)
        good &= self._phase([name for name in (TIMED | APART) if name in names], together=1)
        return good & self._phase([name for name in COUNTED if name in names], together=2)

    def _phase(self, names: list[str], together: int) -> bool:
        environment = os.environ | {"PYTHONUNBUFFERED": "1", "PYTHONPATH": ".:python"}
        if together > 1:
            environment["OMP_NUM_THREADS"] = "1"
        with ThreadPoolExecutor(together) as pool:
            return all([*pool.map(lambda name: self.stage(name, environment), names)])

    def commands(self, name: str) -> list[str]:
        """Return a stage's commands as a shell reads them."""
        found = []
        for command in STAGES[name].commands:
            first = command.split()[0]
            module = "" if first.startswith("{") else "{python} -m benchmarks."
            found.append((module + command).format(**self.words))
        return found

    def stage(self, name: str, environment: dict[str, str]) -> bool:
        """Run one stage unless it is done; return whether it succeeded."""
        stage = STAGES[name]
        stamp = ROOT / "benchmarks/results/.stages" / self.commit / f"campaign-{name}"
        made = ROOT / MADE[name].format(**self.words) if name in MADE else stamp
        missing = [option for option in stage.needs if getattr(self.options, option) is None]
        if missing:
            print(f"{name}: this stage needs {', '.join('--' + option.replace('_', '-') for option in missing)}")
            return False
        if self.options.dry_run:
            print(f"=== {name}", *self.commands(name), sep="\n")
            return True
        if made.exists() and not self.options.force:
            print(f"{name}: done for {self.commit}; --force repeats it")
            return True
        print(f"=== {name}", flush=True)
        start = time.monotonic()
        for command in self.commands(name):
            if "recipes.demo.base" in command and (ROOT / "runs/chat/base").exists():
                continue
            if not _succeeds(command, stage, environment):
                print(f"=== {name}: failed: {command}", flush=True)
                return False
        stamp.parent.mkdir(parents=True, exist_ok=True)
        stamp.touch()
        print(f"=== {name}: {time.monotonic() - start:.0f} s", flush=True)
        return True


def _succeeds(command: str, stage: Stage, environment: dict[str, str]) -> bool:
    while True:
        try:
            limit = LIMIT if stage.limit else None
            return subprocess.run(shlex.split(command), cwd=ROOT, env=environment, timeout=limit).returncode == 0
        except subprocess.TimeoutExpired:
            if not stage.pieces:
                return False


def _measured_commit() -> str:
    """Return the last commit that changed something that is measured."""
    left_out = [f":!{path}" for path in NOT_MEASURED]
    command = ["git", "log", "-1", "--format=%h", "--abbrev=12", "--", ".", *left_out]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return 1 if a stage failed."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.campaign",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=f"stages: {', '.join(STAGES)}",
    )
    parser.add_argument("stages", nargs="*", metavar="STAGE", help="default: all but `published`")
    files = {
        "chats": "conversations to train on (train.jsonl.gz)",
        "other-chats": "other conversations to measure on (dev.jsonl.gz)",
        "mt-bench": "MT-Bench's questions (mt_bench.jsonl)",
        "gguf": "a published model, for the stage `published`",
        "prompt-files": "a folder with the prompts that the published model answers",
        "published-heads": "its heads",
        "llama": "an interpreter that has xllamacpp",
    }
    for name, words in files.items():
        parser.add_argument(f"--{name}", type=Path, metavar="FILE", help=words)
    parser.add_argument("--force", action="store_true", help="repeat stages that are done for this commit")
    parser.add_argument("--dry-run", action="store_true", help="print the commands")
    options = parser.parse_args(arguments)
    wanted = options.stages or [*TRAINED, *TIMED, *COUNTED]
    if unknown := [name for name in wanted if name not in STAGES]:
        parser.error(f"unknown stages: {', '.join(unknown)}")
    return int(not Campaign(options).run(wanted))


if __name__ == "__main__":
    sys.exit(main())
