"""Where a figure was taken, for records that are kept: machine, versions, commit, command, date.

The fields are those of the records that the repository's benchmarks append, a JSON line each. This module does not know
what was measured.
"""

from __future__ import annotations

import datetime
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from medusa_decoding.model import MedusaModel
from medusa_decoding.provenance import versions
from medusa_decoding.tuning.naming import cpu_name
from medusa_decoding.tuning.stored import LIBRARIES

COMMANDS = ("medusa", "__main__.py")
"""What the program is called when a command runs."""


def machine(device: torch.device) -> dict[str, Any]:
    """Describe the device that figures are taken on."""
    if device.type == "cuda":
        return {
            "name": torch.cuda.get_device_name(device),
            "cuda": torch.version.cuda,
            "gpus": torch.cuda.device_count(),
        }
    return {
        "name": cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "isa": torch.backends.cpu.get_cpu_capability(),
    }


def shapes(model: MedusaModel) -> dict[str, Any]:
    """Return the sizes of a base model and its heads."""
    config, heads = model.trunk.config, model.heads
    found: dict[str, Any] = {
        "class": type(model.trunk.causal).__name__,
        "hidden_size": config.hidden_size,
        "layers": config.num_hidden_layers,
        "vocab_size": config.vocab_size,
    }
    if heads is not None:
        found |= {"heads": heads.num_heads, "blocks": heads.num_layers, "candidates": heads.num_candidates}
    return found


def provenance(device: torch.device) -> dict[str, Any]:
    """Return machine, versions, commit, command and date."""
    program = Path(sys.argv[0]).name
    return {
        "machine": machine(device),
        "versions": versions(*LIBRARIES),
        "commit": commit(),
        "command": shlex.join(["medusa", *sys.argv[1:]]) if program in COMMANDS else "unknown",
        "date": datetime.date.today().isoformat(),
    }


def commit() -> str:
    """Return the commit of the checkout that this file is part of, marked if tracked files differ from it.

    The environment variable MEDUSA_COMMIT goes first. An installed package has none: "unknown".
    """
    if os.environ.get("MEDUSA_COMMIT"):
        return os.environ["MEDUSA_COMMIT"]
    here = Path(__file__).resolve()
    try:
        # A package may be installed into a folder of somebody else's repository.
        _git("ls-files", "--error-unmatch", here.name)
        head = _git("rev-parse", "--short=12", "HEAD").strip()
        changed = _git("status", "--porcelain", "--untracked-files=no", "--", ":/", ":!/benchmarks/results")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head + ("+changes" if changed else "")


def append(path: Path, record: Mapping[str, Any]) -> None:
    """Add a record to a file, as a line."""
    with path.open("a", encoding="utf-8") as lines:
        lines.write(json.dumps(record) + "\n")


def _git(*arguments: str) -> str:
    folder = Path(__file__).resolve().parent
    done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout
