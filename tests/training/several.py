"""Runs in each process of a launched test: trains jobs of a file, and counts which weights a process holds."""

import contextlib
import json
import os
import sys
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import workshop
from torch.distributed.tensor import DTensor

from medusa_decoding.checkpoints import pretrained
from medusa_decoding.training.loop import run as loop
from medusa_decoding.training.loop.processes import Processes
from medusa_decoding.training.loop.run import train
from medusa_decoding.training.loop.trainer import Trainer

RANK = int(os.environ["RANK"])
WHOLE = {"one": Processes(0, 1, torch.device("cpu"), False), "copies": Processes(RANK, 2, torch.device("cpu"), False)}
save, shard, load = Trainer.save, Processes.shard, pretrained.load_model


class StoppedError(Exception):
    pass


def run(job):
    """Train a job in parts: up to a step, and in two processes as they were launched, in "one", or in two "copies"."""
    place = Path(job["folder"]) / f"process-{RANK}"
    place.mkdir(parents=True)
    os.chdir(place)
    *given, options = job["config"]
    config = workshop.config(Path("run"), *given, **options)
    for number, (how, until) in enumerate(job["legs"]):

        def stopping(self, until=until):
            save(self)
            if self.at.done == until:
                raise StoppedError

        with contextlib.ExitStack() as stack:
            stack.enter_context(contextlib.suppress(StoppedError))
            stack.enter_context(patch.object(Trainer, "save", stopping))
            if how in WHOLE:
                stack.enter_context(patch.object(Processes, "join", lambda *_, how=how: WHOLE[how]))
            loads.clear()
            if how != "one" or RANK == 0:
                train(config, resume=number > 0)
        dist.barrier()
    if job.get("refusals"):
        check_refusals(*given)


def check_refusals(base, data, *given):
    """Have a setting, then data, then heads that the other process has not: both processes must refuse."""
    lines = Path(data).read_text().splitlines(keepends=True)
    own_data = Path("data.jsonl")
    own_data.write_text("".join(lines[RANK:]))
    for file, seed, words in (data, RANK, "optimisation.seed"), (own_data, 0, "data"):
        config = workshop.config(Path("refused"), base, file, *given, optimisation={"seed": seed})
        with pytest.raises(ValueError, match=f"^{words}: expected the same in all processes, got another in process 1"):
            train(config)
    make = loop.make_heads

    def other_heads(*given):
        heads = make(*given)
        with torch.no_grad():
            heads.b1 += RANK
        return heads

    config = workshop.config(Path("refused"), base, data, *given)
    with patch.object(loop, "make_heads", other_heads), pytest.raises(ValueError, match=r"^heads\.initial: expected"):
        train(config)


def watched(self, module, layers):
    """Write how many values this process holds before and after the weights are divided."""

    def held():
        shares = [weight.to_local() if isinstance(weight, DTensor) else weight for weight in module.parameters()]
        return sum(share.numel() for share in shares if share.device.type != "meta")

    before = held()
    shard(self, module, layers)
    counts = {"loads": len(loads), "before": before, "after": held()}
    counts["all"] = sum(weight.numel() for weight in module.parameters())
    Path("held.json").write_text(json.dumps(counts))


def counted(*arguments, **options):
    """Count that a model was read."""
    loads.append(arguments)
    return load(*arguments, **options)


loads = []
pretrained.load_model, Processes.shard = counted, watched
for one in json.loads(Path(sys.argv[1]).read_text()):
    run(one)
