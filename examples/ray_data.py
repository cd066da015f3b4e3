"""Run `medusa generate --prompts` or the first half of `medusa distill` on a Ray cluster, one model per actor.

python examples/ray_data.py --out ANSWERS generate --chat --prompts questions.jsonl
python examples/ray_data.py --address auto --actors 4 --out RECORDS distill --config heads.yaml

Every record needs an id. OUT/records gets one or more lines of JSON per id: those of the command, with the id. The
same command continues a run that was stopped. OUT is on storage that all nodes share (docs/cluster.md).
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import hashlib
import json
import math
import pickle
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow
import ray
from ray.data.block import BlockMetadata
from ray.data.checkpoint import CheckpointConfig
from ray.data.datasource import BlockBasedFileDatasink, Datasource, ReadTask

from medusa_decoding.cli import _arguments, _batch, argument_parser, distill
from medusa_decoding.cli.train import read_config
from medusa_decoding.evaluation.prompts import read_prompts
from medusa_decoding.files import read_json_object, write_json
from medusa_decoding.options import SLOTS
from medusa_decoding.serving.answers import Answers
from medusa_decoding.training.config import Config, SourceConfig
from medusa_decoding.training.data.encoding import ChatEncoder
from medusa_decoding.training.data.records import Report, read_records
from medusa_decoding.training.data.sources import BadRecordError, raw_records
from medusa_decoding.training.distill.distill import Distillation, GenerationReport
from medusa_decoding.training.loop.backbone import load_tokenizer

SMALL = 0.1
"""CPUs of a task that only reads or writes rows."""
FILTER = 1 + 4 * SMALL
"""CPUs that are kept free: Ray's actor that leaves out finished rows takes one, and tasks must run next to it."""


class Generate:
    """Answers prompts as `medusa generate --prompts` does; `args` are those of that command."""

    def __init__(self, args: argparse.Namespace) -> None:
        _arguments.resolve_device(args)
        self.args, self.encoder = args, _batch.load_encoder(args)
        self.model = _arguments.load_model(args)
        self.context, self.open = 0, contextlib.ExitStack()

    def lines(self, prompts: Mapping[int, Any]) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield the index of each prompt and its line."""
        ids = {n: self.encoder.encode(prompt.messages, tools=prompt.tools) for n, prompt in prompts.items()}
        limit = self.model.backbone.context_limit
        room = limit - self.args.max_new_tokens
        for number in [number for number, tokens in ids.items() if not 1 <= len(tokens) <= room]:
            yield number, {"index": number, "error": f"expected 1 to {room} tokens, got {len(ids.pop(number))}"}
        batch = _batch.Batch(self.args, self.model, self.encoder, prompts, ids)
        if batch.context > self.context:  # the first block, or one with longer prompts
            self.open.close()
            self.context = min(limit, 1 << (batch.context - 1).bit_length())
            answers = Answers(self.model, self.args.slots or SLOTS, self.context, **batch.common)
            self.answers = self.open.enter_context(answers)
        for answer in batch.each(self.answers, ids):
            yield answer.asked, batch.line(answer)


class Distill:
    """Answers seeds as `medusa distill` does."""

    def __init__(self, config: Config) -> None:
        data, tokenizer = config.data, load_tokenizer(config.model)
        length = None if data.overlong == "split" else data.length
        self.how = Distillation(distill.load(config), ChatEncoder.of(tokenizer, data), config.generation, length)
        self.answers = self.how.answers().__enter__()

    def lines(self, records: Mapping[int, Any]) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield the number of each seed and its records."""
        seeds = []
        for number, record in records.items():
            try:
                seeds.append(self.how.seed(number, record))
            except BadRecordError as error:
                yield number, {"index": number, "error": str(error)}
        for seed in self.how.answered(self.answers, iter(seeds), GenerationReport()):
            if not seed.prompt:
                yield from ((seed.number, line) for line in seed.lines())


class Actor:
    """Holds a model; turns columns of numbers, ids and pickled records into one of lines."""

    def __init__(self, kind: type[Generate] | type[Distill], settings: Any) -> None:
        self.kind = kind(settings)

    def __call__(self, rows: Mapping[str, Any]) -> dict[str, Any]:
        """Answer a batch of rows."""
        records = {int(n): pickle.loads(item) for n, item in zip(rows["number"], rows["item"], strict=True)}
        lines: dict[int, str] = dict.fromkeys(records, "")
        for number, line in self.kind.lines({number: record for number, (_, record) in records.items()}):
            lines[number] += json.dumps({"id": records[number][0], **line}, ensure_ascii=False) + "\n"
        return {"id": rows["id"], "lines": list(lines.values())}


class Rows(Datasource):
    """Ids and records that the driver has read, in blocks of `size` rows; a checkpoint counts whole blocks."""

    def __init__(self, items: Sequence[tuple[Any, Any]], size: int) -> None:
        packed = [{"id": str(one[0]), "number": n, "item": pickle.dumps(one)} for n, one in enumerate(items)]
        self.parts = [packed[start : start + size] for start in range(0, len(packed), size)]

    def estimate_inmemory_data_size(self) -> int:
        """Return the bytes of all rows."""
        return sum(len(row["item"]) for part in self.parts for row in part)

    def get_read_tasks(self, parallelism: int, *_: Any, **__: Any) -> list[ReadTask]:
        """Return one task per block."""
        return [
            ReadTask(lambda part=part: [pyarrow.Table.from_pylist(part)], BlockMetadata(len(part), None, None, None))
            for part in self.parts
        ]


class Lines(BlockBasedFileDatasink):
    """Files with the lines of one block each."""

    def write_block_to_file(self, block: Any, file: Any) -> None:
        """Write the lines of a block."""
        file.write("".join(block.to_arrow()["lines"].to_pylist()).encode("utf-8", "replace"))


def read(args: argparse.Namespace, name: str) -> tuple[dict[Any, Any], Any, Any]:
    """Return prompts or seeds by id, what makes their `Actor`'s answers, and what the answers depend on."""
    if args.command == "generate" and args.prompts is not None and args.out is None:
        sources: Sequence[SourceConfig] = [SourceConfig(path) for path in args.prompts]
        records: Sequence[Any] = read_prompts(args.prompts, turns=1)
        _batch.check(args, records)
        told = {"prompts", "slots", "device", "backend", "json", "metrics", "resume"}
        kind, asked = (Generate, args), {key: repr(one) for key, one in vars(args).items() if key not in told}
    elif args.command == "distill":
        config, report = read_config(args), Report()
        distill._check_answers(config)
        if config.generation.endpoint is not None:
            raise ValueError("generation.endpoint: expected null: the actors answer (`medusa distill` asks a server)")
        sources, limit = config.data.train, args.limit or config.data.limit
        records = list(read_records(sources, report, system=config.data.system, limit=limit, seeds=True))
        report.check(0.0)
        kind, asked = (Distill, config), distill._asked(config)
    else:
        raise ValueError("expected `generate` with --prompts and without --out, or `distill`, after the own arguments")
    found: dict[Any, Any] = {}
    raws = (raw for source in sources for _, raw in raw_records(source))
    for record, raw in zip(records, raws, strict=False):
        identity = raw.get(name)
        if type(identity) not in (int, str):
            problem = f"expected text or a whole number as {name!r} (--id names another field), got {identity!r}"
            raise ValueError(f"{record.where}: {problem}")
        first = found.setdefault(str(identity), (identity, record))[1]
        if first is not record:
            raise ValueError(f"{record.where}: expected an id of its own, got {identity!r} like {first.where}")
    return found, kind, asked


