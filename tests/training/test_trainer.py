"""Runs of a few steps: what they minimise, what they change, how they stop and resume."""

import errno
import functools
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import toy
import workshop
from transformers import AutoModelForCausalLM, AutoTokenizer
from workshop import curve, heads_tensors, losses

from medusa_decoding import MedusaHeads, MedusaModel
from medusa_decoding.checkpoints import read_heads, write_heads
from medusa_decoding.training.config import SourceConfig
from medusa_decoding.training.data.encoding import ChatEncoder, encode_records
from medusa_decoding.training.data.records import Report, read_records
from medusa_decoding.training.loop import preflight, run, saving, trainer
from medusa_decoding.training.loop.accuracy import HeadAccuracy
from medusa_decoding.training.loop.backbone import TrainingBackbone, load_tokenizer
from medusa_decoding.training.loop.heads import make_heads
from medusa_decoding.training.loop.objective import Objective, count_targets
from medusa_decoding.training.loop.processes import Processes
from medusa_decoding.training.loop.rows import load_rows
from medusa_decoding.training.loop.run import train

METHODS = ("medusa-1", "medusa-2", "self-distillation")
pytestmark = pytest.mark.usefixtures("without_plots")


@pytest.fixture(scope="module")
def shop(tmp_path_factory):
    folder = tmp_path_factory.mktemp("workshop")
    return workshop.make_base(folder / "base"), workshop.make_data(folder / "data.jsonl")


@pytest.fixture(scope="module")
def finished(shop, without_plots):
    """Finished runs of `workshop.config` by method, with all checkpoints. Do not change them: copy them."""

    @functools.cache
    def run_of(method):
        return train(workshop.config(shop[0].parent / method, *shop, method, output={"keep_checkpoints": 99}))

    return run_of


class StoppedError(Exception):
    pass


def stop_at(step):
    def watch(line):
        if line["step"] >= step:
            raise StoppedError

    return watch


# What is minimised


def examples_of(base, data):
    tokenizer = AutoTokenizer.from_pretrained(base)
    report = Report()
    return list(encode_records(read_records([SourceConfig(str(data))], report), ChatEncoder(tokenizer), report))


@pytest.mark.parametrize(("pack", "targets"), [(True, "hard"), (False, "hard"), (True, "kl")])
def test_the_first_loss_follows_the_papers_formula(shop, tmp_path, pack, targets):
    base, data = shop
    rates = {"batch_size": 64, "micro_batch_size": 4, "epochs": 8.0}
    options = {"pack": pack, "held_out_share": 0.0}
    loss = {"targets": targets}
    train(workshop.config(tmp_path / "run", base, data, data=options, optimisation=rates, loss=loss))
    # Equation 1 by hand, after tokens of answers: new heads repeat the model's own prediction; one conversation at a
    # time, without packing. Soft labels are the model's prediction of the target, one place before it.
    model = AutoModelForCausalLM.from_pretrained(base)
    sums, counts = torch.zeros(3, dtype=torch.float64), torch.zeros(3)
    for example in examples_of(base, data):
        ids = torch.from_numpy(example.ids).long()
        with torch.no_grad():
            logits = model(ids[None]).logits[0].double()
        for head in range(3):
            for place in range(len(ids) - 2 - head):
                if example.learnt[place + 1] and example.learnt[place + 2 + head]:
                    if targets == "hard":
                        sums[head] += F.cross_entropy(logits[place], ids[place + 2 + head])
                    else:
                        teacher = logits[place + 1 + head].softmax(-1)
                        sums[head] += F.kl_div(logits[place].log_softmax(-1), teacher, reduction="sum")
                    counts[head] += 1
    first = curve(tmp_path / "run")[0]
    assert first["head_losses"] == pytest.approx((sums / counts).tolist(), rel=1e-5)
    expected = sum(0.8 ** (head + 1) * sums[head] / counts[head] for head in range(3))
    assert first["loss"] == pytest.approx(float(expected), rel=1e-5)
    assert losses(tmp_path / "run")[-1] < first["loss"]


def test_medusa_2_adds_the_model_s_own_loss_to_the_heads(shop, tmp_path):
    base, data = shop
    rates = {"batch_size": 64, "heads_first_epochs": 0.0}
    train(
        workshop.config(
            tmp_path / "run", base, data, "medusa-2", data={"held_out_share": 0.0}, optimisation=rates,
            loss={"lambda_0": 0.25}, lora={"dropout": 0.0},
        )
    )  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(base)
    total, count = 0.0, 0
    for example in examples_of(base, data):
        ids = torch.from_numpy(example.ids).long()
        with torch.no_grad():
            logits = model(ids[None]).logits[0].double()
        kept = torch.from_numpy(example.learnt[1:])
        total += float(F.cross_entropy(logits[:-1][kept], ids[1:][kept], reduction="sum"))
        count += int(kept.sum())
    first = curve(tmp_path / "run")[0]
    assert first["model_loss"] == pytest.approx(total / count, rel=1e-5)
    heads = sum(0.8 ** (k + 1) * loss for k, loss in enumerate(first["head_losses"]))
    assert first["loss"] == pytest.approx(total / count + 0.25 * heads, rel=1e-5)


@pytest.mark.parametrize("method", METHODS)
def test_the_size_of_micro_batches_does_not_change_the_result(shop, tmp_path, method):
    lora = {} if method == "medusa-1" else {"lora": {"dropout": 0.0}}
    for micro in (1, 4):
        rates = {"micro_batch_size": micro}
        train(workshop.config(tmp_path / str(micro), *shop, method, optimisation=rates, **lora))
    assert len(losses(tmp_path / "1")) >= 6
    assert losses(tmp_path / "1") == pytest.approx(losses(tmp_path / "4"), rel=1e-4, abs=1e-6)


