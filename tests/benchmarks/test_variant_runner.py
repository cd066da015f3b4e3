"""Variants of the demo model: what each trains, and how their figures are made, on a few steps."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from benchmarks import variants
from benchmarks.ablations import measuring
from medusa_decoding.demo import CHECKPOINT
from medusa_decoding.training import config_schema
from medusa_decoding.training.loop.schedules import stages
from recipes.demo import corpus

if not (CHECKPOINT / "measured.json").is_file():
    pytest.skip("the embedded checkpoint is not there", allow_module_level=True)

TINY = variants.QUICK
BY_NAME = {variant.name: variant for variant in (*variants.TABLE_2, *variants.CONTROLS)}


def few_files() -> corpus.Split:
    files = corpus.split()
    return dataclasses.replace(files, train=files.train[:200:20], held_out=files.held_out[:3])


@pytest.fixture
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(variants.BASE / "tokenizer.json"))


@pytest.fixture
def small() -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=2048, num_key_value_heads=1, **sizes)).eval()


@pytest.mark.parametrize("steps", [4, 300])
def test_every_variant_takes_as_many_gradient_steps(tmp_path: Path, steps: int) -> None:
    sizes = variants.Sizes(steps=steps, warmup=1)
    for variant in BY_NAME.values():
        if variant.sections:
            made = variants.config(variant, variants.table_2_settings(sizes, tmp_path / "rows.jsonl"), tmp_path / "out")
            assert sum(stage.steps for stage in stages(made, steps * sizes.rows)) == steps, variant.name


def test_what_tells_the_variants_apart(tmp_path: Path) -> None:
    made = {
        name: variants.config(variant, variants.table_2_settings(TINY, tmp_path / "rows.jsonl"), tmp_path / "out")
        for name, variant in BY_NAME.items()
        if variant.sections
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
    variants.write_rows(TINY, files, tokenizer, path)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [len(row["input_ids"]) for row in rows] == [64] * 8
    whole = [tokenizer.encode(files.read(name)).ids for name in files.train]
    first = rows[0]["input_ids"]
    assert first[0] == corpus.END
    assert first[1:] in [ids[:63] for ids in whole]
    with pytest.raises(ValueError, match="steps: expected at most"):
        variants.write_rows(dataclasses.replace(TINY, steps=100_000), files, tokenizer, path)
    windows = variants.held_out_windows(dataclasses.replace(TINY, windows=2), files, tokenizer)
    assert len(windows) == len(files.held_out)
    for rows_of_file, name in zip(windows, files.held_out, strict=True):
        ids = [corpus.END, *tokenizer.encode(files.read(name)).ids]
        assert rows_of_file.tolist() == [ids[:64], ids[-64:]]


def test_score_is_transformers_own_loss(small: Any) -> None:
    windows = list(torch.randint(0, 2048, (5, 20), generator=torch.Generator().manual_seed(1)).split([2, 3]))
    found = variants.score(small, windows)
    for (loss, count, hits), rows in zip(found, windows, strict=True):
        assert count == len(rows) * 19
        assert loss == pytest.approx(float(small(rows, labels=rows).loss) * count, rel=1e-5)
        best = small(rows).logits.argmax(-1)
        assert hits == sum(int(best[i, t]) == int(rows[i, t + 1]) for i in range(len(rows)) for t in range(19))


SAME, OTHER = [1, 2, 1, 2, 1, 2, 3], [1, 2, 1, 2, 1, 3, 3]


def made(losses: list[float], hits: list[float], text: list[int]) -> variants.Measured:
    def texts(one: list[int], other: list[int], *figures: tuple[float, int, int]) -> list[measuring.Written]:
        return [measuring.Written(t, *of) for t, of in zip((one, other), figures, strict=True)]

    plain = texts(text, SAME, (1.0, 1, 1), (1.0, 1, 1))
    tree = texts(SAME, SAME, (0.25, 4, 2), (0.75, 5, 1))
    found = {variants.PLAIN: measuring.Found(plain, plain), variants.CHAIN: measuring.Found(tree, plain, 1)}
    return variants.Measured(np.array([losses, [10.0, 30.0], hits]).T, found)


def test_figures_by_hand() -> None:
    baseline, one = made([20.0, 60.0], [5.0, 15.0], SAME), made([10.0, 50.0], [6.0, 18.0], OTHER)
    found = variants.table_2_figures(one, baseline)
    assert found["perplexity"]["value"] == pytest.approx(math.exp(60 / 40))
    over = found["perplexity_over_baseline"]
    # Of the two files one lost 1 nat a token and the other a third; one of them is drawn twice in half of the draws.
    assert [over[key] for key in ("value", "low", "high")] == pytest.approx(
        [math.exp(-20 / 40), math.exp(-1), math.exp(-1 / 3)]
    )
    assert found["top1"]["value"] == pytest.approx(24 / 40)
    assert found["top1_less_baseline"]["value"] == pytest.approx(4 / 40)
    assert found["tokens_per_step"][variants.CHAIN]["value"] == pytest.approx(9 / 3)
    assert found["speedup"][variants.CHAIN]["value"] == pytest.approx(2.0)
    assert found["plain_tokens_per_second"] == pytest.approx(14 / 2)
    assert (found["texts_as_baseline"], found["texts_unlike_plain"]) == (1, 1)
    assert found["distinct_4_grams"] == pytest.approx((4 / 4 + 3 / 4) / 2)


@pytest.mark.slow
def test_one_command(tmp_path: Path, results: Any, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    pytest.importorskip("peft")
    files = few_files()
    monkeypatch.setattr(corpus, "split", lambda: files)
    monkeypatch.setattr(variants, "table_2_material", _drawn)
    monkeypatch.setattr(variants, "Sizes", _Tiny)
    out = tmp_path / "out"
    assert variants.main(["table-2", "--out", str(out)]) == 0
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
        scores = variants.score(trained, MATERIAL[0].windows)
        expected = math.exp(scores[:, 0].sum() / scores[:, 1].sum())
        assert found[name]["perplexity"]["value"] == pytest.approx(expected)
        assert expected != found["baseline"]["perplexity"]["value"]
        assert set(found[name]["tokens_per_step"]) == {"chain of 3", "16 nodes"}
        assert len(found[name]["tree"]) == 15  # the root is not listed
    assert all(column["texts_unlike_plain"] == 0 for column in found.values())
    assert "| | baseline | direct | medusa-1 | medusa-2 |" in capsys.readouterr().out
    assert json.loads((out / "figures.json").read_text())["settings"].keys() == found.keys()
    trained = (out / "direct" / "heads" / "medusa_lm_head.safetensors").stat().st_mtime_ns
    again = [BY_NAME[name] for name in found]
    variants.prepare_table_2(again, TINY, out)
    assert (out / "direct" / "heads" / "medusa_lm_head.safetensors").stat().st_mtime_ns == trained
    with pytest.raises(SystemExit):
        variants.main(["table-2", "--quick", "--out", str(tmp_path)])
    assert "out: expected a new folder, or one that was begun with" in capsys.readouterr().err
    with pytest.raises(ValueError, match="out: expected a new folder, or one that was begun with"):
        variants.prepare_table_2(again, dataclasses.replace(TINY, steps=6), out)


class _Tiny:
    steps, prompts = TINY.steps, TINY.prompts

    def __new__(cls, **given: int) -> Any:
        return TINY


MATERIAL: list[variants.Material] = []


def _drawn(sizes: variants.Sizes, files: corpus.Split, tokenizer: Tokenizer) -> variants.Material:
    ids = torch.from_numpy(corpus.encode(files, files.held_out, tokenizer)[1:].astype(np.int64))
    prompts = list(ids[: 5 * sizes.prompt_tokens].view(5, -1).split(1))
    windows = variants.held_out_windows(sizes, files, tokenizer)
    MATERIAL[:] = [variants.Material(prompts[:3], prompts[3:], sizes.new_tokens, windows)]
    return MATERIAL[0]


def test_a_text_that_is_not_the_models_own_fails(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    def broken(*arguments: Any) -> None:
        raise measuring.OtherTextError("16 nodes: expected the text of plain on prompt 0")

    monkeypatch.setattr(variants, "run", broken)
    monkeypatch.setattr(variants, "prepare_table_2", lambda *arguments: None)
    monkeypatch.setattr(variants, "table_2_material", lambda *arguments: None)
    with pytest.raises(SystemExit) as stopped:
        variants.main(["table-2", "--quick", "--out", str(tmp_path)])
    assert stopped.value.code == 2
    assert "expected the text of plain on prompt 0" in capsys.readouterr().err


def test_only_some_variants_are_trained(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(variants, "prepare_table_2", lambda *given: asked.append(given))
    only = ["--only", "medusa-1", "medusa-2", "--train-only", "--out", str(tmp_path)]
    assert variants.main(["table-2", "--steps", "60", *only]) == 0
    [(wanted, sizes, out)] = asked
    assert ([variant.name for variant in wanted], sizes.steps, out) == (["medusa-1", "medusa-2"], 60, tmp_path)
    for bad, words in ((["--steps", "7"], "expected an even number"), (["--only", "x"], "--only: expected some of")):
        with pytest.raises(SystemExit):
            variants.main(["table-2", *bad, "--out", str(tmp_path)])
        assert words in capsys.readouterr().err


@pytest.mark.slow
def test_kinds_of_heads(tmp_path: Path, results: Any, capsys: Any, monkeypatch: Any) -> None:
    files = few_files()
    monkeypatch.setattr(corpus, "split", lambda: files)
    recipe = config_schema.read_yaml(variants.RECIPE)
    recipe["generation"] |= {"max_new_tokens": 16, "prompt_tokens": 16}
    recipe["data"]["length"] = 32
    recipe["optimisation"] |= {"max_steps": 2, "warmup_steps": 1, "batch_size": 2, "micro_batch_size": 2}
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))
    monkeypatch.setattr(variants, "RECIPE", tmp_path / "recipe.yaml")
    small = functools.partial(variants.heads_material, prompt_tokens=16, new_tokens=12)
    monkeypatch.setattr(variants, "heads_material", small)
    sizes = ["--seeds", "6", "--epochs", "1", "--prompts", "2", "--only", "own, int8", "shared lm_head"]
    assert variants.main(["heads", "--out", str(tmp_path / "out"), *sizes]) == 0
    [record] = results.records()
    own, int8, shared = (record["variants"][name] for name in ("own projections", "own, int8", "shared lm_head"))
    assert shared["bytes_bf16"] < int8["bytes_bf16"] < own["bytes_bf16"]
    for one in (own, int8, shared):
        assert one["same_texts"] == record["prompts"]
        assert 1 <= one["interval"][0] <= one["tokens_per_step"] <= one["interval"][1]
        assert len(one["top1"]) == 4
        assert all(a <= b for a, b in zip(one["top1"], one["top10"], strict=True))
    assert "| own, int8 | " in capsys.readouterr().out


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
        variants.Sizes(**given)
