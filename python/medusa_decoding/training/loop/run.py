"""A whole run from its configuration: data, model, training, and what is written at the end.

    from medusa_decoding.training import Config, train
    result = train(Config.read("vicuna-7b.yaml"))

The output folder gets `heads` (with their model card), `model` or `adapter` where the backbone was trained, the log,
checkpoints and TensorBoard's files. This module does not know how a step is made.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from medusa_decoding.checkpoints import pretrained, read_heads, write_heads
from medusa_decoding.checkpoints.pretrained import stated_vocab_size
from medusa_decoding.files import only_writer, read_json_object, whole_folder, write_json
from medusa_decoding.heads import MedusaHeads
from medusa_decoding.provenance import fingerprint as weights_fingerprint
from medusa_decoding.provenance import versions
from medusa_decoding.training import config_schema
from medusa_decoding.training.config import Config
from medusa_decoding.training.data import encoding, packing
from medusa_decoding.training.data import records as data
from medusa_decoding.training.data.targets import most_frequent_tokens
from medusa_decoding.training.distill.record_file import asked_of
from medusa_decoding.training.loop import card
from medusa_decoding.training.loop.accuracy import HeadAccuracy
from medusa_decoding.training.loop.backbone import DTYPES, NAME, TrainingBackbone, check_adaptable, load_tokenizer
from medusa_decoding.training.loop.processes import Processes
from medusa_decoding.training.loop.saving import STATE, Checkpoints, damaged, read_state
from medusa_decoding.training.loop.schedules import stages
from medusa_decoding.training.loop.states import StateCache, fingerprint
from medusa_decoding.training.loop.trainer import LOG, Measured, Trainer, Watcher, read_log

MEASURED = "measured.json"


@dataclass(frozen=True)
class Rows:
    """What is learnt from and measured on.

    Attributes:
        train, held_out: packed; the latter None where nothing is held out.
        report: what came of the training data's records.
        held_out_report: of held-out data of its own, or None.
        records: how many of train and held-out data.
        frequencies: how often each token is learnt in the training data.
    """

    train: packing.PackedDataset
    held_out: packing.PackedDataset | None
    report: data.Report
    held_out_report: data.Report | None
    records: tuple[int, int]
    frequencies: Counter[int]


@dataclass(frozen=True)
class Result:
    """What a run left.

    Attributes:
        folder: the output folder.
        heads: folder of the heads, for `MedusaModel.from_pretrained`.
        base_model: what they belong to: the model as named, or the folder of the trained one or of its adapter.
        measured: on held-out data, None without it.
        steps: of the whole run.
        seconds: spent in steps.
    """

    folder: Path
    heads: Path
    base_model: str
    measured: Measured | None
    steps: int
    seconds: float


Announce = Callable[[str], None]


def train(
    config: Config,
    *,
    resume: bool = False,
    watchers: Sequence[Watcher] = (),
    announce: Announce = lambda words: None,
) -> Result:
    """Train heads as a configuration says.

    Args:
        config: of the run.
        resume: go on from the newest checkpoint in the output folder, which must be of the same configuration.
        watchers: shown each line of the log (main process only).
        announce: is told in words what happens before and after the steps (main process only).

    Raises:
        ValueError: settings, data or a checkpoint that do not fit; nothing has been trained then.
        FloatingPointError: a loss that is not finite; names the step and the last good checkpoint.
        OSError: a file could not be written.
    """
    processes = Processes.join(config.optimisation.sharding)
    with hold(config, processes):
        return _train(config, processes, resume, list(watchers), announce if processes.main else lambda words: None)


def _train(config: Config, processes: Processes, resume: bool, every: list[Watcher], say: Announce) -> Result:
    folder = Path(config.output.folder)
    start = check(config, processes, resume)
    if start is None and resume:
        say(f"no checkpoint in {folder}: begins anew")
    torch.manual_seed(config.optimisation.seed)
    tokenizer = load_tokenizer(config.model)
    rows = load_rows(config, tokenizer, stated_vocab_size(config.model.name, config.model.revision))
    say(
        f"{rows.records[0]} records in {len(rows.train)} rows ({rows.train.fill:.0%} filled), "
        f"{rows.records[1]} held out"
    )
    say(str(rows.report))
    stages(config, len(rows.train))  # refuses what does not fit before anything is loaded
    for warning in config.warnings():
        say(warning)
    backbone = processes.each(lambda: TrainingBackbone.load(config, _device(processes)))
    heads = processes.each(lambda: make_heads(config, backbone, tokenizer, rows))
    states = _states(config, backbone, rows, processes)
    # Each process draws its own dropout; what all have in common was drawn before.
    torch.manual_seed(config.optimisation.seed + processes.rank)
    trainer = Trainer(config, backbone, heads, rows.train, rows.held_out, processes, states, every)
    error: BaseException | None = None
    if processes.main:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if start is None:
                (folder / LOG).unlink(missing_ok=True)  # of a run that never came to a checkpoint
            (folder / "config.yaml").write_text(config.to_yaml(), encoding="utf-8")
        except OSError as caught:
            error = caught
    processes.together(error)
    if start is not None:
        trainer.resume(start)
        say(f"goes on from {start}")
    board = _board(config, folder, trainer.at.done) if processes.main else None
    if board is not None:
        every.append(board)
        trainer.watchers = every
    say(f"{trainer.steps} steps: " + ", ".join(f"{stage.steps} {stage.name}" for stage in trainer.stages))
    measured = trainer.run()
    return _finish(trainer, rows, measured, say)


@contextlib.contextmanager
def hold(config: Config, processes: Processes) -> Iterator[None]:
    """Hold the output folder while the block runs, so that no other run writes there; the main process does it for all.

    Raises:
        ValueError: in every process, with one message: another run holds the folder (it says which), or it cannot be
            written to.
        OSError: likewise, in the main process.
    """
    with contextlib.ExitStack() as stack:
        error: OSError | ValueError | None = None
        if processes.main:
            try:
                _check_folder(Path(config.output.folder))
                stack.enter_context(only_writer("output.folder", config.output.folder, inside=True))
            except (OSError, ValueError) as caught:
                error = caught
        processes.as_main(error)
        yield


def _device(processes: Processes) -> torch.device:
    """Return where the model is loaded: weights to be divided by the main process alone, in the host's memory."""
    if not processes.sharded:
        return processes.device
    return torch.device("cpu" if processes.main else "meta")


