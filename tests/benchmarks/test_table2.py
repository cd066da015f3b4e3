"""The miniature of the paper's Table 2: what each setting trains, and how its figures are made, on a few steps."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from benchmarks import table2, table2_figures
from medusa_decoding.demo import CHECKPOINT
from medusa_decoding.model import MedusaModel
from medusa_decoding.training.loop.schedules import stages
from medusa_decoding.trees.tree import Tree
from recipes.demo import corpus

if not (CHECKPOINT / "measured.json").is_file():
    pytest.skip("the embedded checkpoint is not there", allow_module_level=True)

TINY = table2.QUICK
BY_NAME = {setting.name: setting for setting in (*table2.SETTINGS, *table2.CONTROLS)}


def few_files() -> corpus.Split:
    files = corpus.split()
    return dataclasses.replace(files, train=files.train[:200:20], held_out=files.held_out[:3])


@pytest.fixture
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(table2.BASE / "tokenizer.json"))


@pytest.fixture
def small() -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=2048, num_key_value_heads=1, **sizes)).eval()


@pytest.mark.parametrize("steps", [4, 300])
def test_every_setting_takes_as_many_gradient_steps(tmp_path: Path, steps: int) -> None:
    sizes = table2.Sizes(steps=steps, warmup=1)
    for setting in BY_NAME.values():
        if setting.sections:
            made = table2.config(setting, sizes, tmp_path / "rows.jsonl", tmp_path / "out")
            assert sum(stage.steps for stage in stages(made, steps * sizes.rows)) == steps, setting.name


def test_what_tells_the_settings_apart(tmp_path: Path) -> None:
    made = {
        name: table2.config(setting, TINY, tmp_path / "rows.jsonl", tmp_path / "out")
        for name, setting in BY_NAME.items()
        if setting.sections
    }
    # stages, adapter, weight of the heads' loss, rates of backbone and heads
    said = {
        name: (
            [stage.name for stage in stages(one, TINY.steps * TINY.rows)],
            one.lora.enabled,
            one.loss.lambda_0,
            one.optimisation.learning_rate,
            one.optimisation.learning_rate * one.optimisation.heads_factor,
        )
        for name, one in made.items()
    }
    assert said == {
        "direct": (["joint"], False, 1.0, 5e-4, 5e-4),
        "medusa-1": (["heads"], False, None, 5e-4, 2e-3),
        "medusa-2": (["heads", "joint"], True, 0.2, 5e-4, 2e-3),
        "direct, LoRA": (["joint"], True, 1.0, 5e-4, 5e-4),
        "no heads": (["joint"], False, 1e-12, 5e-4, 5e-4),
    }
    assert all(one.loss.head_decay == 0.8 and one.model.dtype == "float32" for one in made.values())


def test_training_text_is_of_training_files_alone(tmp_path: Path, tokenizer: Tokenizer) -> None:
    files = few_files()
    path = tmp_path / "rows.jsonl"
    assert table2.write_rows(TINY, files, tokenizer, path) == 4 * 2 * 64
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [len(row["input_ids"]) for row in rows] == [64] * 8
    whole = [tokenizer.encode(files.read(name)).ids for name in files.train]
    first = rows[0]["input_ids"]
    assert first[0] == corpus.END
    assert first[1:] in [ids[:63] for ids in whole]
    with pytest.raises(ValueError, match="steps: expected at most"):
        table2.write_rows(dataclasses.replace(TINY, steps=100_000), files, tokenizer, path)
    windows = table2.held_out_windows(dataclasses.replace(TINY, windows=2), files, tokenizer)
    assert len(windows) == len(files.held_out)
    for rows_of_file, name in zip(windows, files.held_out, strict=True):
        ids = [corpus.END, *tokenizer.encode(files.read(name)).ids]
        assert rows_of_file.tolist() == [ids[:64], ids[-64:]]


def test_score_is_transformers_own_loss(small: Any) -> None:
    windows = list(torch.randint(0, 2048, (5, 20), generator=torch.Generator().manual_seed(1)).split([2, 3]))
    found = table2_figures.score(small, windows)
    for (loss, count, hits), rows in zip(found, windows, strict=True):
        assert count == len(rows) * 19
        assert loss == pytest.approx(float(small(rows, labels=rows).loss) * count, rel=1e-5)
        best = small(rows).logits.argmax(-1)
        assert hits == sum(int(best[i, t]) == int(rows[i, t + 1]) for i in range(len(rows)) for t in range(19))


def test_plain_texts_are_transformers_own(small: Any) -> None:
    prompts = list(torch.randint(1, 2048, (2, 8), generator=torch.Generator().manual_seed(2)).split(1))
    expected = [small.generate(ids, max_new_tokens=6, do_sample=False, eos_token_id=None)[0, 8:] for ids in prompts]
    with MedusaModel(small) as model:
        found = table2_figures.decode(model, {"plain": Tree([])}, prompts, 6)["plain"]
    assert found.texts == [text.tolist() for text in expected]
    assert found.steps == [(5, 5)] * 2
    assert [tokens for tokens, _ in found.timed] == [6, 6]


SAME, OTHER = [1, 2, 1, 2, 1, 2, 3], [1, 2, 1, 2, 1, 3, 3]


def made(losses: list[float], hits: list[float], text: list[int]) -> table2_figures.Measured:
    scores = np.array([losses, [10.0, 30.0], hits]).T
    plain = table2_figures.Decoded([text, SAME], [(1, 1), (1, 1)], [(2, 1.0), (2, 1.0)])
    tree = table2_figures.Decoded([SAME, SAME], [(4, 2), (5, 1)], [(2, 0.25), (2, 0.75)])
    return table2_figures.Measured(scores, {table2_figures.PLAIN: plain, table2_figures.CHAIN: tree})


def test_figures_by_hand() -> None:
    baseline, one = made([20.0, 60.0], [5.0, 15.0], SAME), made([10.0, 50.0], [6.0, 18.0], OTHER)
    found = table2_figures.figures(one, baseline)
    assert found["perplexity"]["value"] == pytest.approx(math.exp(60 / 40))
    over = found["perplexity_over_baseline"]
    # Of the two files one lost 1 nat a token and the other a third; one of them is drawn twice in half of the draws.
    assert [over[key] for key in ("value", "low", "high")] == pytest.approx(
        [math.exp(-20 / 40), math.exp(-1), math.exp(-1 / 3)]
    )
    assert found["top1"]["value"] == pytest.approx(24 / 40)
    assert found["top1_less_baseline"]["value"] == pytest.approx(4 / 40)
    assert found["tokens_per_step"][table2_figures.CHAIN]["value"] == pytest.approx(9 / 3)
    assert found["speedup"][table2_figures.CHAIN]["value"] == pytest.approx(2.0)
    assert (found["texts_as_baseline"], found["texts_unlike_plain"]) == (1, 1)
    assert found["distinct_4_grams"] == pytest.approx((4 / 4 + 3 / 4) / 2)


def test_one_command(tmp_path: Path, results: Any, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    pytest.importorskip("peft")
    files = few_files()
    monkeypatch.setattr(corpus, "split", lambda: files)
    monkeypatch.setattr(table2, "draw", _drawn)
    monkeypatch.setattr(table2, "Sizes", _Tiny)
    out = tmp_path / "out"
    assert table2.main(["--out", str(out)]) == 0
    [record] = results.records()
    found = record["settings"]
    assert list(found) == ["baseline", "direct", "medusa-1", "medusa-2"]
    assert record["tokens"] == 4 * 2 * 64
    assert record["versions"]["torch"]
    assert found["medusa-1"]["perplexity"] == found["baseline"]["perplexity"]
    assert found["medusa-1"]["perplexity_over_baseline"] == {"value": 1.0, "low": 1.0, "high": 1.0}
    assert found["medusa-1"]["texts_as_baseline"] == TINY.prompts
    for name in ("direct", "medusa-2"):
        trained = AutoModelForCausalLM.from_pretrained(out / name / "model", dtype=torch.float32)
        scores = table2_figures.score(trained, MATERIAL[0].windows)
        expected = math.exp(scores[:, 0].sum() / scores[:, 1].sum())
        assert found[name]["perplexity"]["value"] == pytest.approx(expected)
        assert expected != found["baseline"]["perplexity"]["value"]
        assert set(found[name]["tokens_per_step"]) == {"chain of 3", "16 nodes"}
        assert len(found[name]["tree"]) == 15  # the root is not listed
    assert all(column["texts_unlike_plain"] == 0 for column in found.values())
    assert "| | baseline | direct | medusa-1 | medusa-2 |" in capsys.readouterr().out
    assert json.loads((out / "figures.json").read_text())["settings"].keys() == found.keys()
    trained = (out / "direct" / "heads" / "medusa_lm_head.safetensors").stat().st_mtime_ns
    settings = [BY_NAME[name] for name in found]
    table2.prepare(settings, TINY, out)
    assert (out / "direct" / "heads" / "medusa_lm_head.safetensors").stat().st_mtime_ns == trained
    with pytest.raises(SystemExit):
        table2.main(["--quick", "--steps", "6", "--out", str(tmp_path)])
    assert "out: expected a new folder, or one that was begun with" in capsys.readouterr().err
    with pytest.raises(ValueError, match="out: expected a new folder, or one that was begun with"):
        table2.prepare(settings, dataclasses.replace(TINY, steps=6), out)


class _Tiny:
    steps, prompts = TINY.steps, TINY.prompts

    def __new__(cls, **given: int) -> Any:
        return TINY


MATERIAL: list[table2_figures.Material] = []


def _drawn(sizes: table2.Sizes, files: corpus.Split, tokenizer: Tokenizer) -> table2_figures.Material:
    ids = torch.from_numpy(corpus.encode(files, files.held_out, tokenizer)[1:].astype(np.int64))
    prompts = list(ids[: 5 * sizes.prompt_tokens].view(5, -1).split(1))
    windows = table2.held_out_windows(sizes, files, tokenizer)
    MATERIAL[:] = [table2_figures.Material(windows, prompts[:3], prompts[3:])]
    return MATERIAL[0]


def test_a_text_that_is_not_the_models_own_fails(tmp_path: Path, monkeypatch: Any) -> None:
    def broken(*arguments: Any) -> dict[str, Any]:
        column = table2_figures.figures(made([1.0, 1.0], [0.0, 0.0], OTHER), made([1.0, 1.0], [0.0, 0.0], SAME))
        return {"settings": {"medusa-1": column}}

    monkeypatch.setattr(table2, "run", broken)
    monkeypatch.setattr(table2, "prepare", lambda *arguments: {})
    assert table2.main(["--quick", "--out", str(tmp_path)]) == 1


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"steps": 5}, "steps: expected an even number from 2"),
        ({"steps": 20, "warmup": 10}, "warmup: expected from 0 to below 10"),
        ({"prompts": 0}, "prompts: expected at least 1"),
    ],
)
def test_sizes_that_do_not_fit(given: dict[str, int], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        table2.Sizes(**given)
