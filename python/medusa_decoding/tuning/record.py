"""Where a figure was taken, for records that are kept: machine, versions, commit, command, date.

The fields are those of the records that the repository's benchmarks append, a JSON line each. This module does not know
what was measured.
"""

from __future__ import annotations

import datetime
import os
import shlex
import sys
from pathlib import Path
from typing import Any

import torch

from medusa_decoding.model import MedusaModel
from medusa_decoding.provenance import commit, cpu_name, versions, without_folders
from medusa_decoding.tuning.select import LIBRARIES


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
    config, heads = model.backbone.config, model.heads
    found: dict[str, Any] = {
        "class": type(model.backbone.causal).__name__,
        "hidden_size": config.hidden_size,
        "layers": config.num_hidden_layers,
        "vocab_size": config.vocab_size,
    }
    if heads is not None:
        found |= {"heads": heads.num_heads, "blocks": heads.num_layers, "candidates": heads.num_candidates}
    return found


def provenance(device: torch.device) -> dict[str, Any]:
    """Return machine, versions, commit, command and date."""
    return {
        "machine": machine(device),
        "versions": versions(*LIBRARIES),
        "commit": commit(),
        "command": command(),
        "date": datetime.date.today().isoformat(),
    }


def command() -> str:
    """Return the command that runs; "unknown" where another program has called the package."""
    program = Path(sys.argv[0])
    # Every package that is run with -m is called __main__.py.
    own = program.name == "medusa" or program.parts[-2:] == ("medusa_decoding", "__main__.py")
    return shlex.join(["medusa", *without_folders(sys.argv[1:])]) if own else "unknown"
