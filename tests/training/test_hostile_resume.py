"""Resuming from a damaged output folder: a ValueError that names the file, and never different heads."""

from __future__ import annotations

import json
import random
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import workshop
from limits import MIB, bounded

from medusa_decoding.training.config import Config
from medusa_decoding.training.loop import saving
from medusa_decoding.training.loop.run import train
from medusa_decoding.training.loop.states import StateCache

pytestmark = pytest.mark.usefixtures("without_plots")


class StoppedError(Exception):
    pass


def stop(line: Any) -> None:
    if line["step"] >= 5:
        raise StoppedError


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> tuple[Config, Path, Path]:
    """A run that was stopped after its checkpoint of step 4, a copy of its folder, and the heads it would have made."""
    folder = tmp_path_factory.mktemp("stopped")
    base, data = workshop.make_base(folder / "base"), workshop.make_data(folder / "data.jsonl")
    whole = workshop.config(folder / "whole", base, data)
    train(whole)
    config = workshop.config(folder / "run", base, data)
    with pytest.raises(StoppedError):
        train(config, watchers=[stop])
    shutil.copytree(folder / "run", folder / "kept")
    return config, folder / "kept", folder / "whole"


def newest(folder: Path) -> Path:
    return max((folder / "checkpoints").iterdir())


@pytest.fixture
def run(stopped: tuple[Config, Path, Path]) -> tuple[Config, Path]:
    config, kept, _ = stopped
    folder = Path(config.output.folder)
    shutil.rmtree(folder)
    shutil.copytree(kept, folder)
    return config, newest(folder)


def resume(config: Config, *words: str) -> None:
    """Resume, which must be refused with these words and leave no heads."""
    with bounded(ValueError, seconds=20, memory=128 * MIB) as said:
        train(config, resume=True)
    assert said, "went on"
    for word in words:
        assert word in said[0], said[0]
    assert not (Path(config.output.folder) / "heads").exists()


def signed(checkpoint: Path, state: dict[str, Any] | None = None) -> None:
    """Write a state with right digests, as someone who edits a checkpoint on purpose would."""
    if state is None:
        state = json.loads((checkpoint / saving.STATE).read_text())
    saving._write_state(checkpoint, {name: value for name, value in state.items() if name not in ("digest", "files")})


def test_the_undamaged_run_resumes_to_the_same_heads(run: tuple[Config, Path], stopped: Any) -> None:
    train(run[0], resume=True)
    expected = workshop.heads_tensors(stopped[2])
    found = workshop.heads_tensors(Path(run[0].output.folder))
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def edited(name: str, change: Callable[[Any], Any]) -> Callable[[Path], None]:
    def damage(checkpoint: Path) -> None:
        content = torch.load(checkpoint / name, weights_only=True)
        changed = change(content)
        torch.save(content if changed is None else changed, checkpoint / name)
        signed(checkpoint)

    return damage


def stated(**changes: Any) -> Callable[[Path], None]:
    def damage(checkpoint: Path) -> None:
        signed(checkpoint, json.loads((checkpoint / saving.STATE).read_text()) | changes)

    return damage


def written(name: str, content: bytes) -> Callable[[Path], object]:
    return lambda checkpoint: (checkpoint / name).write_bytes(content)