def check(config: Config, processes: Processes, resume: bool = False) -> Path | None:
    """Refuse what can be known to fail before data is read, generated or a model loaded.

    Returns:
        The checkpoint that the run goes on from, None for a new run.

    Raises:
        ValueError: settings that do not go together with the model, the given heads, the processes or what is in the
            output folder; an output folder that cannot be written to, or that another run writes to.
        ModuleNotFoundError: a library that they need.
    """
    folder = Path(config.output.folder)
    _check_folder(folder)
    if processes.main and folder.is_dir():
        with only_writer("output.folder", folder, inside=True):
            pass  # nobody else holds it
    start = _where_to_start(config, folder, resume)
    card.check_plotting()
    model = pretrained.load_config(config.model.name, config.model.revision, argument=NAME)
    check_adaptable(config, model)
    vocabulary, trimmed = int(model.vocab_size), config.heads.token_map_size
    if trimmed is not None and trimmed > vocabulary:
        raise ValueError(f"heads.token_map_size: expected at most the {vocabulary} tokens there are, got {trimmed}")
    if config.heads.initial is not None:
        _given_heads(config, int(model.hidden_size), vocabulary)
    if processes.sharded:
        for broken, words in (
            (config.data.cache_hidden is not None, "data.cache_hidden: expected null with divided weights"),
            (config.model.quantization != "none", "model.quantization: expected none with divided weights"),
            (
                getattr(model, "quantization_config", None) is not None,
                "model.name: expected a model that is not quantised with divided weights",
            ),
            (config.optimisation.optimizer != "adamw", "optimisation.optimizer: expected adamw with divided weights"),
        ):
            if broken:
                raise ValueError(f"{words}, got another")
    if config.output.tensorboard and processes.main:
        try:
            import torch.utils.tensorboard  # noqa: F401
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                "tensorboard: expected the library for output.tensorboard "
                "(pip install 'medusa-kernels[train]', or set it to false), got none"
            ) from error
    return start


