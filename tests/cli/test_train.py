"""`medusa train`: settings from file and arguments, what it prints, and refusals."""

import json
import re
import sys
from pathlib import Path

import pytest
import torch

from medusa_decoding.checkpoints import read_heads
from medusa_decoding.cli import main
from medusa_decoding.training.config import Config
from medusa_decoding.training.data.targets import IGNORE
from medusa_decoding.training.loop.backbone import load_tokenizer
from medusa_decoding.training.loop.rows import load_rows

sys.path.insert(0, str(Path(__file__).parents[1] / "training"))
import toy
import workshop


@pytest.fixture
def recipe(tmp_path):
    base, data = workshop.make_base(tmp_path / "base"), workshop.make_data(tmp_path / "data.jsonl")
    file = tmp_path / "recipe.yaml"
    file.write_text(workshop.config(tmp_path / "out", base, data).to_yaml())
    return file


def test_a_settings_file_with_overrides_is_trained(recipe, tmp_path, capsys):
    arguments = ["train", "--config", str(recipe), "--set", "optimisation.epochs=1", "--set", "heads.num_heads=2"]
    assert main([*arguments, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["heads"] == str(tmp_path / "out" / "heads")
    assert len(printed["held_out"]["head_top1"]) == 2
    assert printed["steps"] == max(line["step"] for line in workshop.curve(tmp_path / "out"))
    assert main(arguments) == 2
    assert "--resume" in capsys.readouterr().err
    assert main([*arguments, "--resume"]) == 0
    shown = capsys.readouterr().err
    assert "continues from" in shown


def test_a_curve_has_a_run_per_size_and_predicts_more(recipe, tmp_path, capsys):
    arguments = ["train", "--config", str(recipe), "--curve", "--set", f"data.cache_hidden={tmp_path / 'states'}"]
    assert main(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    names = [line[:16].strip() for line in lines[1:7]]
    assert names == ["2", "4", "9", "18", "predicted 36", "predicted 180"]
    found = json.loads((tmp_path / "out" / "curve.json").read_text())
    assert [size["records"] for size in found["sizes"]] == [2, 4, 9, 18]
    assert [size["steps"] for size in found["sizes"]] == sorted(size["steps"] for size in found["sizes"])
    for size, folder in zip(found["sizes"], ("out/curve-8", "out/curve-4", "out/curve-2", "out"), strict=True):
        held_out = json.loads((tmp_path / folder / "heads" / "measured.json").read_text())
        assert size["head_top1"] == held_out["head_top1"]
        # Of the same records: 4 answers of 42 tokens, of which head k has no use for the first k + 1 (from 0).
        assert held_out["accuracy"]["total"] == [42 - 4, 42 - 8, 42 - 12]
        assert size["loss"] == pytest.approx(sum(0.8**k * x for k, x in enumerate(held_out["head_losses"], 1)))
    assert main([*arguments, "--resume", "--json"]) == 0  # all sizes are there already
    assert json.loads(capsys.readouterr().out) == found
    assert main(["train", "--config", str(recipe), "--curve", "--set", "data.held_out_share=0"]) == 2
    assert "--curve needs held-out data" in capsys.readouterr().err


def test_check_says_what_would_run_and_writes_nothing(recipe, tmp_path, capsys):
    cache = f"data.cache_hidden={tmp_path / 'states'}"
    assert main(["train", "--config", str(recipe), "--check", "--set", cache]) == 0
    shown = capsys.readouterr().out
    assert "18 records in 9 rows" in shown
    assert "4 held out" in shown
    assert "steps of 4 rows: heads" in shown
    assert re.search(r"\d tokens, \d+ of them learnt", shown)
    assert re.search(r"memory \(estimated, .*\): \S+ KiB of the \S+ GiB that this machine has free", shown)
    assert re.search(r"\n  optimiser +\S+ KiB\n", shown)
    assert re.search(r"\ntime: about \d+ s on an idle machine \(from a micro-batch measured here", shown)
    assert "vLLM 0.28 to 0.32: yes, medusa export --format vllm\n" in shown
    # 9 rows of 48 positions of 16 floats.
    assert re.search(r"hidden states: 27\.0 KiB in \S+states, made in the first epoch .* in about \d+ s", shown)
    assert main(["train", "--config", str(recipe), "--check", "--on", "2 x L4"]) == 2
    assert "--on: expected model.dtype bfloat16" in capsys.readouterr().err
    assert main(["train", "--config", str(recipe), "--check", "--on", "2 x L4", "--set", "model.dtype=bfloat16"]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"memory \(estimated, .*\): \S+ KiB of the 24.00 GiB of one L4\n", shown)
    assert "time: about 1 s on 2 x L4 (predicted: its operations at 50% of the published peak" in shown
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "states").exists()


def test_the_share_that_a_trimmed_vocabulary_covers_is_that_of_held_out_data(recipe, tmp_path, capsys):
    options = ["train", "--config", str(recipe), "--set", "heads.token_map_size=12"]
    assert main([*options, "--check"]) == 0
    checked = capsys.readouterr().out
    assert main(options) == 0
    config = Config.read(recipe)
    rows = load_rows(config, load_tokenizer(config.model))
    labels = torch.cat([rows.held_out[number]["labels"] for number in range(len(rows.held_out))])
    heads = read_heads(tmp_path / "out" / "heads").heads
    share = torch.isin(labels[labels != IGNORE], heads.token_map).double().mean()
    assert 0.1 < share < 0.9
    line = f"heads propose 12 of {heads.vocab_size} tokens: {share:.1%} of those to learn in held-out data\n"
    assert line in checked
    assert line in capsys.readouterr().err
    assert main([*options, "--check", "--set", "output.folder=x", "--set", "data.held_out_share=0"]) == 0
    assert f"heads propose 12 of {heads.vocab_size} tokens\n" in capsys.readouterr().out


def test_a_first_config_says_why_and_trains_as_it_stands(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    base, data = workshop.make_base(tmp_path / "base"), workshop.make_data(tmp_path / "mine.jsonl", 40)
    assert main(["train", "--init", str(base), str(data), "--recipe", "given-answers"]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"heads.shared_projection: true +learns more from little data than own", shown)
    assert shown.endswith(
        "in base.yaml. Next:\n  medusa train --config base.yaml --check\n  medusa train --config base.yaml\n"
    )
    monkeypatch.chdir(tmp_path.parent)  # paths in the file hold in any folder, except for its output
    config = ["train", "--config", str(tmp_path / "base.yaml"), "--set", f"output.folder={tmp_path / 'out'}"]
    assert main([*config, "--set", f"data.cache_hidden={tmp_path / 'states'}", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["heads"] == str(tmp_path / "out" / "heads")


def test_a_first_config_for_prompts_alone_is_for_distill(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    base = workshop.make_base(tmp_path / "base")
    data = toy.write_lines(tmp_path / "mine.jsonl", *({"prompt": f"Question {n}?"} for n in range(9)))
    assert main(["train", "--init", str(base), str(data), "--out", "my config.yaml"]) == 0
    assert capsys.readouterr().out.endswith("Next:\n  medusa distill --config 'my config.yaml'\n")
    assert main(["train", "--config", "my config.yaml", "--check"]) == 2
    assert "data.answers: expected given or null, to learn the data's answers (`medusa dis" in capsys.readouterr().err
    assert main(["train", "--config", "my config.yaml", "--set", "data.answers=null", "--check"]) == 2
    assert "expected answers to learn from, got 9 prompts alone; `medusa distill" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--out", "old.yaml"], "--out: expected a new file, got old.yaml"),
        (["--config", "old.yaml"], "--init: expected no --config with it"),
        (["--device", "cuda"], "--device: expected cpu, because torch sees no CUDA device"),
    ],
)
def test_a_first_config_overwrites_nothing(tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    (tmp_path / "old.yaml").write_text("mine")
    base, data = workshop.make_base(tmp_path / "base"), workshop.make_data(tmp_path / "mine.jsonl")
    assert main(["train", "--init", str(base), str(data), *arguments]) == 2
    assert message in capsys.readouterr().err
    assert (tmp_path / "old.yaml").read_text() == "mine"
    assert not (tmp_path / "base.yaml").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--config is needed"),
        (["--config", "none.yaml"], "config: expected a readable file, got none.yaml"),
        (["--set", "optimisation.epochs"], "--set: expected KEY=VALUE, got 'optimisation.epochs'"),
        (["--set", "model.name=nowhere/there"], "model.name: expected a model"),
        (
            ["--set", "optimisation={epochs: 1, epochs: 2}"],
            "got the key 'epochs' again in line 1",
        ),
        (["--set", f"optimisation.seed={2**32}"], "optimisation.seed: expected less than 4294967296, got 4294967296"),
        (["--set", "heads.num_heads=47"], "heads.num_heads: expected at most 46 with data.length 48"),
        (["--set", "output.folder=FILE"], "output.folder: expected one that is there or can be made, got "),
        (["--set", "output.folder=OLD"], "output.folder: expected a new one, got "),
        (["--on", "2 x Z80"], "--on"),
        (["--set", "output.trackers=[wandb]"], "wandb: expected the library for output.trackers (pip install wandb"),
        (["--set", "output.trackers=[paper]"], "output.trackers: expected some of aim, "),
        (["--set", "model.dtype=float16"], "model.dtype: expected one of bfloat16, float32 in training, got float16"),
    ],
)
@pytest.mark.parametrize("check", [[], ["--check"]], ids=["train", "check"])
def test_bad_input_is_one_line_and_exit_code_2(recipe, tmp_path, capsys, monkeypatch, arguments, message, check):
    """With --check as well, and before a model is loaded."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr(
        "medusa_decoding.training.loop.backbone.TrainingBackbone.load", lambda *given: pytest.fail("loaded")
    )
    (tmp_path / "old" / "heads").mkdir(parents=True)
    places = {"FILE": str(recipe), "OLD": str(tmp_path / "old")}
    for name, place in places.items():
        arguments = [word.replace(f"={name}", f"={place}") for word in arguments]
    config = [] if not arguments or arguments[0] == "--config" else ["--config", str(recipe)]
    assert main(["train", *config, *arguments, *check]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out == ""
    assert not (tmp_path / "out").exists()


RECIPES = sorted((Path(__file__).parents[2] / "recipes").glob("*.yaml"))


@pytest.mark.parametrize("file", RECIPES, ids=lambda file: file.stem)
def test_recipes_can_be_read(file):
    from medusa_decoding.training import Config

    config = Config.read(file)
    assert config.output.folder.startswith("runs/")
    # Training from hidden states in 4 bits is the paper's setting.
    paper = file.stem in ("vicuna-7b", "vicuna-7b-medusa-2", "mistral-7b")
    assert len(config.warnings()) == paper


@pytest.mark.parametrize("family", ["smollm3", "granite", "gemma2", "qwen3_moe"])
def test_a_first_config_of_another_family_trains_heads_that_generate(tmp_path, monkeypatch, capsys, family):
    """And that are exported for vLLM, which reads neither the root's nor the parents' term."""
    monkeypatch.chdir(tmp_path)
    base, data = workshop.make_base(tmp_path / "base", family=family), workshop.make_data(tmp_path / "data.jsonl")
    assert main(["train", "--init", str(base), str(data), "--recipe", "given-answers", "--out", "first.yaml"]) == 0
    changes = ("optimisation.epochs=0.5", "heads.root_rank=0", "heads.parent_rank=0")
    assert main(["train", "--config", "first.yaml", *(word for one in changes for word in ("--set", one))]) == 0
    capsys.readouterr()
    expected = workshop.greedy(base, "Hello", 8)
    assert main(["generate", "--model", "runs/base/heads", "--prompt", "Hello", "--max-new-tokens", "8"]) == 0
    assert expected in capsys.readouterr().out
    assert main(["export", "--model", "runs/base/heads", "--format", "vllm", "--out", "exported"]) == 0
