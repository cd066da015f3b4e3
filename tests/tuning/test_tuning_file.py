"""tuning.json: written atomically, read back, refused if something has changed, and used by from_pretrained."""

from __future__ import annotations

import copy
import json
import logging
import shutil
from dataclasses import replace

import pytest
import torch
from models import heads_for, prompts, tiny, transformers_greedy
from transformers import AutoModelForCausalLM

from medusa_decoding import MedusaModel, Tree, medusa_generate
from medusa_decoding.checkpoints import read_heads, tuning_file, tuning_paths, write_heads
from medusa_decoding.checkpoints.accuracies import Accuracies, CalibrationSource
from medusa_decoding.checkpoints.tuning_file import INDEPENDENT, Conditions, Tuning, load_for
from medusa_decoding.decode.adaptive.copying import LENGTHS
from medusa_decoding.decode.adaptive.policy import Adaptive
from medusa_decoding.generation import tree_choice
from medusa_decoding.generation.tree_choice import TreeChoice
from medusa_decoding.provenance import fingerprint
from medusa_decoding.tuning.select import best_trees, expected_tokens, new_case, new_tuning
from medusa_decoding.tuning.step_timer import Latency

ACCURACIES = Accuracies("calibration.json", [[0.6, 0.2], [0.5, 0.1]])
# Seconds by nodes: 4 nodes are best for short prefixes, plain decoding for long ones, 2 nodes for a batch.
SHORT, LONG, BATCH = {1: 1.0, 2: 1.2, 4: 1.3}, {1: 1.0, 2: 2.0, 4: 3.0}, {1: 1.0, 2: 1.1, 4: 3.0}


def made_up(model, cases=((1, 8, SHORT), (1, 64, LONG), (4, 8, BATCH))):
    """A tuning of a model with made-up durations."""
    measured, chosen = [], []
    for batch, prefix, times in cases:
        here = [Latency(batch, prefix, prefix + 300, nodes, (seconds,) * 5) for nodes, seconds in times.items()]
        chosen.append(chosen_among(here))
        measured += here
    return new_tuning(conditions_of(model), ACCURACIES, chosen, measured)


def chosen_among(measured):
    trees = best_trees(ACCURACIES.by_rank, [one.nodes for one in measured])
    return new_case(trees, expected_tokens(trees, ACCURACIES.by_rank), measured)