def flipped(checkpoint: Path) -> None:
    """Change one bit of one weight, which torch reads without an error."""
    file = checkpoint / saving.WEIGHTS
    weights = torch.load(file, weights_only=True)
    stored = max(weights.values(), key=torch.numel).numpy().tobytes()
    content = bytearray(file.read_bytes())
    content[content.index(stored) + len(stored) // 2] ^= 1
    file.write_bytes(content)


def compressed(checkpoint: Path) -> None:
    """A small file that becomes large when it is read."""
    with (
        zipfile.ZipFile(checkpoint / saving.WEIGHTS, "w", zipfile.ZIP_DEFLATED) as records,
        records.open("a/data/0", "w", force_zip64=True) as record,
    ):
        for _ in range(512):
            record.write(bytes(MIB))
    signed(checkpoint)


def older(checkpoint: Path) -> None:
    """The weights of an earlier checkpoint: right names and shapes, another step's values."""
    shutil.copy(min(checkpoint.parent.iterdir()) / saving.WEIGHTS, checkpoint / saving.WEIGHTS)


def first(change: Callable[[torch.Tensor], Any]) -> Callable[[dict[str, Any]], None]:
    def applied(weights: dict[str, Any]) -> None:
        name = "heads.w1"
        weights[name] = change(weights[name])

    return applied


def of_optimiser(change: Callable[[Any], Any]) -> Callable[[dict[str, Any]], None]:
    return lambda content: change(content["optimiser"]) and None


def moments(change: Callable[[torch.Tensor], Any]) -> Callable[[dict[str, Any]], None]:
    def applied(optimiser: Any) -> None:
        values = next(iter(optimiser["state"].values()))
        values["exp_avg"] = change(values["exp_avg"])

    return of_optimiser(applied)


NAN = float("nan")
HUGE = torch.ones(1).expand(10**11)
"""A hundred thousand million elements, all of them the same four bytes."""
MEASURED = {"accuracy": {"hits": [[1]], "total": [1]}, "model_loss": 1.0, "model_top1": 1.0}
DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "state {}": (written(saving.STATE, b"{}"), "no digest"),
    "state []": (written(saving.STATE, b"[]"), "expected a JSON object"),
    "state nested": (written(saving.STATE, b"[" * 100_000), "nested too deeply"),
    "state digits": (written(saving.STATE, b'{"step": ' + b"1" * 5000 + b"}"), "more digits"),
    "state bytes": (written(saving.STATE, b"\xff"), "not UTF-8"),
    "no state": (lambda checkpoint: (checkpoint / saving.STATE).unlink(), "No such file"),
    "no weights": (lambda checkpoint: (checkpoint / saving.WEIGHTS).unlink(), "weights.pt"),
    "no random numbers": (lambda checkpoint: (checkpoint / "random-0.pt").unlink(), "random-0.pt"),
    "one bit": (flipped, "weights.pt: another checksum"),
    "compressed": (compressed, "weights.pt: compressed"),
    "another checkpoint's weights": (older, "weights.pt: not the file"),
    "broadcast": (edited(saving.WEIGHTS, first(lambda w1: w1[:1].clone())), "heads.w1: expected torch.float32 ["),
    "a scalar": (edited(saving.WEIGHTS, first(lambda w1: torch.tensor(1.0))), "heads.w1: expected torch.float32 ["),
    "dtype": (edited(saving.WEIGHTS, first(lambda w1: w1.bfloat16())), "got torch.bfloat16"),
    "NaN": (edited(saving.WEIGHTS, first(lambda w1: w1 * NAN)), "heads.w1: expected finite"),
    "meta": (edited(saving.WEIGHTS, first(lambda w1: w1.to("meta"))), "heads.w1: expected a tensor"),
    "sparse": (edited(saving.WEIGHTS, first(lambda w1: w1.to_sparse())), "heads.w1: expected a tensor"),
    "no tensor": (edited(saving.WEIGHTS, first(lambda w1: 1.0)), "heads.w1: expected a tensor, got float"),
    "fewer": (edited(saving.WEIGHTS, lambda weights: {"heads.w2": weights["heads.w2"]}), "heads.b1 say"),
    "more": (edited(saving.WEIGHTS, lambda weights: weights.update({"x": torch.ones(1)})), "x say"),
    "a list of weights": (edited(saving.WEIGHTS, lambda weights: [1, 2]), "weights.pt"),
    "moments' shape": (edited(saving.OPTIMISER, moments(lambda value: value.flatten()[:1])), "exp_avg of"),
    "moments NaN": (edited(saving.OPTIMISER, moments(lambda value: value * NAN)), "exp_avg of"),
    "moments None": (edited(saving.OPTIMISER, moments(lambda value: None)), "optimiser.pt"),
    "no optimiser": (edited(saving.OPTIMISER, lambda content: {}), "optimiser.pt: KeyError"),
    "no groups": (edited(saving.OPTIMISER, of_optimiser(lambda one: one["param_groups"].clear())), "optimiser.pt"),
    "rate": (edited(saving.OPTIMISER, of_optimiser(lambda one: one["param_groups"][0].update(lr=9.0))), "another lr"),
    "betas": (edited(saving.OPTIMISER, of_optimiser(lambda one: one["param_groups"][0].update(betas=0))), "betas"),
    "schedule": (edited(saving.OPTIMISER, lambda content: content["schedule"].update(last_epoch=3)), "schedule"),
    "random numbers {}": (edited("random-0.pt", lambda numbers: {}), "random-0.pt: KeyError"),
    "random numbers short": (edited("random-0.pt", lambda n: n.update(torch=torch.ones(3))), "random-0.pt"),
    "random numbers huge": (edited("random-0.pt", lambda n: n.update(torch=HUGE)), "random-0.pt"),
    "numpy's huge": (edited("random-0.pt", lambda n: n.update(numpy=("MT19937", HUGE, 0, 0, 0.0))), "random-0.pt"),
    "moments huge": (edited(saving.OPTIMISER, moments(lambda value: HUGE)), "exp_avg of"),
    "steps huge": (
        edited(saving.OPTIMISER, of_optimiser(lambda one: one["state"][0].update(step=HUGE))),
        "step of 0 is not finite",
    ),
    "weights huge": (edited(saving.WEIGHTS, first(lambda w1: HUGE)), "heads.w1: expected torch.float32 ["),
    "numpy's": (edited("random-0.pt", lambda n: n.update(numpy=("MT19937", torch.ones(3), 0, 0, 0.0))), "random-0"),
    "python's": (edited("random-0.pt", lambda n: n.update(python=(3, (1, 2), None))), "random-0.pt"),
    "stage": (stated(stage=7), "stage 7"),
    "a negative stage": (stated(stage=-1), "stage -1"),
    "step": (stated(step=10**30), "expected a place in this run's"),
    "step true": (stated(step=True), "step True"),
    "step text": (stated(step="4"), "step '4'"),
    "done": (stated(done=5), "done 5"),
    "tokens": (stated(tokens=-1), "tokens -1"),
    "seconds": (stated(seconds=NAN), "seconds nan"),
    "measured": (stated(measured={}), "measured: expected"),
    "measured's counts": (stated(measured={"accuracy": {"hits": [[1]], "total": [10**30]}}), "accuracy: expected"),
    "best": (stated(best={}), "best: expected"),
    "best's step": (stated(best={"step": 5, "later": 0, "measured": MEASURED}), "best: expected a step"),
    "best's weights": (edited("best-0.pt", first(lambda w1: w1[:1].clone())), "best-0.pt: heads.w1: expected"),
    "no best weights": (lambda checkpoint: (checkpoint / "best-0.pt").unlink(), "best-0.pt"),
    "rows": (stated(rows=1), "got one of 1"),
    "processes": (stated(processes=2), "got one of 2"),
    "data": (stated(data="x"), "the data has changed"),
    "config": (stated(config="[" * 5), "state.json: config: "),
    "config null": (stated(config=None), "expected"),
    "another run's config": (stated(config="method: medusa-2"), "expected"),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_checkpoint_is_refused(run: tuple[Config, Path], name: str) -> None:
    config, checkpoint = run
    damage, words = DAMAGES[name]
    damage(checkpoint)
    resume(config, words)


def test_the_message_says_what_to_do(run: tuple[Config, Path]) -> None:
    config, checkpoint = run
    (checkpoint / saving.STATE).write_text("{}")
    resume(config, str(checkpoint), "remove this folder to go on from the one before it")
    shutil.rmtree(checkpoint)
    train(config, resume=True)
    assert (Path(config.output.folder) / "heads").is_dir()


@pytest.mark.parametrize("name", [saving.STATE, saving.WEIGHTS, saving.OPTIMISER, "random-0.pt", "best-0.pt"])
def test_any_changed_byte_is_refused_or_has_no_effect(run: tuple[Config, Path], name: str) -> None:
    """Bytes between the records of a file have no meaning; data that is read must equal what was written."""
    _, checkpoint = run
    checkpoints = saving.Checkpoints(checkpoint.parent, 1, alone())
    file, random_ones = checkpoint / name, random.Random(name)
    content = file.read_bytes()
    expected = read(checkpoints, checkpoint)
    refused = 0
    for number in range(150):
        mutated = bytearray(content)
        for _ in range(random_ones.choice((1, 1, 3))):
            mutated[random_ones.randrange(len(content))] = random_ones.randrange(256)
        if number % 10 == 0:
            mutated = mutated[: random_ones.randrange(len(content))]
        file.write_bytes(mutated)
        with bounded(ValueError, seconds=5, memory=64 * MIB) as said:
            assert repr(read(checkpoints, checkpoint)) == repr(expected)
        refused += bool(said)
        assert not said or str(checkpoint) in said[0]
    assert refused > 50


def alone() -> Any:
    from medusa_decoding.training.loop.processes import Processes

    return Processes(0, 1, torch.device("cpu"), False)


def read(checkpoints: saving.Checkpoints, path: Path) -> list[Any]:
    state = saving.read_state(path)
    weights, optimiser, numbers, best = checkpoints.load(path, state)
    sums = [(name, value.sum()) for part in (weights, best) for name, value in part.items()]
    return [state, sums, optimiser["schedule"], numbers["torch"].sum()]


@pytest.mark.parametrize(
    "line", [b"[" * 100_000, b"1" * 5000, b"\xff", b"[]", b'{"loss": 1}', b'{"step": 1, "loss": "x"}', b"null"]
)  # fmt: skip
def test_a_damaged_log_is_refused_with_its_line(run: tuple[Config, Path], line: bytes) -> None:
    config, _ = run
    log = Path(config.output.folder) / "log.jsonl"
    lines = log.read_bytes().splitlines(keepends=True)
    log.write_bytes(b"".join([lines[0], line + b"\n", *lines[1:]]))
    resume(config, f"{log}:2: expected")


def test_damaged_states_on_disk_are_refused(tmp_path: Path) -> None:
    shape, folder = (4, 3, 2), tmp_path / "states"

    def opened() -> StateCache:
        return StateCache(folder, "key", shape, torch.float32, alone())

    cache = opened()
    cache.put([0, 2], torch.ones(2, 3, 2))
    cache.put([3], torch.full((1, 3, 2), NAN))
    assert cache.get([3]) is None
    del cache
    assert (folder / "there.bin").read_bytes() == b"\1\0\1\0"
    kept = {file.name: file.read_bytes() for file in folder.iterdir()}
    assert kept.keys() == {"states.bin", "there.bin", "about.json"}
    for name, content, words in (
        ("about.json", b"[]", "about.json: expected a JSON object, got list"),
        ("about.json", b"[" * 100_000, "about.json: expected JSON, got lists or objects that are nested"),
        ("about.json", b"{}", "another fingerprint"),
        ("states.bin", kept["states.bin"][:-1], "states.bin: expected 96 bytes, got 95; remove the folder"),
        ("states.bin", kept["states.bin"] + b"0", "states.bin: expected 96 bytes, got 97"),
        ("there.bin", b"", "there.bin: expected 4 bytes, got 0"),
        ("there.bin", b"\1\0\7\0", "there.bin: expected bytes of 0 and 1"),
    ):
        (folder / name).write_bytes(content)
        with bounded(ValueError, seconds=2, memory=32 * MIB) as said:
            opened()
        assert said and words in said[0], (name, said)  # noqa: PT018 (one case, one line)
        (folder / name).write_bytes(kept[name])
    (folder / "states.bin").write_bytes(b"\xff" * 96)
    with pytest.raises(ValueError, match=r"states\.bin: expected finite states"):
        opened().get([0])
