"""Servers under load on the embedded model: `medusa serve` with trees and without, and `transformers serve`.

    python -m benchmarks.bench_serve
    python -m benchmarks.bench_serve --model Llama-254M --clients 1 2 4 --seconds 10 --rounds 1
    python -m benchmarks.bench_serve --scheduler

With --model, the embedded model sits within a larger one with the same texts (`benchmarks.enlarged`).

All servers run on this machine, float32, each with all threads; the load comes from one more process on the same cores.
Clients are closed loops: each sends its next request when its answer is complete. A cell is one server with some number
of clients for some seconds. For each number of clients the servers take turns, in a random order, with the same
requests (held-out ones, in a chat, greedy); meanwhile the other servers are stopped by a signal. Tokens are counted
within the seconds; latencies are those of all answers that began in them. Texts must be identical.

With --scheduler: what the engine of `medusa serve` costs for a single request. The engine and `MedusaModel.generate`
take turns with the same requests and the same tree, within this process.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import queue
import random
import shlex
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import enlarged, harness
from benchmarks.ablations.setup import NEW, prompts
from benchmarks.bench_models import MODELS
from benchmarks.bench_step import MODELS as CONFIGS
from benchmarks.serve_load import SERVERS, Answer, Server, load, started
from medusa_decoding.demo import CHECKPOINT
from medusa_decoding.evaluation import interval
from medusa_decoding.model import MedusaModel, MedusaOutput
from medusa_decoding.provenance import without_folders
from medusa_decoding.serving.engine import Engine
from medusa_decoding.serving.ticket import Delta
from medusa_decoding.trees.tree import Tree
from recipes.demo.requests import draw

CLIENTS = (1, 2, 4, 8, 16)
PER_CELL = 256
"""Requests of a cell; a faster server begins again."""
NODES = 8
"""Nodes of the tree that --scheduler compares with, beside plain decoding."""


@dataclass
class Cell:
    """What one server did with some number of clients, over all rounds.

    Attributes:
        seconds: of each round.
        tokens: within the seconds, of each round.
        requests: answers within the seconds; parts of answers count as parts.
        answers: all of them.
    """

    seconds: float
    tokens: list[float] = field(default_factory=list)
    requests: float = 0.0
    answers: list[Answer] = field(default_factory=list)

    def add(self, end: float, answers: list[Answer]) -> None:
        """Add a round."""
        shares = [answer.share_before(end) for answer in answers]
        self.tokens.append(sum(answer.tokens * share for answer, share in zip(answers, shares, strict=True)))
        self.requests += sum(shares)
        self.answers += answers

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return sum(self.tokens) / (self.seconds * len(self.tokens))

    def figures(self) -> dict[str, Any]:
        """Return its figures; latencies in seconds."""
        return {
            "tokens_per_second": self.rate,
            "tokens_per_second_of_rounds": [tokens / self.seconds for tokens in self.tokens],
            "requests_per_second": self.requests / (self.seconds * len(self.tokens)),
            "answers": len(self.answers),
            "latency": percentiles([answer.ended - answer.began for answer in self.answers], 50, 90, 99),
            "first_token": percentiles(
                [answer.arrived[0][0] - answer.began for answer in self.answers if answer.arrived], 50, 99
            ),
        }


def percentiles(values: Sequence[float], *which: int) -> dict[str, float]:
    """Return percentiles by name."""
    return {f"p{one}": float(np.percentile(values, one)) for one in which}


def measure(
    names: Sequence[str],
    clients: Sequence[int],
    seconds: float,
    rounds: int,
    threads: int,
    checkpoint: Path = CHECKPOINT,
) -> dict[str, Any]:
    """Start the servers of a folder with `base` and `heads`, load them in turn, and return all figures."""
    cells = {count: {name: Cell(seconds) for name in names} for count in clients}
    requests = iter([one.text for one in draw(PER_CELL * rounds * len(clients), seed=11, held_out=True)])
    warm_up, shuffler = [one.text for one in draw(8, seed=3)], random.Random(0)
    with started(names, threads, max(clients), checkpoint) as servers:
        for server in servers.values():
            with server.running():
                server.wait()
                asyncio.run(load(server, warm_up, 2, 1.0))
        for _, count in itertools.product(range(rounds), clients):
            batch = list(itertools.islice(requests, PER_CELL))

            def run(server: Server, batch: list[str] = batch, count: int = count) -> tuple[float, list[Answer]]:
                with server.running():
                    return asyncio.run(load(server, batch, count, seconds))

            ways = {name: lambda _, server=server: run(server) for name, server in servers.items()}
            for name, (end, answers) in harness.in_turn(ways, None, shuffler).items():
                cells[count][name].add(end, answers)
    first = names[0]
    return {
        "seconds": seconds, "rounds": rounds, "threads": threads, "dtype": "float32", "max_new_tokens": NEW,
        "servers": {name: shlex.join(without_folders(server.command)) for name, server in servers.items()},
        "clients": {count: {name: cell.figures() for name, cell in of.items()} for count, of in cells.items()},
        f"{first}_over": {
            count: {name: over(of[first], of[name]) for name in names if name != first} for count, of in cells.items()
        },
        "same_text": same_text(cells),
    }  # fmt: skip


def over(one: Cell, other: Cell) -> dict[str, Any]:
    """Return the ratio of two servers' tokens per second, also of each round."""
    pairs = zip(one.tokens, other.tokens, strict=True)
    return {
        "ratio": one.rate / other.rate if other.rate else None,
        "rounds": [a / b if b else None for a, b in pairs],
    }


