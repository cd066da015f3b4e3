"""The `medusa` command: `parsers` has the arguments of each subcommand, and a module of its own runs it.

Exit codes: 2 after bad input (with one clear line), 130 after Ctrl-C, 141 when nobody reads the output any more. torch
is imported when a command that computes runs: --help, --version, typing errors and trees answer at once,
and Ctrl-C also works during the seconds that the import takes.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import logging
import os
import re
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Any

COMMANDS = {
    "demo": "demo", "generate": "generate", "chat": "chat", "serve": "serve", "data": "data", "train": "train",
    "distill": "distill", "calibrate": "calibrate", "tune": "tune", "tree": "tree", "eval": "evaluate",
    "export": "export", "doctor": "doctor",
}  # fmt: skip
"""The module of each command, in the order in which people need them."""
EXAMPLES = """from a model and data of your own to a faster model:
  medusa train --init MODEL DATA --out heads.yaml
  medusa distill --config heads.yaml         (the data's own answers: --init --recipe given-answers, then medusa train)
  medusa calibrate --model HEADS --prompts OTHER_PROMPTS
  medusa tune --model HEADS
  medusa generate --model HEADS --prompt "..."

medusa COMMAND --help has examples of each command."""
INTERRUPTED = 130
BROKEN_PIPE = 141
"""Exit codes that shells report for programs ended by SIGINT and SIGPIPE."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand; return the process's exit code."""
    try:
        _prepare_streams()
        try:
            args = argument_parser().parse_args(argv)
            _quieten_libraries()
            with ended_by_interrupts() if argv is None else contextlib.nullcontext():
                command = importlib.import_module(f"{__name__}.{COMMANDS[args.command]}")
            return command.run(args)
        finally:  # also after --help: report output that cannot be written now, not when Python ends
            sys.stdout.flush()
    except BrokenPipeError:
        drop_output()
        return BROKEN_PIPE
    except (ValueError, OSError, MemoryError, FloatingPointError, ModuleNotFoundError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and type(error).__name__ != "OutOfMemoryError":  # torch's, of a GPU
            raise
        words = " ".join(str(error).splitlines()) or type(error).__name__
        # A name from a file must not control the terminal.
        print("medusa:", re.sub(r"[\x00-\x1f\x7f-\x9f]", lambda found: ascii(found[0])[1:-1], words), file=sys.stderr)
        drop_output()
        return 2
    except KeyboardInterrupt:
        print("medusa: interrupted", file=sys.stderr)
        return INTERRUPTED


@contextlib.contextmanager
def ended_by_interrupts() -> Iterator[None]:
    """End the process at once on Ctrl-C during imports: some libraries catch the exception and go on."""

    def end(*_: object) -> None:
        os.write(2, b"medusa: interrupted\n")
        os._exit(INTERRUPTED)

    usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # background jobs ignore SIGINT
    if not usual or threading.current_thread() is not threading.main_thread():  # only that thread can set handlers
        yield
        return
    before = signal.signal(signal.SIGINT, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def argument_parser() -> argparse.ArgumentParser:
    """Return the parser of all subcommands."""
    parser = argparse.ArgumentParser(
        prog="medusa",
        description="Medusa decoding for Llama-family models of Hugging Face Transformers.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action=_Version, help="print the version and exit")
    subparsers = parser.add_subparsers(metavar="COMMAND", dest="command", required=True)
    for name, module in COMMANDS.items():
        command = importlib.import_module(f"{__name__}.parsers.{module}")
        subparser = subparsers.add_parser(
            name,
            help=(command.__doc__ or "").splitlines()[0],
            description=command.__doc__,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.add_arguments(subparser)
    return parser


class _Version(argparse.Action):
    """Prints the version; it is looked up only when asked for."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(nargs=0, **settings)

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        """Print and exit."""
        from importlib.metadata import version

        print(f"medusa-kernels {version('medusa-kernels')}")
        parser.exit()


def _quieten_libraries() -> None:
    """Silence what other libraries print while they are imported and while they load weights.

    torchao warns about its own compiled extensions, PyTorch about torchao's enums, and bitsandbytes about an optional
    kernel for CPUs; none of this concerns our users.
    """
    for name in ("torchao", "torch.utils._pytree", "bitsandbytes.backends"):
        logging.getLogger(name).setLevel(logging.ERROR)
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
        os.environ.setdefault("TQDM_DISABLE", "1")  # `Progress` says itself whether it is shown


def _prepare_streams() -> None:
    """Open streams that the caller closed, and escape text that the locale's encoding cannot write.

    Piped input is UTF-8 whatever the locale says, with or without a byte order mark, and with any line ends. Bytes that
    are not UTF-8 do not end the reading: they stay in the text, and `check_text` refuses them.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115  (stays open)
    if isinstance(sys.stdin, io.TextIOWrapper) and not sys.stdin.isatty():
        with contextlib.suppress(io.UnsupportedOperation):  # it has been read from already
            sys.stdin.reconfigure(encoding="utf-8-sig", errors="surrogateescape", newline=None)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def drop_output() -> None:
    """Discard buffered output: otherwise Python fails to write it at exit and prints a traceback."""
    try:
        sys.stdout.flush()
    except OSError:
        with contextlib.suppress(OSError, ValueError):  # a test's stream has no descriptor
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