# What is changed


def test_medusa_1_leaves_the_backbone_and_fits_the_heads(shop, tmp_path):
    base, data = shop
    before = {name: tensor.clone() for name, tensor in AutoModelForCausalLM.from_pretrained(base).state_dict().items()}
    kept = {}
    load = TrainingBackbone.load.__func__

    def keeping(cls, config, device):
        kept["backbone"] = load(cls, config, device)
        return kept["backbone"]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TrainingBackbone, "load", classmethod(keeping))
        result = train(workshop.config(tmp_path / "run", base, data, optimisation={"epochs": 12.0}))
    causal = kept["backbone"].causal
    assert all(torch.equal(tensor, before[name]) for name, tensor in causal.state_dict().items())
    assert all(weight.grad is None and not weight.requires_grad for weight in causal.parameters())
    found = losses(tmp_path / "run")
    assert found[-1] < 0.6 * found[0]
    assert result.base_model == str(base)
    assert result.measured.accuracy.total.min() > 0
    with MedusaModel.from_pretrained(result.heads, dtype=torch.float32) as model:
        ids = torch.tensor([[5, 9, 30, 12]])
        expected = AutoModelForCausalLM.from_pretrained(base).generate(ids, max_new_tokens=12, do_sample=False)
        assert torch.equal(model.generate(ids, max_new_tokens=12).sequences, expected)


def test_held_out_accuracies_are_those_of_the_written_heads(shop, tmp_path):
    base, data = shop
    result = train(workshop.config(tmp_path / "run", base, data))
    heads = read_heads(result.heads).heads
    model = AutoModelForCausalLM.from_pretrained(base)
    settings = workshop.config(tmp_path / "x", base, data)
    report = Report()
    from medusa_decoding.training.data.records import split_records

    records = split_records(read_records(settings.data.train, report), 0.2)[1]
    assert records
    hits, total = torch.zeros(3, 10), torch.zeros(3)
    for example in encode_records(records, ChatEncoder(AutoTokenizer.from_pretrained(base)), report):
        ids = torch.from_numpy(example.ids).long()
        with torch.no_grad():
            logits = heads(model.model(ids[None]).last_hidden_state[0])
        for head in range(3):
            for place in range(len(ids) - 2 - head):
                if example.learnt[place + 1] and example.learnt[place + 2 + head]:
                    best = logits[place, head].topk(10).indices
                    hits[head] += (best == ids[place + 2 + head]).cumsum(0)
                    total[head] += 1
    assert result.measured.accuracy.total.tolist() == total.tolist()
    assert result.measured.accuracy.hits.tolist() == hits.tolist()
    written = json.loads((result.heads / "measured.json").read_text())["accuracy"]
    assert written == {"hits": hits.tolist(), "total": total.tolist()}
    card = (result.heads / "README.md").read_text()
    assert f"| head 1 | {100 * hits[0, 0] / total[0]:.1f} |" in card
    assert [line for line in curve(tmp_path / "run") if "accuracy" in line][-1]["accuracy"]["hits"] == hits.tolist()


def test_medusa_2_trains_heads_alone_and_then_both_at_their_rates(shop, finished):
    result = finished("medusa-2")
    lines = [line for line in curve(result.folder) if "loss" in line]
    names = [line["stage"] for line in lines]
    assert names == sorted(names)
    assert set(names) == {"heads", "joint"}
    assert "model_loss" not in lines[0]
    assert "backbone" not in lines[0]["rates"]
    joint = [line for line in lines if line["stage"] == "joint"]
    assert joint[1]["rates"]["heads"] == pytest.approx(4 * joint[1]["rates"]["backbone"])
    assert joint[1]["lambda_0"] == 0.2
    assert result.base_model == "../model"
    merged = AutoModelForCausalLM.from_pretrained(result.folder / "model")
    original = AutoModelForCausalLM.from_pretrained(shop[0])
    changed = {
        name.rpartition(".")[0].rpartition(".")[2]
        for name, tensor in merged.state_dict().items()
        if not torch.equal(tensor, original.state_dict()[name])
    }
    expected = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"}
    assert changed == expected


def test_an_adapter_that_is_not_merged_writes_the_same_text(shop, tmp_path, monkeypatch):
    """Also if the base model was named by a relative path and the folder has changed since."""
    texts = []
    for merge in (True, False):
        folder = tmp_path / str(merge)
        lora, output = {"alpha": 64.0}, {"merge": merge}
        monkeypatch.chdir(shop[0].parent)
        result = train(workshop.config(folder, "base", shop[1], "medusa-2", output=output, lora=lora))
        assert result.base_model == ("../model" if merge else "../adapter")
        monkeypatch.chdir(tmp_path)
        with MedusaModel.from_pretrained(result.heads, dtype=torch.float32) as model:
            texts.append(model.generate(torch.tensor([[5, 9, 30, 12]]), max_new_tokens=12).sequences.tolist())
    assert texts[0] == texts[1]
    original = AutoModelForCausalLM.from_pretrained(shop[0])
    plain = original.generate(torch.tensor([[5, 9, 30, 12]]), max_new_tokens=12, do_sample=False)
    assert texts[0] != plain.tolist(), "the adapter changed nothing, so nothing was shown"


def test_without_an_adapter_the_whole_model_is_trained(shop, tmp_path):
    result = train(workshop.config(tmp_path / "run", *shop, "medusa-2", lora={"enabled": False}))
    assert result.base_model == "../model"
    trained = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model").state_dict()
    original = AutoModelForCausalLM.from_pretrained(shop[0]).state_dict()
    assert not any(torch.equal(tensor, original[name]) for name, tensor in trained.items())


