"""Variants of the demo model: what each trains, and how their figures are made, on a few steps."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from benchmarks.ablations import measuring
from benchmarks.variants import __main__ as command
from benchmarks.variants import heads as kinds
from benchmarks.variants import table_2
from benchmarks.variants.variant import BASE, Figures
from medusa_decoding.demo import CHECKPOINT
from recipes.demo.requests import draw

if not (CHECKPOINT / "measured.json").is_file():
    pytest.skip("the embedded checkpoint is not there", allow_module_level=True)

TINY = table_2.QUICK
BY_NAME = {variant.name: variant for variant in (*table_2.TABLE_2, *table_2.CONTROLS)}


def test_score_is_transformers_own_loss() -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    small = LlamaForCausalLM(LlamaConfig(vocab_size=16, num_key_value_heads=1, **sizes)).eval()
    texts = torch.randint(0, 16, (1, 60), generator=torch.Generator().manual_seed(1)).split([20, 40], dim=1)
    prompts, answers = zip(*(text.split([5, text.shape[1] - 5], dim=1) for text in texts), strict=True)
    found = table_2.score(small, prompts, answers)
    assert found[:, 1].tolist() == [15, 35]
    assert found[:, 2].any()
    for (loss, count, hits), text in zip(found, texts, strict=True):
        labels = text.clone()
        labels[:, :5] = -100
        assert loss == pytest.approx(float(small(text, labels=labels).loss) * count, rel=1e-5)
        best = small(text).logits[0].argmax(-1)
        assert hits == sum(int(best[t - 1]) == int(text[0, t]) for t in range(5, text.shape[1]))


SAME, OTHER = [1, 2, 1, 2, 1, 2, 3], [1, 2, 1, 2, 1, 3, 3]


def made(losses: list[float], hits: list[float], text: list[int]) -> table_2.Measured:
    def texts(one: list[int], other: list[int], *figures: tuple[float, int, int]) -> list[measuring.Written]:
        return [measuring.Written(t, *of) for t, of in zip((one, other), figures, strict=True)]

    plain = texts(text, SAME, (1.0, 1, 1), (1.0, 1, 1))
    tree = texts(SAME, SAME, (0.25, 4, 2), (0.75, 5, 1))
    found = {table_2.PLAIN: measuring.Found(plain, plain), table_2.CHAIN: measuring.Found(tree, plain, 1)}
    return table_2.Measured(np.array([losses, [10.0, 30.0], hits]).T, found)


def test_figures_by_hand() -> None:
    baseline, one = made([20.0, 60.0], [5.0, 15.0], SAME), made([10.0, 50.0], [6.0, 18.0], OTHER)
    found = table_2.figures_of(one, baseline)
    assert found["perplexity"]["value"] == pytest.approx(math.exp(60 / 40))
    over = found["perplexity_over_baseline"]
    # Of the two answers one lost 1 nat a token and the other a third; one of them is drawn twice in half of the draws.
    assert [over[key] for key in ("value", "low", "high")] == pytest.approx(
        [math.exp(-20 / 40), math.exp(-1), math.exp(-1 / 3)]
    )
    assert found["top1"]["value"] == pytest.approx(24 / 40)
    assert found["top1_less_baseline"]["value"] == pytest.approx(4 / 40)
    assert found["tokens_per_step"][table_2.CHAIN]["value"] == pytest.approx(9 / 3)
    assert found["speedup"][table_2.CHAIN]["value"] == pytest.approx(2.0)
    assert found["plain_tokens_per_second"] == pytest.approx(14 / 2)
    assert (found["texts_as_baseline"], found["texts_unlike_plain"]) == (1, 1)
    assert found["distinct_4_grams"] == pytest.approx((4 / 4 + 3 / 4) / 2)


@pytest.mark.slow
def test_one_command(tmp_path: Path, results: Any, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    pytest.importorskip("peft")
    monkeypatch.setattr(table_2, "Sizes", lambda **_: TINY)
    out = tmp_path / "out"
    assert command.main(["table-2", "--out", str(out)]) == 0
    [record] = results.records()
    found = record["settings"]
    assert list(found) == ["baseline", "direct", "medusa-1", "medusa-2"]
    assert found["medusa-1"]["perplexity"] == found["baseline"]["perplexity"]
    assert found["medusa-1"]["perplexity_over_baseline"] == {"value": 1.0, "low": 1.0, "high": 1.0}
    assert found["medusa-1"]["texts_as_baseline"] == TINY.prompts
    material = table_2.draw_material(TINY)
    for name in ("direct", "medusa-2"):
        trained = AutoModelForCausalLM.from_pretrained(out / name / "model", dtype=torch.float32)
        scores = table_2.score(trained, material.prompts, material.answers)
        expected = math.exp(scores[:, 0].sum() / scores[:, 1].sum())
        assert found[name]["perplexity"]["value"] == pytest.approx(expected)
        assert expected != found["baseline"]["perplexity"]["value"]
        assert set(found[name]["tokens_per_step"]) == {"chain of 3", "16 nodes"}
        assert len(found[name]["tree"]) == 15  # the root is not listed
    assert "| baseline | direct | medusa-1 | medusa-2 |" in capsys.readouterr().out
    with pytest.raises(ValueError, match="out: expected a new folder, or one that was begun with"):
        table_2.prepare([BY_NAME[name] for name in found], dataclasses.replace(TINY, steps=6), out)


def figures(top1: float, seconds: float, expected: Any, decoded: Any, unlike: int = 0) -> Figures:
    steps = {kinds.EXPECTED: {"8": expected, "16": expected}, kinds.DECODED: {"16": decoded}}
    sizes = {"bytes_bf16": 1_234_567, "us_7b_h200": 88.4}
    ranks = {"top1": [top1, 0.2], "top10": [0.9, 0.5]}
    return ranks | {"steps": steps, "texts_unlike_plain": unlike, "seconds": seconds} | sizes


def test_a_row_and_the_table_by_hand() -> None:
    first = [figures(0.5, 10, [[20, 10], [20, 10]], [[20, 10], [20, 10]]) for _ in range(2)]
    one = [
        figures(0.25, 20, [[22, 10], [20, 10]], [[20, 5], [20, 10]], 1),
        figures(0.35, 40, [[22, 10], [20, 10]], [[20, 5], [30, 10]], 2),
    ]
    rows = {"parents, rank 32": kinds.row_of(first, first), "new": kinds.row_of(one, first)}
    found = rows["new"]
    assert (found["top1"], found["top10"], found["seconds"]) == (pytest.approx([0.3, 0.2]), [0.9, 0.5], 30)
    assert found["texts_unlike_plain"] == 3
    decoded = found["ways"][kinds.DECODED]["16"]
    assert decoded["tokens_per_step"] == pytest.approx({"value": 90 / 30, "low": 50 / 20, "high": 40 / 10})
    # One of two prompts is drawn twice in half of the draws: twice as many tokens per step there, 1.25 in the other.
    assert decoded["over_first"] == pytest.approx({"value": 1.5, "low": 1.25, "high": 2.0})
    assert decoded["of_seeds"] == pytest.approx([40 / 15, 50 / 15])
    assert found["ways"][kinds.EXPECTED]["8"]["over_first"] == pytest.approx({"value": 1.05, "low": 1.0, "high": 1.1})
    assert "| new | 30 20 | 90 50 | 2.10 / 2.10 | 3.00 | 1.050 (1.000 to 1.100) | 1.500 (1.250 to 2.000) |" in (
        kinds.as_table(rows)
    )


def test_no_prompt_is_on_two_sides(tmp_path: Path) -> None:
    file, other = tmp_path / "asked.jsonl", tmp_path / "other.jsonl"
    for path, numbers in ((file, range(9)), (other, (3, 20, 20, 21, 22, 23))):
        path.write_text("".join(json.dumps({"text": f"Text {i}"}) + "\n" for i in numbers))
    plain = {"model": "demo", "temperature": 0.0, "quick": True, "set": [], "measured": [16]}
    amounts = {"training_prompts": 5, "prompts": 3, "new_tokens": 16}
    kinds.Run(
        SimpleNamespace(**plain, **amounts, prompts_from=str(file), held_out_from=str(other), out=tmp_path / "own")
    )
    learnt, tuning, held_out = (
        [json.loads(line)["text"] for line in (tmp_path / "own" / "greedy" / f"{name}.jsonl").open()]
        for name in ("training", "tuning", "held-out")
    )
    assert len({*learnt, *tuning}) == len(learnt) + len(tuning) == 8
    # Text 3 is in both files, so it is not held out.
    assert held_out == ["Text 20", "Text 21", "Text 22"]


@pytest.mark.slow
def test_kinds_of_heads(tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    asked = tmp_path / "asked.jsonl"
    asked.write_text("".join(json.dumps({"prompt": request.text}) + "\n" for request in draw(12, 5)))
    own = ["--model", str(BASE), "--prompts-from", str(asked)]
    sizes = ["--quick", "--out", str(tmp_path / "out"), *own, "--seeds", "0", "3", "--set", "heads.num_heads=2"]
    only = ["--temperature", "0.8", "--measured", "8", "64", "--only", "own projections", "own, int8"]
    assert command.main(["heads", *sizes, *only]) == 0
    assert "| own, int8 | " in capsys.readouterr().out
    record = json.loads((tmp_path / "out" / "figures.json").read_text())
    assert list(record["variants"]) == ["parents, rank 32", "own projections", "own, int8"]
    for one in record["variants"].values():
        assert one["texts_unlike_plain"] == 0
        assert len(one["top1"]) == 2
        assert all(a <= b for a, b in zip(one["top1"], one["top10"], strict=True))
        for how in ("", ", likeliest drafts"):  # decoding makes the very steps that the ranks tell
            expected, decoded = (one["ways"][way + how] for way in ("expected", "measured"))
            assert decoded == {size: expected[size] for size in ("8", "64")}
    _, projections, int8 = record["variants"].values()
    # Two matrices [V, 256] of two bytes or one, and then a scale of four bytes per row.
    vocabulary = AutoConfig.from_pretrained(BASE).vocab_size
    assert projections["bytes_bf16"] - int8["bytes_bf16"] == 2 * vocabulary * (256 - 4)
    assert projections["seconds"] == int8["seconds"] > 0