def share(actors: int | None, cpus: float | None) -> dict[str, Any]:
    """Return how many actors run and what each takes; raise `ValueError` if the cluster has no room for them."""
    total = ray.cluster_resources()
    actors = actors or int(total.get("GPU", 0)) or 1
    room = math.floor(100 * (total.get("CPU", 0) - FILTER) / actors) / 100
    wanted = min(1.0, room) if cpus is None else cpus
    if not 0 < wanted <= room or 0 < total.get("GPU", 0) < actors:
        raise ValueError(
            f"expected {FILTER + actors * (cpus or SMALL):.1f} CPUs for {actors} actors ({FILTER:.1f} of them are for "
            f"Ray's checkpoint, reading and writing, without which it waits forever) and a GPU for each if there are "
            f"any, got {total.get('CPU', 0):g} CPUs and {total.get('GPU', 0):g} GPUs; lower --actors or --cpus"
        )
    pool = ray.data.ActorPoolStrategy(size=actors)
    return {"compute": pool, "num_cpus": wanted, "num_gpus": 1 if "GPU" in total else 0}


def check(folder: Path, ids: Iterable[str]) -> str:
    """Return what there is in the files; raise `ValueError` unless they have every id once."""
    records = (json.loads(line) for file in folder.glob("*.jsonl") for line in file.open(encoding="utf-8"))
    first = [one for one in records if "seed" not in one or one["seed"]["part"] == 1]
    counts = Counter(str(one["id"]) for one in first)
    if wrong := [name for name in ids if counts[name] != 1]:
        raise ValueError(f"{folder}: expected each id once, got {wrong[0]} {counts[wrong[0]]} times")
    return f"{len(first)} ids in {folder}, {sum('error' in one for one in first)} of them with an error instead"


def run(own: argparse.Namespace) -> str:
    """Read, answer what is not answered yet, check."""
    found, kind, asked = read(argument_parser().parse_args(own.command), own.id)
    out, records = own.out.absolute(), own.out.absolute() / "records"
    same = repr([(name, dataclasses.replace(one, where="")) for name, one in found.values()]).encode()
    stated = json.loads(json.dumps({"asked": asked, "records": hashlib.blake2b(same, digest_size=8).hexdigest()}))
    if not (out / "run.json").exists():
        out.mkdir(parents=True, exist_ok=True)
        write_json(out / "run.json", stated)
    elif read_json_object(out / "run.json") != stated:
        raise ValueError(f"--out: {out / 'run.json'} is of other records or settings; name another folder")
    ray.init(own.address, **({"include_dashboard": False} if own.address == "local" else {}))
    try:
        checkpoint = CheckpointConfig("id", str(out / "checkpoint"), delete_checkpoint_on_success=False)
        checkpoint.checkpoint_actor_pool_max_size, checkpoint.checkpoint_actor_memory_bytes = 1, 2**26
        ray.data.DataContext.get_current().checkpoint_config = checkpoint
        source, placed = Rows(list(found.values()), own.rows), share(own.actors, own.cpus)
        rows = ray.data.read_datasource(source, num_cpus=SMALL, override_num_blocks=len(source.parts))
        lines = rows.map_batches(Actor, fn_constructor_args=kind, batch_size=None, **placed)
        lines.write_datasink(Lines(str(records), file_format="jsonl"), ray_remote_args={"num_cpus": SMALL})
    finally:
        ray.shutdown()
    return check(records, found)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder to write, on storage that all nodes share")
    parser.add_argument("--address", default="local", help="of the cluster, auto for the one that this node is in")
    parser.add_argument("--actors", type=int, help="models that run at once (default: one per GPU, or one)")
    parser.add_argument("--cpus", type=float, help="CPUs of each actor, and its threads (default: at most 1)")
    parser.add_argument(
        "--rows", type=int, default=64, help="records per block; a block begun is repeated after a stop"
    )
    parser.add_argument("--id", default="id", help="field of the records that has their id (default: id)")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="generate or distill, and its arguments")
    own = parser.parse_args()
    try:
        print(run(own))
    except ValueError as error:
        parser.error(str(error))