def same_text(cells: Mapping[int, Mapping[str, Cell]]) -> dict[str, dict[str, int]]:
    """Return for each pair of servers how many requests both have answered, and how many with the same text."""
    texts: dict[str, dict[str, str]] = {}
    for of in cells.values():
        for name, cell in of.items():
            texts.setdefault(name, {}).update((answer.request, answer.text) for answer in cell.answers)
    found = {}
    for one, other in itertools.combinations(texts, 2):
        both = texts[one].keys() & texts[other].keys()
        same = sum(texts[one][request] == texts[other][request] for request in both)
        found[f"{one} and {other}"] = {"compared": len(both), "same": same}
    return found


def measure_scheduler(count: int) -> dict[str, Any]:
    """Compare the engine with one request to the loop alone: plain decoding, and one tree."""
    model = MedusaModel.from_pretrained(CHECKPOINT / "heads", dtype=torch.float32)
    accuracies = json.loads((CHECKPOINT / "measured.json").read_text())["calibration"]
    inputs, figures = prompts(held_out=True, count=count, seed=11), {}
    with Engine(model) as engine:
        for name, tree in (("plain", Tree([])), (f"{NODES} nodes", Tree.optimal(accuracies, NODES))):
            figures[name] = _against_loop(model, engine, tree, inputs)
    return {"prompts": count, "max_new_tokens": NEW, "dtype": "float32", "backend": model.backend, "trees": figures}


def _against_loop(model: MedusaModel, engine: Engine, tree: Tree, inputs: list[torch.Tensor]) -> dict[str, Any]:
    texts: dict[str, list[list[int]]] = {"loop": [], "engine": []}
    steps = 0

    def loop(ids: torch.Tensor) -> int:
        nonlocal steps
        output = model.generate(ids, max_new_tokens=NEW, tree=tree)
        assert isinstance(output, MedusaOutput)
        texts["loop"].append(output.sequences[0, ids.shape[1] :].tolist())
        steps += output.steps
        return output.steps

    def through_engine(ids: torch.Tensor) -> int:
        delivered: queue.SimpleQueue[Delta] = queue.SimpleQueue()
        (ticket,) = engine.submit(ids[0].tolist(), lambda _, delta: delivered.put(delta), max_new_tokens=NEW, tree=tree)
        tokens, finish = [], None
        while finish is None:
            delta = delivered.get()
            finish = delta.finish
            tokens += delta.tokens
        texts["engine"].append(tokens)
        return len(ticket.accepted)

    ways = {"loop": loop, "engine": through_engine}
    for way in ways.values():
        way(inputs[0])  # warms up
    steps = 0
    for written in texts.values():
        written.clear()
    samples = harness.interleaved(ways, inputs)
    assert texts["engine"] == texts["loop"], "float32: the engine writes what the loop writes"
    per_step = {name: sum(seconds for _, seconds in of) / steps for name, of in samples.items()}
    rows = [
        (engine_one[1], loop_one[1]) for engine_one, loop_one in zip(samples["engine"], samples["loop"], strict=True)
    ]
    ratio = interval.ratio(rows)
    assert ratio is not None
    return {
        "steps": steps,
        "new_tokens": sum(map(len, texts["loop"])),
        "seconds_per_step": per_step,
        "engine_over_loop_seconds": {"ratio": ratio.value, "low": ratio.low, "high": ratio.high},
    }


def main() -> None:
    """Measure, print the figures and append them to the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scheduler", action="store_true", help="measure the engine against the loop instead")
    parser.add_argument("--prompts", type=int, default=100, help="with --scheduler: held-out requests (default: 100)")
    parser.add_argument("--clients", type=int, nargs="+", default=CLIENTS, help="numbers of clients (default: 1 to 16)")
    parser.add_argument("--seconds", type=float, default=8.0, help="of a cell (default: 8)")
    parser.add_argument("--rounds", type=int, default=2, help="cells per server and number of clients (default: 2)")
    parser.add_argument("--servers", nargs="+", choices=SERVERS, default=[*SERVERS], help="default: all")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of each server (default: all)")
    parser.add_argument("--model", choices=MODELS, help="a larger model with the embedded one's texts")
    args = parser.parse_args()
    if args.scheduler:
        figures, name = measure_scheduler(args.prompts), "serve-scheduler-demo"
    else:
        with tempfile.TemporaryDirectory() as folder:
            checkpoint = CHECKPOINT if args.model is None else enlarged.save(CONFIGS[args.model](), Path(folder))
            figures = measure(args.servers, args.clients, args.seconds, args.rounds, args.threads, checkpoint)
        name = "serve-demo" if args.model is None else f"serve-{args.model}"
    print(json.dumps(figures, indent=1))
    print(harness.write_record(name, figures))


if __name__ == "__main__":
    main()
