"""Estimates of memory and time against the tensors, operations and steps of real runs on a tiny model."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
import torch
import workshop
from torch.utils.flop_counter import FlopCounterMode

from medusa_decoding.training import Config
from medusa_decoding.training.data.targets import draft_labels, number_segments
from medusa_decoding.training.loop import estimate
from medusa_decoding.training.loop.backbone import TrainingBackbone, load_tokenizer
from medusa_decoding.training.loop.estimate import Pace, Shapes
from medusa_decoding.training.loop.heads import make_heads
from medusa_decoding.training.loop.machines import parse
from medusa_decoding.training.loop.processes import Processes
from medusa_decoding.training.loop.rows import load_rows
from medusa_decoding.training.loop.trainer import Trainer
from medusa_decoding.training.loss import projections
from recipes.machines import MACHINES, MODELS, page, row

CPU = torch.device("cpu")
RECIPES = Path(__file__).parents[2] / "recipes"


def loaded(folder, method="medusa-1", /, **sections):
    """A configuration of a tiny model, with the objects of its run."""
    base = workshop.make_base(folder / "base", hidden_size=64, intermediate_size=160, head_dim=32)
    data = workshop.make_data(folder / "data.jsonl")
    config = workshop.config(folder / "out", base, data, method, **sections)
    tokenizer = load_tokenizer(config.model)
    rows = load_rows(config, tokenizer)
    backbone = TrainingBackbone.load(config, CPU)
    heads = make_heads(config, backbone, tokenizer, rows.frequencies)
    return config, rows, Trainer(config, backbone, heads, rows.train, None, Processes(0, 1, CPU, False))


def nbytes(tensors):
    return sum(tensor.nbytes for tensor in tensors)


@pytest.mark.parametrize(
    ("method", "sections"),
    [
        ("medusa-1", {}),
        ("medusa-1", {"heads": {"num_heads": 2, "shared_projection": True, "num_layers": 2}}),
        ("medusa-1", {"heads": {"num_heads": 2, "token_map_size": 40, "parent_rank": 3, "root_rank": 16}}),
        ("medusa-2", {"optimisation": {"heads_first_epochs": 0.0}}),
        ("medusa-2", {"lora": {"enabled": False}, "optimisation": {"heads_first_epochs": 0.0}}),
    ],
    ids=["own", "shared", "trimmed, with terms", "adapter", "all weights"],
)
def test_memory_of_weights_and_optimiser_is_exact(tmp_path, method, sections):
    config, _, trainer = loaded(tmp_path, method, **sections)
    trainer._step(trainer.stages[0])
    shapes = estimate.shapes_of(config)
    found = estimate.memory(config, shapes)
    adapter = {id(weight) for weight in trainer.backbone.trained().values()} if config.lora.enabled else set()
    frozen = [weight for weight in trainer.backbone.module.parameters() if id(weight) not in adapter]
    own = [weight for group in trainer.optimiser.param_groups for weight in group["params"]]
    added = [weight for weight in own if config.lora.enabled or not config.trains_backbone or weight not in set(frozen)]
    assert found["backbone"] == nbytes(frozen)
    assert found["trained weights"] == nbytes(added)
    moments = [state[name] for state in trainer.optimiser.state.values() for name in ("exp_avg", "exp_avg_sq")]
    projections = 0 if trainer.heads.w2 is None else trainer.heads.w2.nbytes
    assert found["optimiser"] == nbytes(moments)
    # Two micro-batches per step: the sum of gradients, and the newest one of the projections.
    assert found["gradients"] == nbytes(own) + projections


def test_quantised_weights_and_8_bit_moments_take_less():
    shapes = Shapes(32, 4096, 11008, 4096, 32000, 6_476_005_376, 262_410_240, 0, 739_000_000, 655_360_000)
    values = {"model": {"name": "m", "quantization": "4bit"}, "data": {"train": [{"path": "d"}]}}
    values |= {"output": {"folder": "o"}}
    paper = estimate.memory(Config.of(values), shapes)
    plain = Config.of(values | {"model": {"name": "m", "quantization": "none"}, "optimisation": {"optimizer": "adamw"}})
    # 4 bits and a scale per 64 weights, next to embeddings, norms and lm_head in bfloat16.
    assert paper["backbone"] == pytest.approx(0.5625 * 6_476_005_376 + 2 * 262_410_240)
    assert estimate.memory(plain, shapes)["backbone"] == 2 * (6_476_005_376 + 262_410_240)
    assert estimate.memory(plain, shapes)["optimiser"] - paper["optimiser"] == 6 * 739_000_000


def test_of_divided_weights_a_process_has_its_share():
    shapes = Shapes(32, 4096, 14336, 4096, 128_256, 6_979_321_856, 1_050_939_392, 0, 610_000_000, 0)
    values = {"model": {"name": "m"}, "method": "medusa-2", "lora": {"enabled": False}, "output": {"folder": "o"}}
    config = Config.of(values | {"data": {"train": [{"path": "d"}]}, "optimisation": {"optimizer": "adamw"}})
    one, eight = (estimate.memory(config, shapes, shards) for shards in (1, 8))
    for held in ("backbone", "trained weights", "gradients", "optimiser"):
        assert eight[held] == one[held] // 8
    # Two layers, the embedding, lm_head and the heads are gathered at a time, in float32.
    assert eight["gathered weights"] == pytest.approx(4 * (2 * 218_103_808 + 1_050_939_392 + 610_000_000))


@pytest.mark.parametrize("targets", ["hard", "kl"])
@pytest.mark.parametrize(
    "kind",
    [{}, {"shared_projection": True, "root_rank": 16}],
    ids=["own", "shared, root"],
)
def test_operations_are_those_that_torch_counts(tmp_path, kind, targets, monkeypatch):
    monkeypatch.setattr(projections, "_mkl_is_slow", lambda: False)  # torch does not count oneDNN's own operation
    config, rows, trainer = loaded(tmp_path, heads={"num_heads": 3, **kind}, loss={"targets": targets})
    batch = trainer._complete([0, 1], trainer._on_host([0, 1], rows.train))
    positions = batch["input_ids"].numel()
    # All heads project the positions that have a target for some head.
    labels, segments = batch["labels"].flatten(), number_segments(batch["position_ids"])
    learnt = int((draft_labels(labels, 3, segments=segments) >= 0).any(0).sum())
    with FlopCounterMode(display=False) as of_backbone, torch.no_grad():
        hidden = trainer.backbone.hidden(batch)
    with FlopCounterMode(display=False) as of_heads:
        normalisers = torch.ones(4, dtype=torch.int64)
        trainer.objective({**batch, "hidden": hidden}, normalisers)["loss"].backward()
    backbone, heads = estimate.operations(config, estimate.shapes_of(config))
    assert backbone * positions == pytest.approx(of_backbone.get_total_flops(), rel=0.1)
    assert heads * learnt == pytest.approx(of_heads.get_total_flops(), rel=0.1)


def test_the_time_of_a_run_counts_passes_updates_and_measurements(tmp_path):
    def config(**data):
        return workshop.config(tmp_path, "base", "data", data={"train": [{"path": "d"}], "length": 48} | data)

    pace = Pace(backbone=3.0, heads=1.0, update=0.5, how="measured")
    # 12 rows in 2 epochs are 6 steps of 4 rows, each of two micro-batches of 2; 4 held-out rows after each epoch.
    steps, measured = 6 * (2 * (3 + 1) + 0.5), 2 * 2 * (3 + 1 / 3)
    assert pace.seconds(config(), 12, 4) == pytest.approx(steps + measured)
    often = workshop.config(tmp_path, "base", "data", output={"evaluate_steps": 1})
    assert pace.seconds(often, 12, 4) == pytest.approx(steps + 3 * measured)
    most = workshop.config(tmp_path, "base", "data", optimisation={"epochs": 9.0, "max_steps": 6})
    assert pace.seconds(most, 12, 4) == pytest.approx(steps + measured)
    # Of 13 rows an epoch has a fourth step, of one row.
    assert pace.seconds(config(), 13, 0) == pytest.approx(2 * (13 / 2 * (3 + 1) + 4 * 0.5))
    assert pace.seconds(config(), 13, 0, processes=2) == pytest.approx(2 * (4 * (3 + 1) + 4 * 0.5))
    # Cached states save the backbone's passes of the second epoch.
    assert pace.seconds(config(cache_hidden="c"), 12, 4) == pytest.approx(steps + measured - 3 * 2 * 3)
    # States saved with the answers save those of the first epoch as well.
    (tmp_path / "d.states").touch()
    saved = config(cache_hidden="c", train=[{"path": str(tmp_path / "d")}])
    assert pace.seconds(saved, 12, 4) == pytest.approx(steps + measured - 6 * 2 * 3)


def test_two_stages_and_several_processes_have_their_own_times(tmp_path):
    config = workshop.config(tmp_path, "base", "data", "medusa-2", data={"length": 48})
    pace = Pace(3.0, 5.0, 0.5, "measured", first=Pace(3.0, 1.0, 0.25, "measured"))
    # 3 steps of 4 rows of the heads alone, and 6 of both; a process has two micro-batches of 2 rows, two have one each.
    for processes, passes in ((1, 2), (2, 1)):
        expected = 3 * (passes * 4 + 0.25) + 6 * (passes * 8 + 0.5)
        assert pace.seconds(config, 12, 0, processes) == pytest.approx(expected)
    found = estimate.pace_at(1e12, config, Shapes(32, 4096, 11008, 4096, 32000, 10**9, 10**8, 10**7, 10**8, 0))
    assert found.first.backbone == pytest.approx(found.backbone / 2)  # an adapter's gradient costs a second pass
    assert found.first.heads < found.heads


def test_the_page_of_recipes_is_what_their_predictions_say():
    assert (RECIPES / "README.md").read_text() == page()
    for model in MODELS:
        for machine in MACHINES:
            assert row(model, machine)[1] < parse(machine)[1].memory - 1.5 * 2**30


def test_a_small_model_is_measured_and_a_large_one_is_not(tmp_path, monkeypatch):
    config, rows, _ = loaded(tmp_path)
    shapes, tokenizer, alone = estimate.shapes_of(config), load_tokenizer(config.model), Processes(0, 1, CPU, False)
    before = torch.random.get_rng_state()
    found = estimate.pace(config, shapes, rows, tokenizer, alone)
    assert found.how == "measured"
    assert min(found.backbone, found.update) > 0
    assert torch.equal(torch.random.get_rng_state(), before)
    assert not (tmp_path / "out").exists()
    monkeypatch.setattr(estimate, "SMALL", 1000)
    monkeypatch.setattr(TrainingBackbone, "load", lambda *given: pytest.fail("loaded"))
    rough = estimate.pace(config, shapes, rows, tokenizer, alone)
    assert rough.how == "operations"
    assert "a rough estimate" in estimate.describe_time(config, rows, rough)


class Clock:
    """A thread that works 0.1 s between two looks, and waits for a core the other times."""

    def __init__(self, free):
        self.worked, self.free = 0.0, free

    def thread_time(self):
        self.worked += 0.1
        return self.worked

    def perf_counter(self):
        return self.worked / self.free


@pytest.mark.parametrize("how", ["measured", "operations"])
def test_other_programs_do_not_change_the_estimate_and_are_said(tmp_path, monkeypatch, how):
    config, rows, _ = loaded(tmp_path)
    shapes, tokenizer, alone = estimate.shapes_of(config), load_tokenizer(config.model), Processes(0, 1, CPU, False)
    monkeypatch.setattr(estimate, "SMALL", estimate.SMALL if how == "measured" else 0)
    lines = []
    for free in (1.0, 0.25):  # the share of the time that other programs leave to this one
        monkeypatch.setattr(estimate, "time", Clock(free))
        pace = estimate.pace(config, shapes, rows, tokenizer, alone)
        assert pace.how == how
        lines.append(estimate.describe_time(config, rows, pace).splitlines())
    (idle,), (busy, warning) = lines
    assert busy == idle
    assert re.search(r"the machine is busy: other programs had the core 75% of the time; .* takes about \d", warning)


@pytest.mark.parametrize("method", ["medusa-2", "self-distillation"])
def test_a_stage_that_trains_the_backbone_is_measured(tmp_path, method):
    _, _, trainer = loaded(tmp_path, method, optimisation={"heads_first_epochs": 1.0, "warmup_steps": 0})
    before = {name: weight.detach().clone() for name, weight in trainer._trained_weights.items()}
    assert min(trainer.time_parts(time.perf_counter, 1)) >= 0
    assert trainer.objective.joint
    assert any(not torch.equal(before[name], weight) for name, weight in trainer._trained_weights.items())


def test_a_run_that_does_not_fit_is_said(tmp_path, monkeypatch):
    config, _, _ = loaded(tmp_path)
    shapes = estimate.shapes_of(config)
    monkeypatch.setattr(estimate, "available", lambda device: 1000)
    assert "that does not fit: lower optimisation.micro_batch_size" in estimate.describe_memory(config, shapes, CPU)[-1]
    monkeypatch.setattr(estimate, "available", lambda device: None)
    assert "free" not in "".join(estimate.describe_memory(config, shapes, CPU))


# By docs/export.md, per recipe: whether vLLM, text-generation-inference and TensorRT-LLM read its heads.
READ = {"vicuna-7b": True, "mistral-7b": True, "llama-3-8b": False, "qwen3-8b": False}


@pytest.mark.parametrize("recipe", READ)
def test_programs_that_will_read_a_recipes_heads_are_named(recipe):
    config = Config.read(RECIPES / f"{recipe}.yaml")
    shapes = Shapes(32, 4096, 11008, 4096, 40_000, 1, 1, 0, 1, 1)
    _, own, *others = estimate.describe_readers(config, shapes)
    assert own == "  this package: yes, as they are"
    assert len(others) == 3
    assert all((": yes, medusa export --format" in line) == READ[recipe] for line in others)


def test_durations_in_words():
    words = [estimate.duration(seconds) for seconds in (0.2, 89, 89 * 60, 2 * 3600, 2.5e5)]
    assert words == ["1 s", "89 s", "89 min", "2 h 0 min", "2.9 days"]