def _check_folder(folder: Path) -> None:
    there = folder.absolute()
    while not there.exists() and there != there.parent:
        there = there.parent
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise ValueError(f"output.folder: expected one that is there or can be made, got {folder}")


def _where_to_start(config: Config, folder: Path, resume: bool) -> Path | None:
    """Return the checkpoint to go on from, or None for a new run."""
    alone = Processes(0, 1, torch.device("cpu"), False)
    newest = Checkpoints(folder / "checkpoints", 1, alone).newest()
    if newest is None:
        for name in ("heads", "model", "adapter"):
            if (folder / name).exists():
                raise ValueError(f"output.folder: expected a new one, got {folder}, in which there is {name}")
        return None
    if not resume:
        raise ValueError(
            f"output.folder: expected a new one (or --resume to go on from {newest.name}), got {folder} with a run"
        )
    state = read_state(newest)
    try:
        before = Config.of(config_schema.parse_yaml(str(state.get("config"))))
    except ValueError as error:
        raise damaged(newest, f"{STATE}: config: {error}") from error
    if _lasting(before) != _lasting(config):
        apart = _apart(_lasting(before), _lasting(config))
        raise ValueError(f"{apart}: expected what the run in {folder} was begun with, got another; start a new one")
    return newest


def _lasting(config: Config) -> dict[str, Any]:
    """Return the settings that a run cannot change on the way."""
    values = dataclasses.asdict(config)
    for name in ("folder", "checkpoint_steps", "keep_checkpoints", "log_steps", "tensorboard", "merge"):
        del values["output"][name]
    del values["generation"]
    return values


def _apart(one: Any, other: Any, path: str = "") -> str:
    if isinstance(one, dict) and isinstance(other, dict):
        for name in one:
            if one[name] != other[name]:
                return _apart(one[name], other[name], f"{path}.{name}" if path else name)
    return path


# -- data --------------------------------------------------------------------------------------------------------------


def load_rows(config: Config, tokenizer: Any, vocab_size: int | None = None) -> Rows:
    """Read, encode, split and pack the data of a configuration.

    Args:
        config: of the run.
        tokenizer: of the model.
        vocab_size: ids that exact records may hold, the model's; None for the tokenizer's.

    Raises:
        ValueError: unreadable data, too many bad records, or nothing to learn.
    """
    settings = config.data
    encoder = encoding.ChatEncoder(
        tokenizer,
        settings.template,
        turns=settings.turns,
        arguments=settings.template_arguments,
        vocab_size=vocab_size,
    )
    report = data.Report()
    records = list(data.read_records(settings.train, report, system=settings.system, limit=settings.limit))
    apart: list[data.Record] = []
    if config.held_out_share > 0:
        records, apart = data.split_records(records, config.held_out_share, settings.split_seed)
    other_report = data.Report() if settings.held_out else report
    if settings.held_out:
        known = {data.prompt_key(record.prompt) for record in records}
        others = data.read_records(settings.held_out, other_report, system=settings.system, limit=settings.limit)
        for record in others:
            if data.prompt_key(record.prompt) in known:
                other_report.notes["held-out prompts that are also trained on: left out"] += 1
            else:
                apart.append(record)
    fills = (tokenizer.pad_token_id, tokenizer.eos_token_id)
    pad = next((token for token in fills if token is not None and (vocab_size is None or token < vocab_size)), 0)

    def pack(
        part: Sequence[data.Record], report: data.Report
    ) -> tuple[packing.PackedDataset | None, list[encoding.Example]]:
        examples = list(
            packing.fit(encoding.encode_records(part, encoder, report), settings.length, report, settings.overlong)
        )
        if not examples:
            return None, examples
        return packing.PackedDataset(examples, settings.length, pad, pack=settings.pack), examples

    rows, examples = pack(records, report)
    held_out, others_examples = pack(apart, other_report)
    _check_ids([*examples, *others_examples], vocab_size)
    for each in {id(report): report, id(other_report): other_report}.values():
        each.check(settings.max_bad_share)
    if rows is None:
        raise ValueError(f"data.train: expected something to learn, got nothing; {report}")
    frequencies: Counter[int] = Counter()
    for example in examples:
        frequencies.update(example.ids[example.learnt].tolist())
    separate = other_report if settings.held_out else None
    return Rows(rows, held_out, report, separate, (len(records), len(apart)), frequencies)