def conditions_of(model):
    return Conditions.current(model.backbone, model.heads, model.backend)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A checkpoint with a tuning file next to it, for all tests of the module."""
    folder = tmp_path_factory.mktemp("checkpoint")
    model = tiny(max_position_embeddings=512)
    model.save_pretrained(folder / "base")
    write_heads(heads_for(model, shared=True), folder / "heads", base_model="../base")
    Tree.chain(1).save(folder / "heads" / "medusa_tree.json")
    with MedusaModel.from_pretrained(folder / "heads") as loaded:
        made_up(loaded).save(folder / "heads" / tuning_paths.FILE)
    return folder


@pytest.fixture
def tuned(files, tmp_path):
    """A copy of the checkpoint with its tuning."""
    return shutil.copytree(files, tmp_path, dirs_exist_ok=True)


@pytest.fixture
def folders(tuned):
    """A copy of the checkpoint without a tuning."""
    (tuned / "heads" / tuning_paths.FILE).unlink()
    return tuned


COPIES = {1 + length for length in LENGTHS}
"""Nodes of the trees that copy from the text."""


def used(model, rows, **settings):
    ids = torch.stack(rows)
    output = model.generate(ids, max_new_tokens=12, metrics=True, **settings)
    return set(output.metrics.tree_nodes), output


# Used by default


def test_the_tuned_tree_is_the_default(tuned):
    with MedusaModel.from_pretrained(tuned / "heads") as model:
        choice = model.tree_choice(batch=1, prefix=20)
        assert (choice.tree.num_nodes, choice.reason) == (4, "tuned on this device for batch 1 and prefix 8")
        for length, batch, nodes in ((7, 1, 4), (20, 1, 4), (60, 1, 1), (200, 1, 1), (7, 4, 2), (7, 3, 2), (60, 4, 2)):
            rows = prompts(batch, [length])
            found, output = used(model, rows)
            assert found - COPIES == {nodes}
            for row, ids in zip(rows, output.sequences, strict=True):
                assert ids[length:].tolist() == transformers_greedy(model.base, row, 12)


def test_the_tree_for_sampling_is_the_default_where_a_tree_was_chosen(tuned, caplog):
    """Only if the tuning timed it, and not where plain decoding is the fastest."""
    stored = best_trees(ACCURACIES.by_rank, [2])[0]
    stored.save(tuned / "heads" / "medusa_tree_sampling.json")
    with MedusaModel.from_pretrained(tuned / "heads") as model:
        assert model.tree_choice(1, 8, sample=True) == TreeChoice(stored, tree_choice.FOR_SAMPLING)
        assert model.tree_choice(1, 8).tree.num_nodes == 4
        for length, nodes in ((7, 2), (60, 1)):
            assert used(model, prompts(1, [length]), do_sample=True, seed=1)[0] - COPIES == {nodes}
            assert used(model, prompts(1, [length]), do_sample=True, seed=1, tree=Tree.chain(2))[0] == {3}
    assert caplog.records == []
    Tree.chain(3).save(tuned / "heads" / "medusa_tree_sampling.json")
    with MedusaModel.from_pretrained(tuned / "heads") as model:
        assert model.tree_choice(1, 8, sample=True) == model.tree_choice(1, 8)
    [record] = caplog.records
    assert record.getMessage().startswith(f"{tuned / 'heads' / 'medusa_tree_sampling.json'} is not used")


def test_a_tree_saved_after_a_tuning_is_not_ignored_silently(tuned, caplog):
    Tree.chain(2).save(tuned / "heads" / "medusa_tree.json")
    with MedusaModel.from_pretrained(tuned / "heads") as model:
        assert model.tree_choice(1, 8).tree.num_nodes == 4
    [record] = caplog.records
    assert record.getMessage().startswith(f"{tuned / 'heads' / 'medusa_tree.json'} is not used")
    assert "Run `medusa tune` again, or pass it as tree=" in record.getMessage()
    caplog.clear()
    for tree in ("auto", Tree.chain(2)):
        with MedusaModel.from_pretrained(tuned / "heads", tree=tree) as model:
            assert tree != "auto" or Tree.chain(2) in model._adaptive().trees
    assert caplog.records == []


def test_transformers_generate_uses_the_tuning_of_a_folder(tuned):
    model = AutoModelForCausalLM.from_pretrained(tuned / "base").eval()
    settings = {"custom_generate": medusa_generate, "heads": tuned / "heads", "max_new_tokens": 12}
    settings |= {"return_dict_in_generate": True, "pad_token_id": 0}
    for length, nodes in ((7, 4), (60, 1)):
        [row] = prompts(1, [length])
        output = model.generate(row[None], attention_mask=torch.ones(1, length), **settings)
        assert output.tree_choice.tree.num_nodes == nodes
        assert output.sequences[0, length:].tolist() == transformers_greedy(model, row, 12)
    [row] = prompts(1, [7])
    output = model.generate(row[None], attention_mask=torch.ones(1, 7), **settings, backend="compiled", max_time=0.0)
    assert output.tree_choice == TreeChoice("auto", tree_choice.CHANGED)


def test_a_tuning_holds_for_the_dtype_of_the_cache(tuned):
    with MedusaModel.from_pretrained(tuned / "heads") as model:
        tuned_choice, conditions = model.tree_choice(1, 8), conditions_of(model)
        model.cache_dtype = "int8"
        assert model.tree_choice(1, 8) == TreeChoice("auto", tree_choice.CHANGED)
        assert conditions.differences(conditions_of(model)) == ["dtype: tuned with float32, now float32, cache in int8"]
        model.cache_dtype = None
        assert model.tree_choice(1, 8) == tuned_choice


def test_a_tuning_holds_for_the_dtype_of_activations(tuned):
    with MedusaModel.from_pretrained(tuned / "heads") as model:
        plain = conditions_of(model)
        model.backbone.linears.rounds = True
        assert plain.differences(conditions_of(model)) == [
            "dtype: tuned with float32, now float32, activations in int8"
        ]


def test_plain_and_undecided_cases_say_so(tuned):
    with MedusaModel.from_pretrained(tuned / "heads") as model:
        plain = model.tree_choice(1, 64)
        # 1.6 tokens in twice the time of a plain step, in every round.
        copied = "plain decoding, or tokens copied from the text"
        assert str(plain) == f"{copied} (`medusa tune` found no tree faster here: 0.80 of plain)"
        tuning = model._tuning
        case = replace(tuning.cases[0], tree="auto", gain=(1.04, 0.9, 1.2))
        assert Tuning.from_json(json.loads(json.dumps(replace(tuning, cases=(case,)).to_json()))).cases == (case,)
        assert (case.chosen, case.speedup, case.fastest.nodes) == (None, None, 4)
        model._tuning = replace(tuning, cases=(case,))
        choice = model.tree_choice(1, 8)
        assert choice.tree == "auto"
        assert choice.reason == "`medusa tune` could not tell its fastest tree from plain decoding: 1.04 of plain"
        assert used(model, prompts(1, [7]))[1].tree_choice == choice


def test_auto_starts_from_the_stored_times(tuned):
    [short], [long] = prompts(1, [7]), prompts(1, [70])
    with MedusaModel.from_pretrained(tuned / "heads", tree="auto") as model:
        assert model.tree == "auto"
        for row, pays in ((short, True), (long, False)):
            policy = model._adaptive()
            assert isinstance(policy, Adaptive)
            policy.begin(0.0, batch=1, rows=len(row) + 300)
            # Without observations, the first step uses a tree if trees pay off.
            assert (policy.choose().num_nodes > 1) == pays
        model.free()
        assert model._adaptive().times.profile(1, 308).known() == SHORT
        assert model._adaptive().times.device.endswith(", eager")
    (tuned / "heads" / tuning_paths.FILE).unlink()
    with MedusaModel.from_pretrained(tuned / "heads", tree="auto") as model:
        policy = model._adaptive()
        policy.begin(0.0, batch=1, rows=307)
        assert policy.choose().num_nodes == 1


def test_the_tree_set_of_auto_uses_the_counts_next_to_the_heads(folders, caplog):
    def shares():
        with MedusaModel.from_pretrained(folders / "heads") as model:
            tree_set = model._adaptive().acceptance.tree_set
        # Odds against both children of the root in the smallest tree that has both.
        place = next(index for index, tree in enumerate(tree_set.trees) if tree.num_nodes == 4)
        return 1 / (1 + tree_set.odds_against[place][0])

    assert shares() == pytest.approx(0.56 + 0.112)  # published
    (folders / "heads" / "measured.json").write_text(
        json.dumps({"accuracy": {"hits": [[30, 40]] * 4, "total": [100] * 4}})
    )
    assert shares() == pytest.approx(0.4)
    (folders / "heads" / "calibration.json").write_text(json.dumps({"hits": [[20, 35]] * 4, "total": [100] * 4}))
    assert shares() == pytest.approx(0.35)
    assert caplog.text == ""
    (folders / "heads" / "calibration.json").write_text(json.dumps({"hits": [[20, 40]] * 3, "total": [100] * 3}))
    assert shares() == pytest.approx(0.56 + 0.112)
    assert "expected accuracies of 4 heads, got 3" in caplog.text


# Refused


def refused(folders, caplog, **settings):
    """Load the model and check the warning; each step then picks a tree, the checkpoint's own among others."""
    caplog.clear()
    with MedusaModel.from_pretrained(folders / "heads", **settings) as model:
        assert model.tree_choice() == TreeChoice("auto", tree_choice.CHANGED)
        assert Tree.chain(1) in model._adaptive().trees
        [row] = prompts(1, [9])
        _, output = used(model, [row])
        assert output.tree_choice == model.tree_choice()
        if "dtype" not in settings:
            assert output.sequences[0, 9:].tolist() == transformers_greedy(model.base, row, 12)
    [record] = [record for record in caplog.records if record.levelno == logging.WARNING]
    return record.getMessage()