@pytest.mark.parametrize("quantization", ["8bit", "4bit"])
@pytest.mark.parametrize("method", ["medusa-1", "medusa-2"])
def test_a_quantised_backbone_can_be_trained(shop, tmp_path, quantization, method):
    # bitsandbytes' CPU kernels need sizes that are multiples of a block.
    sizes = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 32, "num_key_value_heads": 2}
    base = workshop.make_base(tmp_path / "base", **sizes)
    model = {"quantization": quantization, "dtype": "bfloat16"}
    rates = {"optimizer": "adamw_8bit", "epochs": 6.0}
    result = train(workshop.config(tmp_path / "run", base, shop[1], method, model=model, optimisation=rates))
    found = losses(tmp_path / "run")
    assert found[-1] < found[0]
    assert result.base_model == (str(base) if method == "medusa-1" else "../adapter")
    heads = read_heads(result.heads).heads
    assert heads.w1.dtype == torch.bfloat16
    assert heads.w1.abs().max() > 0


@pytest.mark.parametrize(
    "variant",
    [
        {"parent_rank": 4},
        {"shared_projection": True, "parent_rank": 4, "token_map_size": 60, "bias": False},
        {"root_rank": 4, "num_layers": 2},
        {"feature_layers": [1], "parent_rank": 4},
    ],
    ids=["parents", "shared, parents, trimmed", "root", "features"],
)
def test_variants_are_trained_written_and_decode_the_same_text(shop, tmp_path, variant):
    base, data = shop
    result = train(workshop.config(tmp_path / "run", base, data, heads=variant, optimisation={"epochs": 6.0}))
    found = losses(tmp_path / "run")
    assert found[-1] < 0.97 * found[0]  # with the shared projection of a random model there is little to learn
    with MedusaModel.from_pretrained(result.heads, dtype=torch.float32) as model:
        heads = model.heads
        assert heads.parent_rank == variant.get("parent_rank", 0)
        assert heads.root_rank == variant.get("root_rank", 0)
        assert heads.num_candidates == variant.get("token_map_size", heads.vocab_size)
        if heads.parent_rank:
            assert heads.candidate_tokens.abs().max() > 0
        if heads.root_rank:
            assert heads.root_up.abs().amax((1, 2)).min() > 0
        assert heads.feature_layers == tuple(variant.get("feature_layers", ()))
        if heads.feature_layers:
            assert all(part.abs().max() > 0 for part in heads.feature_map.split(heads.hidden_size, 1))
        ids = torch.tensor([[5, 9, 30, 12]])
        expected = AutoModelForCausalLM.from_pretrained(base).generate(ids, max_new_tokens=12, do_sample=False)
        assert torch.equal(model.generate(ids, max_new_tokens=12).sequences, expected)


def test_training_continues_from_given_heads_and_adds_a_parent_term_and_more_inputs(shop, tmp_path):
    base, data = shop
    first = train(workshop.config(tmp_path / "first", base, data, optimisation={"epochs": 8.0}))
    heads = {"initial": str(first.heads), "parent_rank": 4, "root_rank": 3, "feature_layers": [1]}
    second = train(workshop.config(tmp_path / "second", base, data, heads=heads))
    assert losses(tmp_path / "second")[0] < 1.2 * losses(tmp_path / "first")[-1]
    assert losses(tmp_path / "second")[0] < 0.8 * losses(tmp_path / "first")[0]
    made = read_heads(second.heads).heads
    assert (made.root_rank, made.feature_layers) == (3, (1,))
    for name, value, own in (
        ("num_heads", 2, 3), ("bias", False, True), ("token_map_size", 60, None), ("root_rank", 2, 3)
    ):  # fmt: skip
        heads = {"initial": str(second.heads), "parent_rank": 4, "root_rank": 3, "feature_layers": [1], name: value}
        with pytest.raises(ValueError, match=rf"heads.{name}: expected {own} like the heads in .*, got {value}"):
            train(workshop.config(tmp_path / "third", base, data, heads=heads))


def test_heads_with_a_row_for_every_parent_are_trained_further(shop, tmp_path):
    base, data = shop
    settings = {"num_heads": 2, "shared_projection": True, "token_map_size": 60, "parent_rank": 4}
    first = train(workshop.config(tmp_path / "first", base, data, heads=settings))
    heads = read_heads(first.heads).heads
    given = MedusaHeads(
        heads.hidden_size, heads.vocab_size, 2, shared_projection=True, token_map=heads.token_map, parent_rank=4,
        all_parents=True,
    )  # fmt: skip
    write_heads(given, tmp_path / "given", base_model=str(base))
    settings["initial"] = str(tmp_path / "given")
    second = train(workshop.config(tmp_path / "second", base, data, heads=settings))
    assert len(heads.parent_tokens) == 61
    assert len(read_heads(second.heads).heads.parent_tokens) == heads.vocab_size


# The teacher


def test_the_teacher_is_the_model_with_its_adapter_off(shop, tmp_path):
    config = workshop.config(tmp_path / "run", *shop, "self-distillation", lora={"dropout": 0.5})
    backbone = TrainingBackbone.load(config, torch.device("cpu"))
    with torch.no_grad():
        for name, weight in backbone.module.named_parameters():
            if "lora_B" in name:
                weight.normal_(generator=torch.Generator().manual_seed(1))
    backbone.module.train()
    ids = torch.tensor([[5, 9, 30, 12]])
    batch = {"input_ids": ids, "position_ids": torch.arange(4)[None]}
    expected = AutoModelForCausalLM.from_pretrained(shop[0]).model(ids).last_hidden_state
    with torch.no_grad(), backbone.original():
        assert torch.equal(backbone.hidden(batch), expected)
    assert backbone.module.training
    assert not torch.allclose(backbone.hidden(batch), expected, atol=0.1)
    assert all(weight.requires_grad for name, weight in backbone.module.named_parameters() if "lora_" in name)


def test_self_distillation_starts_at_its_teacher_and_ramps_the_heads_weight(shop, tmp_path):
    config = workshop.config(tmp_path / "run", *shop, "self-distillation", lora={"dropout": 0.0})
    train(config)
    lines = [line for line in curve(tmp_path / "run") if "loss" in line]
    assert lines[0]["model_loss"] == pytest.approx(0.0, abs=1e-6)
    assert max(line["model_loss"] for line in lines[1:]) > 1e-6
    weights = [line["lambda_0"] for line in lines]
    assert weights == sorted(weights)
    assert weights[-1] == pytest.approx(0.01)


# The best on held-out data


OVERFITTED = {"optimisation": {"learning_rate": 0.05, "epochs": 14.0}, "output": {"evaluate_steps": 4}}
"""Settings of a run whose heads are best long before its last step."""


@pytest.fixture(scope="module")
def overfitted(shop, without_plots):
    output = OVERFITTED["output"] | {"checkpoint_steps": 4, "keep_checkpoints": 99}
    return train(workshop.config(shop[0].parent / "overfitted", *shop, **OVERFITTED | {"output": output}))


def test_the_heads_that_were_best_on_held_out_data_are_written(overfitted):
    lines = {line["step"]: line for line in curve(overfitted.folder) if "accuracy" in line}
    tokens = {step: HeadAccuracy.from_json(line["accuracy"]).expected_tokens(16) for step, line in lines.items()}
    best = max(tokens, key=tokens.get)
    assert best < overfitted.steps - 8
    assert (overfitted.heads_step, overfitted.measured.accuracy.to_json()) == (best, lines[best]["accuracy"])
    assert [line["best_step"] for line in lines.values() if line["step"] >= best] == [best] * 5
    weights = torch.load(overfitted.folder / "checkpoints" / f"step-{best:06d}" / saving.WEIGHTS, weights_only=True)
    heads = read_heads(overfitted.heads).heads
    assert all(torch.equal(heads.get_parameter(name[6:]), weight) for name, weight in weights.items())
    assert f"The heads are those of step {best}: of all" in (overfitted.heads / "README.md").read_text()


def test_a_resumed_run_writes_the_same_best_heads(shop, tmp_path, overfitted):
    expected = heads_tensors(overfitted.folder)
    for step in (overfitted.heads_step - 4, overfitted.heads_step, overfitted.steps):
        folder = tmp_path / str(step)
        shutil.copytree(overfitted.folder, folder, ignore=shutil.ignore_patterns("heads"))
        for path in (folder / "checkpoints").iterdir():
            if int(path.name.partition("-")[2]) > step:
                shutil.rmtree(path)
        result = train(workshop.config(folder, *shop, **OVERFITTED), resume=True)
        assert result.heads_step == overfitted.heads_step
        assert curve(folder) == curve(overfitted.folder)
        assert all(torch.equal(tensor, expected[name]) for name, tensor in heads_tensors(folder).items())


def test_a_run_ends_when_its_patience_does(shop, tmp_path, overfitted):
    rates = OVERFITTED["optimisation"] | {"patience": 3}
    config = workshop.config(tmp_path / "run", *shop, **OVERFITTED | {"optimisation": rates})
    said = []
    result = train(config, announce=said.append)
    assert (result.heads_step, result.steps) == (overfitted.heads_step, overfitted.heads_step + 12)
    assert f"ended after step {result.steps}: the last 3 evaluations were worse" in said
    tensors = heads_tensors(tmp_path / "run")
    expected = heads_tensors(overfitted.folder)
    shutil.rmtree(result.heads)
    again = train(config, resume=True)
    assert again.steps == result.steps
    for found in (tensors, heads_tensors(tmp_path / "run")):
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


# Stopping and resuming


@pytest.mark.parametrize("method", METHODS)
def test_a_run_resumes_from_any_checkpoint_to_the_same_bits(shop, tmp_path, finished, method):
    whole = finished(method).folder
    expected, tensors = curve(whole), heads_tensors(whole)
    stopped = tmp_path / "stopped"
    with pytest.raises(StoppedError):
        train(workshop.config(stopped, *shop, method), watchers=[stop_at(5)])
    assert max(line["step"] for line in curve(stopped)) == 5
    folders = [stopped]
    checkpoints = saving.Checkpoints(whole / "checkpoints", 1).all()
    assert len(checkpoints) >= 3
    for number in range(1, len(checkpoints) + 1):
        # The log has lines of later steps, as if the run was stopped some time after the checkpoint.
        folders.append(tmp_path / checkpoints[number - 1].name)
        shutil.copytree(whole, folders[-1], ignore=shutil.ignore_patterns("heads", "model"))
        for later in checkpoints[number:]:
            shutil.rmtree(folders[-1] / "checkpoints" / later.name)
    for folder in folders:
        train(workshop.config(folder, *shop, method), resume=True)
        assert curve(folder) == expected
        found = heads_tensors(folder)
        assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


def test_a_checkpoint_of_an_earlier_version_resumes(shop, tmp_path, finished):
    """Without `loss.targets` in its configuration, and with another form of the optimiser's update."""
    whole, folder = finished("medusa-1").folder, tmp_path / "run"
    shutil.copytree(whole, folder, ignore=shutil.ignore_patterns("heads"))
    *_, kept, last = sorted((folder / "checkpoints").iterdir())
    shutil.rmtree(last)
    saved = torch.load(kept / saving.OPTIMISER, weights_only=True)
    for group in saved["optimiser"]["param_groups"]:
        group["fused"] = None if group["fused"] else True
    torch.save(saved, kept / saving.OPTIMISER)
    state = json.loads((kept / saving.STATE).read_text())
    lines = state["config"].splitlines(keepends=True)
    text = "".join(line for line in lines if not line.strip().startswith("targets:"))
    assert len(text.splitlines()) == len(lines) - 1
    (kept / saving.STATE).write_text(json.dumps(state | {"config": text}))
    train(workshop.config(folder, *shop), resume=True)
    expected = heads_tensors(whole)
    assert all(torch.allclose(one, expected[name], atol=1e-6) for name, one in heads_tensors(folder).items())


@pytest.mark.parametrize("log_steps", [1, 100], ids=["logged", "before a checkpoint"])
def test_a_loss_that_is_not_finite_stops_with_the_last_good_checkpoint_named(
    shop, tmp_path, finished, monkeypatch, log_steps
):
    held_out = {"evaluate_steps": 1000, "log_steps": log_steps}
    config = workshop.config(tmp_path / "run", *shop, output=held_out if log_steps > 1 else {})
    measure = trainer.Trainer._micro_batches

    def broken(self, numbers):
        if self.at.step == 2 and threading.current_thread() is threading.main_thread():
            with torch.no_grad():
                self.heads.b1.fill_(float("nan"))
        return measure(self, numbers)

    monkeypatch.setattr(trainer.Trainer, "_micro_batches", broken)
    with pytest.raises(FloatingPointError, match=r"at step 3 of stage heads; the last good .*step-000002"):
        train(config)
    monkeypatch.undo()
    train(config, resume=True)
    whole = finished("medusa-1").folder
    expected = heads_tensors(whole)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in heads_tensors(tmp_path / "run").items())
    if log_steps == 1:
        assert curve(tmp_path / "run") == curve(whole)


def test_a_step_that_is_not_logged_reads_no_number_back(shop, tmp_path, monkeypatch):
    """Nor are the states that the first epoch keeps looked at before the step goes on: a thread does that."""
    output, kept = {"log_steps": 100, "evaluate_steps": 1000}, {"cache_hidden": str(tmp_path / "states")}
    read, config = [], workshop.config(tmp_path / "run", *shop, output=output, data=kept)
    looked, isfinite = [], torch.isfinite
    monkeypatch.setattr(torch, "isfinite", lambda x: looked.append(threading.current_thread()) or isfinite(x))
    for name in ("item", "tolist", "__float__", "__bool__", "__int__"):
        before = getattr(torch.Tensor, name)

        def noted(tensor, *, before=before):
            if tensor.is_floating_point():
                read.append(tensor)
            return before(tensor)

        monkeypatch.setattr(torch.Tensor, name, noted)
    counts, step = [], trainer.Trainer._step

    def counted(self, stage, logged):
        read.clear()
        line = step(self, stage, logged)
        counts.append((logged, len(read)))
        return line

    monkeypatch.setattr(trainer.Trainer, "_step", counted)
    train(config)
    assert {number for logged, number in counts if not logged} == {0}
    assert min(number for logged, number in counts if logged) > 0
    assert looked
    assert threading.main_thread() not in looked


def test_a_full_disk_names_the_last_good_checkpoint_and_leaves_it(shop, tmp_path, monkeypatch):
    config = workshop.config(tmp_path / "run", *shop)
    save, calls = torch.save, []

    def full(*args, **options):
        calls.append(args)
        if len(calls) > 3:  # two files per checkpoint
            raise OSError(errno.ENOSPC, "No space left on device")
        return save(*args, **options)

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(OSError, match=r"No space left on device.*the last good checkpoint is .*step-000002"):
        train(config)
    monkeypatch.undo()
    left = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert left == ["step-000002"]
    train(config, resume=True)


def test_only_the_last_checkpoints_are_kept(shop, tmp_path):
    # A run that was killed while it wrote, replaced and removed checkpoints left their parts.
    for left in (".step-000001.ab.tmp", ".step-000001.ab.old", "step-000001"):
        (tmp_path / "run" / "checkpoints" / left).mkdir(parents=True)
        (tmp_path / "run" / "checkpoints" / left / "weights.pt").touch()
    train(workshop.config(tmp_path / "run", *shop, output={"keep_checkpoints": 2}))
    steps = max(line["step"] for line in curve(tmp_path / "run"))
    names = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    last = [step for step in range(1, steps + 1) if step % 2 == 0 or step == steps][-2:]
    assert names == [f"step-{step:06d}" for step in last]


def test_records_that_are_left_out_are_not_counted(shop, tmp_path):
    config = workshop.config(tmp_path / "run", *shop, data={"length": 20, "overlong": "drop"})
    rows = load_rows(config, load_tokenizer(config.model))
    kept = sum(length <= 20 for length in rows.lengths)
    assert 0 < kept < len(rows.lengths)
    assert sum(rows.records) == kept


def test_a_folder_that_holds_a_run_is_not_overwritten(shop, tmp_path, finished):
    config = workshop.config(tmp_path / "run", *shop)
    shutil.copytree(finished("medusa-1").folder, tmp_path / "run")
    with pytest.raises(ValueError, match=r"output.folder: expected a new one \(or --resume"):
        train(config)
    changed = workshop.config(tmp_path / "run", *shop, optimisation={"learning_rate": 1e-3})
    with pytest.raises(ValueError, match=r"optimisation.learning_rate: expected what the run in .* was begun with"):
        train(changed, resume=True)
    moved = {"micro_batch_size": 4, "sharding": "none"}
    allowed = workshop.config(tmp_path / "run", *shop, output={"log_steps": 5}, optimisation=moved)
    assert train(allowed, resume=True).steps > 0


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        (saving.STATE, "[]", "expected a JSON object"),
        (saving.STATE, json.dumps({"config": "[" * 5}), "state.json: config: "),
        (saving.WEIGHTS, "none", "weights.pt: "),
    ],
)
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_serves(shop, tmp_path, finished, name, content, words):
    config = workshop.config(tmp_path / "run", *shop)
    shutil.copytree(finished("medusa-1").folder, tmp_path / "run", ignore=shutil.ignore_patterns("heads"))
    newest = max((tmp_path / "run" / "checkpoints").iterdir())
    (newest / name).write_text(content)
    with pytest.raises(ValueError, match=rf"{newest.name}: expected a complete checkpoint.*{words}"):
        train(config, resume=True)
    (newest / saving.STATE).unlink()  # as if it was being removed
    train(config, resume=True)
    expected = heads_tensors(finished("medusa-1").folder)
    assert all(torch.equal(tensor, expected[key]) for key, tensor in heads_tensors(tmp_path / "run").items())


def test_a_run_resumes_only_with_its_own_data(shop, tmp_path):
    base, data = shop
    own, records = tmp_path / "own.jsonl", [json.loads(line) for line in data.read_text().splitlines()]
    two_answers = toy.sharegpt("one", "Paris is", "two", "the capital")
    toy.write_lines(own, two_answers, *records)
    train(workshop.config(tmp_path / "run", base, own))
    two_answers["conversations"][1]["weight"] = 0  # the same tokens, of which fewer are learnt
    for changed in (
        [two_answers, *records],
        [*reversed(records), toy.sharegpt("one", "Paris is", "two", "the capital")],
    ):
        toy.write_lines(own, *changed)
        with pytest.raises(ValueError, match=r"expected a run on these very rows, got one on others"):
            train(workshop.config(tmp_path / "run", base, own), resume=True)


def test_four_bit_layers_pass_gradients_after_a_pass_without_gradients(shop, tmp_path):
    sizes = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 32, "num_key_value_heads": 2}
    base = workshop.make_base(tmp_path / "base", **sizes)
    model = {"quantization": "4bit", "dtype": "bfloat16"}
    lora = {"dropout": 0.0}
    config = workshop.config(tmp_path / "run", base, shop[1], "medusa-2", model=model, lora=lora)
    torch.manual_seed(0)
    backbone = TrainingBackbone.load(config, torch.device("cpu"))
    batch = {"input_ids": torch.tensor([[5, 9, 30, 12, 7, 7, 40, 41]]), "position_ids": torch.arange(8)[None]}

    def gradients():
        backbone.module.train()
        for weight in backbone.trained().values():
            weight.grad = None
        with torch.autocast("cpu", torch.bfloat16):
            backbone.hidden(batch).float().square().sum().backward()
        return {name: weight.grad.clone() for name, weight in backbone.trained().items() if weight.grad is not None}

    before = gradients()
    backbone.module.eval()
    with torch.no_grad():
        backbone.hidden(batch)
    after = gradients()
    used = [name for name, gradient in before.items() if gradient.abs().max() > 0]
    assert len(used) >= 14  # the second matrix of each of two layers' seven adapters
    for name in used:
        assert torch.equal(after[name], before[name]), name


# Hidden states on disk


def test_states_on_disk_give_the_same_heads_without_running_the_backbone(shop, tmp_path, monkeypatch):
    heads = {"feature_layers": [1]}
    train(workshop.config(tmp_path / "without", *shop, heads=heads, optimisation={"epochs": 3.0}))
    rows, hidden = [], TrainingBackbone.hidden

    def counting(self, batch):
        rows.append(len(batch["input_ids"]))
        return hidden(self, batch)

    monkeypatch.setattr(TrainingBackbone, "hidden", counting)
    cache = {"cache_hidden": str(tmp_path / "states")}
    folder = tmp_path / "with"
    options = {"optimisation": {"epochs": 3.0}, "output": {"evaluate_steps": 1000}}
    train(workshop.config(folder, *shop, heads=heads, data=cache, **options))
    trained = [line for line in curve(tmp_path / "without") if "loss" in line]
    assert [line for line in curve(folder) if "loss" in line] == trained
    steps = len(trained)
    total = sum(rows)
    assert steps >= 9
    assert total < 2 * 22
    rows.clear()
    train(workshop.config(tmp_path / "again", *shop, heads=heads, data=cache, output={"evaluate_steps": 1000}))
    assert sum(rows) < 22 / 2, "the states were there: only held-out rows run"
    other = workshop.make_base(tmp_path / "base", seed=9)
    for base, changes, reads in ((shop[0], {"length": 40}, heads), (other, {}, heads), (shop[0], {}, {})):
        with pytest.raises(ValueError, match=r"data.cache_hidden: expected .* with another"):
            train(workshop.config(tmp_path / "other", base, shop[1], heads=reads, data=cache | changes))
    with pytest.raises(ValueError, match=r"feature_layers: expected numbers below the model's 2 layers, got \[2\]"):
        train(workshop.config(tmp_path / "other", *shop, heads={"feature_layers": [2]}))


def test_gradient_checkpointing_gives_the_same_heads(shop, tmp_path):
    for on in (False, True):
        model = {"gradient_checkpointing": on}
        train(workshop.config(tmp_path / str(on), *shop, "medusa-2", model=model, lora={"dropout": 0.0}))
    assert losses(tmp_path / "True") == pytest.approx(losses(tmp_path / "False"), rel=1e-5)


# Several processes


def test_a_failure_of_one_process_ends_all_processes(shop, tmp_path, monkeypatch):
    told, together = [], Processes.together

    def telling(self, error):
        told.append(error)
        together(self, error)

    def broken(*arguments):
        raise RuntimeError("damaged weights")

    with monkeypatch.context() as patch:
        patch.setattr(Processes, "together", telling)
        patch.setattr(run, "make_heads", broken)
        with pytest.raises(RuntimeError, match="damaged weights"):
            train(workshop.config(tmp_path / "run", *shop))
    assert [str(error) for error in told if error is not None] == ["damaged weights"]
    # In another process.
    monkeypatch.setattr(Processes, "total", lambda self, tensor: tensor + 1)
    monkeypatch.setattr(run, "make_heads", lambda *arguments: pytest.fail("went on"))
    with pytest.raises(RuntimeError, match="another process of this run failed"):
        train(workshop.config(tmp_path / "run", *shop))