def _check_ids(examples: Sequence[encoding.Example], vocab_size: int | None) -> None:
    if vocab_size is None:
        return
    largest = max((int(example.ids.max()) for example in examples), default=0)
    if largest >= vocab_size:
        raise ValueError(f"data: expected token ids below the model's {vocab_size}, got {largest} from its tokenizer")


def _states(config: Config, backbone: TrainingBackbone, rows: Rows, processes: Processes) -> StateCache | None:
    if config.data.cache_hidden is None:
        return None
    model = config.model
    facts = {
        "name": model.name,
        "revision": model.revision,
        "quantization": model.quantization,
        "attention": model.attention,
        "weights": weights_fingerprint(backbone.causal),
    }
    shape = len(rows.train), config.data.length, int(backbone.causal.config.hidden_size)
    key = fingerprint(rows.train, facts)
    return StateCache(Path(config.data.cache_hidden), key, shape, DTYPES[model.dtype], processes)


# -- heads -------------------------------------------------------------------------------------------------------------


def make_heads(config: Config, backbone: TrainingBackbone, tokenizer: Any, rows: Rows) -> MedusaHeads:
    """Return heads to train, in float32 on the model's device: W1 zero and W2 the lm_head (2.1.1), or those given.

    Raises:
        ValueError: given heads that are not what the configuration asks for.
    """
    settings, causal = config.heads, backbone.causal
    vocabulary, size = int(causal.config.vocab_size), int(causal.config.hidden_size)
    device = next(backbone.module.parameters()).device
    if settings.initial is not None:
        return _to_train(_given_heads(config, size, vocabulary), settings.parent_rank, device)
    token_map = None
    if settings.token_map_size is not None:
        token_map = _token_map(settings.token_map_size, vocabulary, tokenizer, rows)
    heads = MedusaHeads(
        size,
        vocabulary,
        settings.num_heads,
        settings.num_layers,
        shared_projection=settings.shared_projection,
        bias=settings.bias,
        token_map=token_map,
        dtype=torch.float32,
        device=device,
        parent_rank=settings.parent_rank,
    )
    if heads.w2 is not None:
        layer: Any = getattr(backbone.lm_head, "base_layer", backbone.lm_head)
        weight = layer.weight.detach()
        if weight.shape != (vocabulary, size) or not weight.is_floating_point():
            raise ValueError(
                f"model: expected an lm_head [{vocabulary}, {size}] of floats to start heads from, got "
                f"{weight.dtype} {list(weight.shape)}"
            )
        with torch.no_grad():
            heads.w2.copy_((weight if token_map is None else weight[token_map.to(weight.device)]).expand_as(heads.w2))
    return heads


def _given_heads(config: Config, hidden_size: int, vocab_size: int) -> MedusaHeads:
    """Read the heads to start from.

    Raises:
        ValueError: they are not what the configuration says, or not to be trained.
    """
    settings, name = config.heads, str(config.heads.initial)
    heads = read_heads(name, hidden_size=hidden_size, vocab_size=vocab_size, dtype=torch.float32).heads
    if heads.storage != "float":
        raise ValueError(f"heads.initial: expected heads in floats, got some in {heads.storage}")
    trimmed = None if heads.token_map is None else len(heads.token_map)
    for key, wanted, got in (
        ("num_heads", settings.num_heads, heads.num_heads),
        ("num_layers", settings.num_layers, heads.num_layers),
        ("shared_projection", settings.shared_projection, heads.shared_projection),
        ("bias", settings.bias, heads.b1 is not None),
        ("token_map_size", settings.token_map_size, trimmed),
        ("parent_rank", settings.parent_rank, heads.parent_rank or settings.parent_rank),
    ):
        if wanted != got:
            raise ValueError(f"heads.{key}: expected {got} like the heads in {name}, got {wanted}")
    return heads