def test_changed_heads_or_another_model_are_refused(tuned, caplog):
    checkpoint = read_heads(tuned / "heads")
    with torch.no_grad():
        checkpoint.heads.w1[1] *= 1.01
    write_heads(checkpoint.heads, tuned / "heads", base_model="../base")
    words = refused(tuned, caplog)
    assert "medusa tune" in words
    assert "heads: tuned with" in words
    assert "model: tuned with" not in words
    tiny(seed=5, max_position_embeddings=512).save_pretrained(tuned / "base")
    assert "model: tuned with LlamaForCausalLM" in refused(tuned, caplog)


def test_another_dtype_backend_or_number_of_threads_is_refused_by_that_name(tuned, caplog, monkeypatch):
    assert refused(tuned, caplog, dtype="bfloat16").endswith("dtype: tuned with float32, now bfloat16")
    with MedusaModel.from_pretrained(tuned / "heads", backend="compiled") as model:
        assert model.tree == "auto"
    assert "backend: tuned with eager, now compiled" in caplog.text
    own = json.loads((tuned / "heads" / tuning_paths.FILE).read_text())["device"]
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    assert f"device: tuned with {own}, now {own.split(',')[0]}, 77 threads" in refused(tuned, caplog)


def test_a_model_converted_after_loading_does_not_use_the_tuning(tuned):
    with MedusaModel.from_pretrained(tuned / "heads") as model:
        model.base.to(torch.bfloat16)
        model.heads.to(torch.bfloat16)
        _, output = used(model, prompts(1, [60]))
        assert output.tree_choice == TreeChoice("auto", tree_choice.CHANGED)
        assert model._adaptive().times.device == ""


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda v: "{", "expected a file that `medusa tune` wrote"),
        (lambda v: v | {"format": 1}, "expected format 2, got 1"),
        (lambda v: {name: v[name] for name in v if name != "heads"}, "conditions.heads: Field required"),
        (lambda v: v | {"cases": []}, "cases: Tuple should have at least 1 item"),
        (lambda v: v | {"cases": [v["cases"][0] | {"choices": [[1]]}]}, "expected a tree of one of the sizes"),
        (lambda v: v | {"cases": [v["cases"][0] | {"sizes": v["cases"][0]["sizes"][1:]}]}, "in ascending order from 1"),
        (lambda v: v | {"step_times": {}}, "step times: expected device"),
        (
            lambda v: v | {"accuracies": {"source": "x", "by_rank": [["y"]]}},
            "accuracies.by_rank.0.0: Input should be a valid number",
        ),
    ],
)
def test_a_damaged_file_does_not_make_the_model_unusable(tuned, caplog, change, words):
    file = tuned / "heads" / tuning_paths.FILE
    values = change(json.loads(file.read_text()))
    file.write_text(values if isinstance(values, str) else json.dumps(values))
    assert words in refused(tuned, caplog)