def test_a_quantised_model_is_not_sharded(shop, tmp_path):
    base = workshop.make_base(tmp_path / "base")
    settings = json.loads((base / "config.json").read_text())
    settings["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    (base / "config.json").write_text(json.dumps(settings))
    divided = Processes(0, 1, torch.device("cpu"), True)
    with pytest.raises(ValueError, match=r"^model\.name: expected a model that is not quantised with divided weights"):
        preflight.check(workshop.config(tmp_path / "run", base, shop[1]), divided)
    preflight.check(workshop.config(tmp_path / "run", *shop), divided)


def test_heads_that_are_too_large_for_the_optimiser_are_refused_before_data_is_read(shop, tmp_path):
    base = workshop.make_base(tmp_path / "base")
    settings = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(settings | {"vocab_size": 128256, "hidden_size": 4096}))
    rates = {"optimizer": "adamw_8bit", "batch_size": 4}
    asked = workshop.config(tmp_path / "run", base, tmp_path / "none.jsonl", heads={"num_heads": 5}, optimisation=rates)
    with pytest.raises(ValueError, match=r"expected adamw for weights of \[5, 128256, 4096\].*, got adamw_8bit"):
        train(asked)


# Started by torchrun and by accelerate, each process in a working folder of its own, as on nodes without a shared disk.
# On a machine without GPUs the same arguments start processes on the CPU (accelerate's --cpu would start one).
TORCHRUN = "torch.distributed.run --nnodes 2 --nproc-per-node 1 --rdzv-endpoint 127.0.0.1:{port} --node-rank {rank}"
ACCELERATE = "accelerate.commands.launch --mixed_precision no --dynamo_backend no --num_processes 2 "
PLACE = "--main_process_ip 127.0.0.1 --main_process_port {port} --machine_rank {rank}"
COPIES = f"{ACCELERATE} --multi_gpu --num_machines 2 {PLACE}"
DIVIDED = f"{ACCELERATE} --use_fsdp --num_machines 1 --main_process_port 0"


def launch(folder, how, *jobs):
    """Run `several.py` in two processes, as two nodes or on one."""
    for number, job in enumerate(jobs):
        job["folder"] = str(folder / str(number))
    (folder / "jobs.json").write_text(json.dumps(jobs))
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    script = [str(Path(__file__).with_name("several.py")), str(folder / "jobs.json")]
    ranks = range(1 if how is DIVIDED else 2)
    commands = [["-m", *how.format(port=port, rank=rank).split(), *script] for rank in ranks]
    options = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    running = [subprocess.Popen([sys.executable, *command], env=environment, **options) for command in commands]
    said = [process.communicate(timeout=300)[1] for process in running]
    assert not any(process.returncode for process in running), "\n".join(text[-3000:] for text in said)


def check_as_one(found, one):
    """Compare a run of two processes, the second of which wrote nothing into an output folder, to that of one."""
    assert not (found.parents[1] / "process-1" / "run").exists()
    lines, expected = curve(found), curve(one)
    assert [line["step"] for line in lines] == [line["step"] for line in expected]
    assert losses(found) == pytest.approx(losses(one), rel=1e-4, abs=1e-6)
    measured = [(line["accuracy"], line.get("best_step")) for line in lines if "accuracy" in line]
    assert measured == [(line["accuracy"], line.get("best_step")) for line in expected if "accuracy" in line]
    tensors = heads_tensors(one)
    assert heads_tensors(found).keys() == tensors.keys()
    for name, tensor in heads_tensors(found).items():
        assert torch.allclose(tensor.float(), tensors[name].float(), atol=2e-3), name


@pytest.mark.slow
def test_two_nodes_continue_as_one_process_and_back_to_the_same_curve(shop, tmp_path, overfitted):
    """The best heads are those of a step of the one process."""
    base, data = map(str, shop)
    distilled = {"lora": {"dropout": 0.0}, "loss": {"targets": "kl"}}
    cached = OVERFITTED | {"data": {"cache_hidden": "states"}}
    train(workshop.config(tmp_path / "one", *shop, "self-distillation", **distilled))
    launch(
        tmp_path, TORCHRUN,
        {"config": (base, data, "self-distillation", distilled), "legs": [("two", 4), ("one", 8), ("two", None)]},
        {
            "config": (base, data, "medusa-1", cached),
            "legs": [("two", 16), ("one", 32), ("two", None)],
            "refusals": True,
        },
    )  # fmt: skip
    check_as_one(tmp_path / "0" / "process-0" / "run", tmp_path / "one")
    check_as_one(tmp_path / "1" / "process-0" / "run", overfitted.folder)
    for rank in range(2):  # each node computes the states that the other one had before
        there = tmp_path / "1" / f"process-{rank}" / "states" / f"node-{rank}" / "there.bin"
        assert set(there.read_bytes()) == {1}