def _to_train(heads: MedusaHeads, parent_rank: int, device: torch.device) -> MedusaHeads:
    """Return given heads ready to be trained; with a fresh parents' term where they have none and one is asked for."""
    if parent_rank != heads.parent_rank:
        fresh = _like(heads, parent_rank, torch.float32)
        with torch.no_grad():
            for name, weight in heads.named_parameters():
                fresh.get_parameter(name).copy_(weight)
        heads = fresh
    heads = heads.to(device).train()
    heads.requires_grad_(True)
    return heads


def _like(heads: MedusaHeads, parent_rank: int, dtype: torch.dtype) -> MedusaHeads:
    return MedusaHeads(
        heads.hidden_size,
        heads.vocab_size,
        heads.num_heads,
        heads.num_layers,
        shared_projection=heads.shared_projection,
        bias=heads.b1 is not None,
        token_map=None if heads.token_map is None else heads.token_map.cpu(),
        parent_rank=parent_rank,
        dtype=dtype,
    )


def _token_map(size: int, vocabulary: int, tokenizer: Any, rows: Rows) -> torch.Tensor:
    if size > vocabulary:
        raise ValueError(f"heads.token_map_size: expected at most the {vocabulary} tokens there are, got {size}")
    ends = [token for token in (tokenizer.eos_token_id,) if token is not None]
    counts = {token: rows.frequencies.get(token, 0) for token in range(vocabulary)}
    return most_frequent_tokens(counts, size, always=ends)


# -- what is left ------------------------------------------------------------------------------------------------------


def _finish(trainer: Trainer, rows: Rows, measured: Measured | None, say: Announce) -> Result:
    config, processes = trainer.config, trainer.processes
    folder = trainer.folder
    weights = trainer.trained()
    if measured is not None and trainer.held_out is not None and config.heads.storage != "float":
        # What is written is what the figures beside it are of.
        measured = _measure_stored(trainer, trainer.held_out)
    base = _base_name(config)
    error: BaseException | None = None
    if processes.main:
        try:
            base = _write_backbone(trainer, weights)
            _write_heads(trainer, weights, base, rows, measured)
        except Exception as caught:  # safetensors and torch have errors of their own for a full disk
            error = _not_written(trainer, caught)
    processes.together(error)
    say(f"heads in {folder / 'heads'}, their base model is {base}")
    return Result(folder, folder / "heads", base, measured, trainer.at.done, trainer.at.seconds)


def _measure_stored(trainer: Trainer, held_out: packing.PackedDataset) -> Measured:
    """Return what held-out data says of the heads as they are stored, which those in the trainer become."""
    try:
        trainer.processes.each(lambda: trainer.store(trainer.config.heads.storage))
        return trainer.measure(held_out)
    except Exception as caught:  # memory, say
        raise _not_written(trainer, caught) from caught


def _not_written(trainer: Trainer, caught: Exception) -> OSError:
    newest = trainer.checkpoints.newest()
    error = OSError(
        f"{trainer.folder}: what was trained could not be written ({caught}); --resume writes it from {newest}"
    )
    error.__cause__ = caught
    return error


def _base_name(config: Config) -> str:
    path = Path(config.model.name).expanduser()
    return str(path.resolve()) if path.is_dir() else config.model.name


def _write_backbone(trainer: Trainer, weights: Mapping[str, torch.Tensor]) -> str:
    """Write the trained model, or its adapter; return what the heads' checkpoint calls their base model."""
    config, backbone, folder = trainer.config, trainer.backbone, trainer.folder
    if not config.trains_backbone:
        return _base_name(config)
    own = {name.removeprefix("model."): weight for name, weight in weights.items() if name.startswith("model.")}
    tokenizer = load_tokenizer(config.model)
    merge = config.output.merge and config.model.quantization == "none" and not trainer.processes.sharded
    name = "model" if merge or backbone.lora is None else "adapter"
    for pattern in (f".{name}.*.tmp", f".{name}.*.old"):
        for left in folder.glob(pattern):
            shutil.rmtree(left, ignore_errors=True)  # of a run that was killed
    with whole_folder(folder / name, replace=True) as staging:
        if name == "adapter":
            for settings in backbone.lora.peft_config.values():
                settings.base_model_name_or_path, settings.revision = _base_name(config), config.model.revision
            backbone.lora.save_pretrained(staging, state_dict=own, save_embedding_layers=False)
            backbone.causal.config.save_pretrained(staging)  # says the vocabulary's size
        else:
            causal = backbone.causal
            if backbone.lora is not None:
                causal = backbone.lora.merge_and_unload()
                causal.to(DTYPES[config.model.dtype]).save_pretrained(staging)
            else:
                state = {key: value.to(DTYPES[config.model.dtype]) for key, value in own.items()}
                causal.save_pretrained(staging, state_dict=state)
                _state_dtype(staging, config.model.dtype)
        tokenizer.save_pretrained(staging)
    return f"../{name}"