# Location of the file


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


RUNTIME = "a device, float32, eager, 1"


def test_the_file_is_next_to_heads_in_a_writable_folder(tmp_path, cache, monkeypatch):
    heads = tmp_path / "heads"
    heads.mkdir()
    own, cached = heads / "tuning.json", tuning_paths.cache_folder(heads) / tuning_paths.cache_name(RUNTIME)
    assert tuning_paths.output_file(heads, RUNTIME) == own
    assert tuning_paths.stored_files(heads, RUNTIME) == []
    cached.parent.mkdir(parents=True)
    for file in (own, cached):
        file.write_text("")
    assert tuning_paths.stored_files(heads, RUNTIME) == [own, cached]
    monkeypatch.setattr(tuning_paths.os, "access", lambda path, mode: path != heads)
    assert tuning_paths.output_file(heads, RUNTIME) == cached
    assert tuning_paths.stored_files(heads, RUNTIME) == [cached, own]
    assert cached.is_relative_to(cache / "medusa-kernels")


def test_each_heads_folder_has_its_own_path_in_the_cache(tmp_path, cache, monkeypatch):
    made = [tmp_path / name / "heads" for name in "ab"]
    for folder in made:
        folder.mkdir(parents=True)
    (tmp_path / "link").symlink_to(made[0])
    first, second = map(tuning_paths.cache_folder, made)
    assert first != second
    assert tuning_paths.cache_folder(tmp_path / "link") == first
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # counts as none
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert tuning_paths.cache_folder(made[0]).is_relative_to(tmp_path / "home" / ".cache" / "medusa-kernels")