@pytest.mark.slow
def test_divided_weights_continue_whole_and_back_to_the_same_curve(shop, tmp_path, overfitted):
    """Before they are divided, only the main process holds them; also tied ones, and heads with buffers."""
    tied, data = str(workshop.make_base(tmp_path / "tied", tie_word_embeddings=True)), str(shop[1])
    buffers = {"heads": {"token_map_size": 60, "parent_rank": 4, "root_rank": 5}}
    joint = {"lora": {"enabled": False}, "heads": {"shared_projection": True}}
    alone = {"base": (shop[0], data, "medusa-1", buffers), "tied": (tied, data, "medusa-2", joint)}
    for name, (*places, options) in alone.items():
        train(workshop.config(tmp_path / f"one-{name}", *places, **options))
    legs = [("two", None)]
    launch(
        tmp_path, DIVIDED,
        {"config": (str(shop[0]), data, "medusa-1", buffers), "legs": legs},
        {"config": (tied, data, "medusa-2", joint), "legs": legs},
        {
            "config": (str(shop[0]), data, "medusa-1", OVERFITTED),
            "legs": [("two", 8), ("one", 16), ("copies", 32), ("two", None)],
        },
    )  # fmt: skip
    for number, expected in enumerate((tmp_path / "one-base", tmp_path / "one-tied", overfitted.folder)):
        check_as_one(tmp_path / str(number) / "process-0" / "run", expected)
        main, other = (
            json.loads((tmp_path / str(number) / f"process-{rank}" / "held.json").read_text()) for rank in range(2)
        )
        assert (main["loads"], other["loads"]) == (1, 0)
        assert main["before"] == main["all"]
        assert other["before"] == 0
        assert other["after"] <= 0.51 * other["all"] + 64  # an odd number of rows is not halved


@pytest.mark.slow
@pytest.mark.parametrize("how", [COPIES, DIVIDED])
def test_two_processes_train_with_the_settings_of_the_recipes(shop, tmp_path, how):
    """They run, resume and log nearly the losses of one process: in bfloat16 the order of sums changes rounding."""
    base, data = map(str, shop)
    joint = {"model": {"dtype": "bfloat16", "gradient_checkpointing": True}, "lora": {"dropout": 0.0}}
    trimmed = {"num_layers": 2, "token_map_size": 60, "parent_rank": 4, "root_rank": 5}
    jobs = [(base, data, "self-distillation", joint | {"loss": {"targets": "kl"}, "heads": trimmed})]
    if how is COPIES:  # divided weights exclude both
        pytest.importorskip("bitsandbytes", reason="the extra 'quantized' is not installed")
        packed = {"model": joint["model"] | {"quantization": "4bit"}, "optimisation": {"optimizer": "adamw_8bit"}}
        jobs.append((base, data, "medusa-2", joint | packed))
    launch(tmp_path, how, *({"config": job, "legs": [("two", 4), ("one", 6), ("two", None)]} for job in jobs))
    for number, (*places, options) in enumerate(jobs):
        train(workshop.config(tmp_path / f"one-{number}", *places, **options))
        found = losses(tmp_path / str(number) / "process-0" / "run")
        assert found == pytest.approx(losses(tmp_path / f"one-{number}"), rel=0.02)


# Families whose logits are not lm_head's


@pytest.mark.parametrize("family", ["granite", "gemma2"])
@pytest.mark.parametrize("shared", [False, True])
def test_losses_are_those_of_the_logits_that_transformers_gives(shop, tmp_path, family, shared):
    """Medusa-1 with soft labels, then Medusa-2 and self-distillation, before an adapter has learnt anything."""
    base = workshop.make_base(tmp_path / "base", family=family)
    heads = {"num_heads": 1, "shared_projection": shared}
    options = {"heads": heads, "loss": {"targets": "kl"}, "lora": {"dropout": 0.0}}
    config = workshop.config(tmp_path / "run", base, shop[1], "self-distillation", **options)
    backbone = TrainingBackbone.load(config, torch.device("cpu"))
    tokenizer = AutoTokenizer.from_pretrained(base)
    objective = Objective(backbone, make_heads(config, backbone, tokenizer, Counter()), config)
    ids = torch.arange(5, 25)
    batch = {"input_ids": ids[None], "labels": ids[None], "position_ids": torch.arange(20)[None]}
    with torch.no_grad():
        model = AutoModelForCausalLM.from_pretrained(base, attn_implementation="eager")  # caps in transformers 5.17 too
        logits = model(ids[None]).logits[0].double()
    own = F.cross_entropy(logits[:-1], ids[1:], reduction="sum")
    hard = F.cross_entropy(logits[:-2], ids[2:], reduction="sum")
    soft = F.kl_div(logits[:-2].log_softmax(-1), logits[1:-1].softmax(-1), reduction="sum")
    with torch.no_grad():
        measured = objective(batch)
    assert measured["model_sum"].item() == pytest.approx(own.item(), rel=1e-5)
    counts = count_targets(batch, 1, None)
    objective.joint = True
    found = objective(batch, counts)
    assert found["model_sum"].item() == pytest.approx(0, abs=1e-4)  # both sides have the family's logits
    found["loss"].backward()
    if shared or family == "granite":  # a cap is no matrix: own projections start from what is capped
        assert measured["head_sums"].item() == pytest.approx(hard.item(), rel=1e-5)
        assert found["head_sums"].item() == pytest.approx(soft.item(), rel=1e-5)
    if shared:
        adapter = backbone.lm_head.lora_B.default.weight.grad
        assert adapter is not None
        assert bool(adapter.any())


def test_the_base_model_s_revision_is_recorded(shop, tmp_path, finished):
    base, data = shop
    model = {"revision": "v1.1"}  # has no meaning for a folder, but is still recorded
    for method, recorded in (("medusa-1", "v1.1"), ("medusa-2", None)):
        result = train(workshop.config(tmp_path / method, base, data, method, model=model))
        assert read_heads(result.heads).base_revision == recorded
        assert workshop.settings_of(tmp_path / method).get("base_model_revision") == recorded
        assert r"(revision v1.1), trained with the method" in (result.heads / "README.md").read_text()
    heads = finished("medusa-1").heads
    assert read_heads(heads).base_revision is None
    assert "(revision" not in (heads / "README.md").read_text()