def _state_dtype(folder: Path, dtype: str) -> None:
    """Have a model's config name the type its weights were written in."""
    file = folder / "config.json"
    values = read_json_object(file)
    values["dtype"] = dtype
    write_json(file, values, indent=2)


def _write_heads(
    trainer: Trainer, weights: Mapping[str, torch.Tensor], base: str, rows: Rows, measured: Measured | None
) -> None:
    config, folder = trainer.config, trainer.folder
    heads = _copy_of(trainer.heads, weights, DTYPES[config.model.dtype])
    if config.heads.storage != "float":
        heads = heads.quantized(config.heads.storage)
    # A backbone that was trained along is a folder of this run.
    revision = None if config.trains_backbone else config.model.revision
    write_heads(heads, folder / "heads", base_model=base, base_revision=revision)
    if measured is not None:
        write_json(folder / "heads" / MEASURED, measured.to_json())
    card.write_card(folder / "heads", _facts(trainer, base, rows, measured))


def _facts(trainer: Trainer, base: str, rows: Rows, measured: Measured | None) -> card.CardFacts:
    """Collect what the model card says."""
    config, lines = trainer.config, read_log(trainer.folder)
    accuracy = HeadAccuracy.empty(trainer.heads.num_heads) if measured is None else measured.accuracy
    return card.CardFacts(
        config=config,
        report=rows.report,
        train_records=rows.records[0],
        held_out_records=rows.records[1],
        accuracy=accuracy,
        losses=[(line["step"], line["loss"]) for line in lines if "loss" in line],
        steps=trainer.at.done,
        seconds=trainer.at.seconds,
        held_out_report=rows.held_out_report,
        tokens=len(rows.train) * config.data.length,
        versions=versions("torch", "transformers"),
        machine=_machine(trainer.processes),
        generated={
            source.path: asked
            for source in config.data.train
            if (asked := asked_of(Path(source.path).expanduser())) is not None
        },
        trained_model=base if config.trains_backbone else None,
    )


def _machine(processes: Processes) -> str:
    device = processes.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    return name if processes.size == 1 else f"{processes.size} x {name}"


def _copy_of(heads: MedusaHeads, weights: Mapping[str, torch.Tensor], dtype: torch.dtype) -> MedusaHeads:
    copy = _like(heads, heads.parent_rank, dtype)
    with torch.no_grad():
        for name, weight in copy.named_parameters():
            weight.copy_(weights[f"heads.{name}"])
    return copy.eval()


def _board(config: Config, folder: Path, done: int) -> Watcher | None:
    """Return a watcher that writes TensorBoard's event files."""
    if not config.output.tensorboard:
        return None
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(folder / "tensorboard"), purge_step=done + 1)

    def watch(line: Mapping[str, Any]) -> None:
        step = line["step"]
        where = "held_out" if "accuracy" in line else "train"
        for name in ("loss", "model_loss", "model_top1", "lambda_0", "gradient_norm"):
            if name in line:
                writer.add_scalar(f"{where}/{name}", line[name], step)
        for name, rate in line.get("rates", {}).items():
            writer.add_scalar(f"rate/{name}", rate, step)
        for name in ("head_losses", "head_top1"):
            for head, value in enumerate(line.get(name, ()), start=1):
                writer.add_scalar(f"{where}/{name}/{head}", value, step)
        writer.flush()

    return watch


__all__ = ["Result", "Rows", "load_rows", "make_heads", "train"]