def test_the_loader_looks_next_to_the_heads_and_in_the_cache(tuned, cache, caplog):
    """A valid file is used from either location; an invalid one gives a warning only if there is no valid one."""
    heads = tuned / "heads"
    own, cached = heads / tuning_paths.FILE, cached_for(heads)
    cached.parent.mkdir(parents=True)
    own.rename(cached)
    with MedusaModel.from_pretrained(heads) as model:
        assert model.tree_choice(1, 8).tree.num_nodes == 4
    own.write_text(cached.read_text().replace("float32", "float16"))
    other = cached.with_name("tuning-of-another-machine.json")
    other.write_text(cached.read_text().replace('"device": "', '"device": "another '))
    with MedusaModel.from_pretrained(heads) as model:
        assert model.tree_choice(1, 8).tree.num_nodes == 4
        assert tuning_file.find(heads, conditions_of(model), model.heads)[0] == cached
    assert "refused" not in caplog.text
    cached.write_text("{")
    with MedusaModel.from_pretrained(heads) as model:
        assert model.tree == "auto"
    assert "dtype: tuned with float16, now float32" in caplog.text
    assert "device: tuned with another " in caplog.text
    assert f"{cached}: expected a file that `medusa tune` wrote" in caplog.text


def cached_for(heads):
    """The path in the user's cache of the tuning file for a model as loaded here."""
    with MedusaModel.from_pretrained(heads, tree=Tree.chain(1)) as model:
        return tuning_paths.cache_folder(heads) / tuning_paths.cache_name(conditions_of(model).runtime)


# The file


def test_round_trip(tuned):
    file = tuned / "heads" / tuning_paths.FILE
    assert [path.name for path in file.parent.iterdir() if "partial" in path.name] == []
    with MedusaModel.from_pretrained(tuned / "heads") as model:
        wanted, found = made_up(model), load_for(file, conditions_of(model), model.heads)
    assert found.to_json() == wanted.to_json() == json.loads(file.read_text())
    assert (found.conditions, found.accuracies) == (wanted.conditions, wanted.accuracies)
    assert found.cases == wanted.cases
    assert [case.tree.num_nodes for case in found.cases] == [4, 1, 2]
    assert [size.tree.num_nodes for size in found.cases[0].sizes] == [1, 2, 4]
    assert (found.weighed, found.accuracies.calibration) == (INDEPENDENT, None)
    source = CalibrationSource("/elsewhere/c.json", "ab12", None, False)
    kept = replace(found, accuracies=replace(found.accuracies, calibration=source))
    assert Tuning.from_json(json.loads(json.dumps(kept.to_json()))).accuracies.calibration == source
    assert found.cases[0].chosen.rate == pytest.approx(2.1 / 1.3)
    assert set(found.versions) >= {"python", "torch", "transformers"}


def test_fingerprints_depend_on_every_weight_and_nothing_else():
    base = tiny()
    own = fingerprint(base)
    with MedusaModel(base, heads_for(base)) as model:
        assert fingerprint(model.backbone.causal_lm) == own
        model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=4)
        assert fingerprint(model.backbone.causal_lm) == own
    assert fingerprint(copy.deepcopy(base)) == own
    for name, _ in base.named_parameters():
        other = copy.deepcopy(base)
        with torch.no_grad():
            other.get_parameter(name).mul_(1.001).add_(1e-4)
        assert fingerprint(other) != own, name
    assert fingerprint(copy.deepcopy(base).to(torch.float16)) != own


def test_a_quantised_model_has_a_fingerprint():
    quantisation = pytest.importorskip("torchao.quantization")
    base = tiny(hidden_size=64, intermediate_size=64, head_dim=16)
    before = fingerprint(base)
    quantisation.quantize_(base, quantisation.Int8WeightOnlyConfig())
    own = fingerprint(base)
    assert own != before
    other = tiny(hidden_size=64, intermediate_size=64, head_dim=16, seed=3)
    quantisation.quantize_(other, quantisation.Int8WeightOnlyConfig())
    assert fingerprint(other) != own
