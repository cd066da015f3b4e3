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
from benchmarks.variants.variant import BASE, Figures, config
from medusa_decoding.calibration.texts import Written
from medusa_decoding.checkpoints import pretrained
from medusa_decoding.demo import CHECKPOINT
from medusa_decoding.demo.requests import FunctionRequest, parse
from medusa_decoding.roofline.devices import DEVICES
from medusa_decoding.roofline.operators import step_operators, total_seconds
from medusa_decoding.roofline.shapes import SHAPES, HeadShape
from medusa_decoding.training.config import HeadsConfig
from medusa_decoding.training.data.targets import IGNORE
from medusa_decoding.training.loop.schedules import stages
from recipes.demo.requests import answer, draw
from recipes.demo.words import is_held_out

if not (CHECKPOINT / "measured.json").is_file():
    pytest.skip("the embedded checkpoint is not there", allow_module_level=True)

TINY = table_2.QUICK
BY_NAME = {variant.name: variant for variant in (*table_2.TABLE_2, *table_2.CONTROLS)}


def names_held_out(texts: list[str]) -> set[bool]:
    """Return whether words in the names of the functions among requests are held out."""
    functions = [request for text in texts if isinstance(request := parse(text), FunctionRequest)]
    names = "_".join(name for request in functions for name in (request.name, request.argument))
    return {is_held_out(word) for word in names.split("_")}


@pytest.fixture
def small() -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=16, num_key_value_heads=1, **sizes)).eval()


@pytest.mark.parametrize("steps", [4, 300])
def test_every_variant_takes_as_many_gradient_steps(tmp_path: Path, steps: int) -> None:
    sizes = table_2.Sizes(steps=steps, warmup=1)
    for variant in BY_NAME.values():
        if variant.sections:
            made = config(variant, table_2.shared_settings(sizes, tmp_path / "requests.jsonl"), tmp_path / "out")
            assert sum(stage.steps for stage in stages(made, steps * sizes.rows)) == steps, variant.name


def test_what_tells_the_variants_apart(tmp_path: Path) -> None:
    made = {
        name: config(variant, table_2.shared_settings(TINY, tmp_path / "requests.jsonl"), tmp_path / "out")
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


def test_training_data_are_training_requests_with_their_answers(tmp_path: Path) -> None:
    table_2.prepare([], TINY, tmp_path / "out")
    records = [json.loads(line) for line in (tmp_path / "out" / "requests.jsonl").read_text().splitlines()]
    assert len(records) == TINY.steps * TINY.rows
    asked = [record["prompt"] for record in records]
    assert len(set(asked)) == len(asked)
    assert names_held_out(asked) == {False}
    assert [record["response"] for record in records] == [answer(parse(text)) for text in asked]


def test_held_out_requests_are_measured_with_their_reference_answers() -> None:
    tokenizer, material = pretrained.load_tokenizer(BASE), table_2.draw_material(TINY)

    def asked(prompts: list[torch.Tensor]) -> list[str]:
        texts = [tokenizer.decode(ids[0]) for ids in prompts]
        return [text.removeprefix("<|user|>").removesuffix("<|end|><|assistant|>") for text in texts]

    assert (len(material.prompts), len(material.tuning)) == (TINY.prompts, TINY.tuning)
    assert (names_held_out(asked(material.prompts)), names_held_out(asked(material.tuning))) == ({True}, {False})
    expected = [f"{answer(parse(text))}<|end|>" for text in asked(material.prompts)]
    assert [tokenizer.decode(ids[0]) for ids in material.answers] == expected


def test_score_is_transformers_own_loss(small: Any) -> None:
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
    assert record["sizes"] == dataclasses.asdict(TINY)
    assert record["versions"]["torch"]
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
    assert all(column["texts_unlike_plain"] == 0 for column in found.values())
    assert "| | baseline | direct | medusa-1 | medusa-2 |" in capsys.readouterr().out
    assert json.loads((out / "figures.json").read_text())["settings"].keys() == found.keys()
    trained = (out / "direct" / "heads" / "medusa_lm_head.safetensors").stat().st_mtime_ns
    again = [BY_NAME[name] for name in found]
    table_2.prepare(again, TINY, out)
    assert (out / "direct" / "heads" / "medusa_lm_head.safetensors").stat().st_mtime_ns == trained
    with pytest.raises(SystemExit):
        command.main(["table-2", "--quick", "--out", str(tmp_path)])
    assert "out: expected a new folder, or one that was begun with" in capsys.readouterr().err
    with pytest.raises(ValueError, match="out: expected a new folder, or one that was begun with"):
        table_2.prepare(again, dataclasses.replace(TINY, steps=6), out)


def test_a_text_that_is_not_the_models_own_fails(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    def broken(*arguments: Any) -> None:
        raise measuring.OtherTextError("16 nodes: expected the text of plain on prompt 0")

    monkeypatch.setattr(table_2, "measure_all", broken)
    monkeypatch.setattr(table_2, "prepare", lambda *arguments: None)
    monkeypatch.setattr(table_2, "draw_material", lambda *arguments: None)
    with pytest.raises(SystemExit) as stopped:
        command.main(["table-2", "--quick", "--out", str(tmp_path)])
    assert stopped.value.code == 2
    assert "expected the text of plain on prompt 0" in capsys.readouterr().err


def test_only_some_variants_are_trained(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(table_2, "prepare", lambda *given: asked.append(given))
    only = ["--only", "medusa-1", "medusa-2", "--train-only", "--out", str(tmp_path)]
    assert command.main(["table-2", "--steps", "60", *only]) == 0
    [(wanted, sizes, out)] = asked
    assert ([variant.name for variant in wanted], sizes.steps, out) == (["medusa-1", "medusa-2"], 60, tmp_path)
    for bad, words in ((["--steps", "7"], "expected an even number"), (["--only", "x"], "--only: expected some of")):
        with pytest.raises(SystemExit):
            command.main(["table-2", *bad, "--out", str(tmp_path)])
        assert words in capsys.readouterr().err


def test_every_row_is_another_training(tmp_path: Path) -> None:
    rows = (*kinds.HEADS, *kinds.SWEEP, *kinds.OLDER)
    shared = table_2.shared_settings(TINY, tmp_path / "requests.jsonl")
    made = {row.name: config(row, shared, tmp_path).to_yaml() for row in rows}
    assert len(made) == len(rows)
    assert len(set(made.values())) == len(rows) - 2  # int8 and fp8 are conversions
    assert made["own, int8"] == made["own, fp8"] == made["own projections"]
    assert len({row.folder for row in rows}) == len(rows) - 2


# Ranks of two heads at each position of an answer, by the prompt's token; one fewer than the answer's tokens. The last
# head has nothing to rank at the last position.
RANKS = {
    0: [[0, -1], [0, -1], [0, -1], [0, IGNORE]],
    1: [[0, 1], [0, 0], [-1, 5], [4, IGNORE]],
    2: [[3, 2], [0, 0], [2, IGNORE]],
    3: [*[[0, 0]] * 6, [1, -1], [-1, IGNORE]],
}


class Drafts:
    """Heads that only tell which random numbers they are given."""

    num_heads, num_candidates = 2, 50

    def propose(self, hidden: Any, *, temperature: float = 1.0, noise: Any = None) -> Any:
        return temperature, noise

    propose_children = propose


def test_measures_by_hand(monkeypatch: Any) -> None:
    model: Any = SimpleNamespace(heads=Drafts())
    given: list[Any] = []

    def drawn() -> bool:
        return bool(model.heads.propose(0, temperature=0.5, noise=7) == (0.5, 7))

    def ranks(of: Any, ids: list[int], prompt: int, **text: Any) -> torch.Tensor:
        assert (of, prompt, text) == (model, 1, {"temperature": 0.5, "seed": 10 * ids[0]})
        return torch.tensor(RANKS[ids[0]] if drawn() else RANKS[0])

    def write(of: Any, side: str, tree: Any) -> list[Written]:
        given.append((side, tree.num_nodes, drawn()))
        # The second answer is another one than the plain loop's, with the smaller tree.
        texts = [1, 2, 3, 4, 5], [1, 2, 3, 9 if tree.num_nodes == 16 else 4]
        lengths = [2, 0] if drawn() else [1, 0, 0], [0, 1]
        return [Written([1], text, accepted, 10) for text, accepted in zip(texts, lengths, strict=True)]

    monkeypatch.setattr(kinds, "own_text_ranks", ranks)
    run = object.__new__(kinds.Run)
    run.decoded, run.ranked = ["16", "64"], ("", kinds.LIKELIEST)
    run._args = SimpleNamespace(temperature=0.5)
    run._write = write
    run._answers = {"held-out": [([1], [1, 2, 3, 4, 5], 10), ([2], [1, 2, 3, 4], 20)], "tuning": [([3], [1] * 9, 30)]}
    found = run._measure(model)
    # Seen on the tuning prompt: 0, 0 0, 1; then products above 0 (1 0), then the shortest paths in order.
    assert found["trees"]["8"] == [[0], [1], [2], [3], [4], [0, 0], [1, 0]]
    assert [0, 1] in found["trees"]["16"]
    assert [3, 2] not in found["trees"]["16"]
    assert [3, 2] in found["trees"]["64"]
    # Positions with a target of both heads: three of the first answer, two of the second.
    assert (found["top1"], found["top10"]) == ([3 / 5, 2 / 5], [4 / 5, 5 / 5])
    assert found["steps"] == {
        # With 8 nodes: 0 of (0 1), nothing of (-1 5), 4; then 3 of (3 2), 2. With 16, also 0 1; with 64, also 3 2.
        "expected": {"8": [(4, 3), (3, 2)], "16": [(4, 2), (3, 2)], "64": [(4, 2), (3, 1)]},
        "measured": {size: [(4, 2), (3, 2)] for size in ("16", "64")},
        # The first head is right everywhere, the second nowhere.
        "expected, likeliest drafts": {size: [(4, 2), (4, 2)] for size in ("8", "16", "64")},
        "measured, likeliest drafts": {size: [(4, 3), (3, 2)] for size in ("16", "64")},
    }
    assert found["texts_unlike_plain"] == 2
    assert given == [("held-out", nodes, noise) for noise in (False, True) for nodes in (16, 64)]
    assert drawn()


def figures(top1: float, seconds: float, expected: Any, decoded: Any, unlike: int = 0) -> Figures:
    steps = {kinds.EXPECTED: {"8": expected, "16": expected}, kinds.DECODED: {"16": decoded}}
    sizes = {"bytes_bf16": 1_234_567, "us_7b_h200": 88.4}
    return {
        "top1": [top1, 0.2],
        "top10": [0.9, 0.5],
        "steps": steps,
        "texts_unlike_plain": unlike,
        "seconds": seconds,
    } | sizes


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
    assert rows["parents, rank 32"]["ways"][kinds.DECODED]["16"]["over_first"] == {
        "value": 1.0,
        "low": 1.0,
        "high": 1.0,
    }
    title, _, *lines = kinds.as_table(rows).splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in (title, *lines)]
    assert dict(zip(cells[0], cells[2], strict=True)) == {
        "heads": "new",
        "top-1, %": "30 20",
        "top-10, %": "90 50",
        "tokens per step expected, 8 / 16 nodes": "2.10 / 2.10",
        "tokens per step measured, 16 nodes": "3.00",
        "over the first row's, 8 nodes, expected": "1.050 (1.000 to 1.100)",
        "over the first row's, 16 nodes, measured": "1.500 (1.250 to 2.000)",
        "range over seeds": "0.00 / 0.67",
        "texts unlike plain": "3",
        "MB per step, bf16": "1.23",
        "us at 7B, H200": "88",
        "training, s": "30",
    }


def test_a_row_is_also_compared_with_the_first_one_without_the_noise() -> None:
    first, one = figures(0.5, 10, [[20, 10]], [[24, 10]]), figures(0.5, 10, [[26, 10]], [[30, 10]])
    first["steps"][kinds.DECODED + kinds.LIKELIEST] = {"16": [[20, 10]]}
    one["steps"][kinds.DECODED + kinds.LIKELIEST] = {"16": [[22, 10]]}
    rows = {"first": kinds.row_of([first], [first]), "new": kinds.row_of([one], [first])}
    ways = {name: row["ways"] for name, row in rows.items()}
    ratios = {name: {over: cell["value"] for over, cell in found[kinds.DECODED]["16"].items() if "over" in over}
              for name, found in ways.items()}  # fmt: skip
    assert ratios == {
        "first": {"over_first": 1.0, kinds.OVER_LIKELIEST: pytest.approx(1.2)},
        "new": {"over_first": pytest.approx(1.25), kinds.OVER_LIKELIEST: pytest.approx(1.5)},
    }
    likeliest = ways["new"][kinds.DECODED + kinds.LIKELIEST]["16"]
    assert likeliest["over_first"]["value"] == pytest.approx(1.1)
    assert kinds.OVER_LIKELIEST not in likeliest
    assert kinds.OVER_LIKELIEST not in ways["new"][kinds.EXPECTED]["8"]
    _, _, _, cells = kinds.as_table(rows).splitlines()
    assert cells.split(" | ")[5:9] == ["2.20", "1.300", "1.250", "1.500"]


def test_predicted_microseconds_of_heads() -> None:
    device = DEVICES["h200-attained"]
    own = HeadsConfig(num_heads=4, num_layers=2)
    for settings, shape in (
        (own, HeadShape(4, layers=2)),
        (dataclasses.replace(own, shared_projection=True), HeadShape(4, shared=True, layers=2)),
        (dataclasses.replace(own, token_map_size=512), HeadShape(4, 8000, layers=2)),
    ):
        # The step's last two operators, which also count activations.
        expected = 1e6 * total_seconds(step_operators(SHAPES["llama-2-7b"], shape, 1, 16, 1024)[-2:], device)
        assert kinds.predicted_us(settings, None, 2048) == pytest.approx(expected, rel=0.01)
    # Half of the bytes of four matrices [32,000, 4,096], but a scale per row.
    saved = 4 * 32_000 * (4096 - 4) / (0.97 * 4.8e12) * 1e6
    less = kinds.predicted_us(own, None, 2048) - kinds.predicted_us(own, "int8", 2048)
    assert less == pytest.approx(saved)


def arguments(out: Path, **given: Any) -> Any:
    plain = {
        "model": "demo",
        "prompts_from": None,
        "held_out_from": None,
        "temperature": 0.0,
        "quick": True,
        "set": [],
        "measured": [16],
    }
    amounts = {"training_prompts": 6, "prompts": 3, "new_tokens": 16}
    return SimpleNamespace(**(plain | amounts | given), out=out)


def prompts_in(folder: Path) -> dict[str, list[Any]]:
    files = {name: folder / "greedy" / f"{name}.jsonl" for name in ("training", "tuning", "held-out")}
    return {name: [json.loads(line) for line in file.read_text().splitlines()] for name, file in files.items()}


def test_no_prompt_is_on_two_sides(tmp_path: Path) -> None:
    records: list[Any] = [{"messages": [{"role": "user", "content": f"Question {i % 9}"}]} for i in range(12)]
    file = tmp_path / "asked.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in [*records, {"text": "A text"}]))
    own = arguments(tmp_path / "own", model=str(BASE), prompts_from=str(file), training_prompts=3)
    kinds.Run(own)
    sides = prompts_in(tmp_path / "own")
    assert [len(side) for side in sides.values()] == [3, 3, 3]
    unique = {json.dumps(record) for side in sides.values() for record in side}
    assert len(unique) == 9
    assert unique < {json.dumps(record) for record in [*records, {"text": "A text"}]}
    with pytest.raises(ValueError, match=r"--prompts: expected fewer than half of the 10 there, got 5"):
        kinds.Run(arguments(tmp_path / "few", prompts_from=str(file), prompts=5))
    with pytest.raises(ValueError, match=r"out: expected a new folder, or the prompts in .*task.json"):
        kinds.Run(arguments(tmp_path / "own", prompts_from=str(file), training_prompts=3, prompts=2))


def test_held_out_prompts_of_a_file_of_their_own(tmp_path: Path) -> None:
    file, other = tmp_path / "asked.jsonl", tmp_path / "other.jsonl"
    file.write_text("".join(json.dumps({"text": f"Text {i}"}) + "\n" for i in range(9)))
    other.write_text("".join(json.dumps({"text": f"Text {i}"}) + "\n" for i in (3, 20, 20, 21, 22, 23)))
    given = {"prompts_from": str(file), "held_out_from": str(other)}
    kinds.Run(arguments(tmp_path / "own", training_prompts=5, **given))
    sides = prompts_in(tmp_path / "own")
    # Text 3 is in both files, so it is not held out.
    assert [record["text"] for record in sides["held-out"]] == ["Text 20", "Text 21", "Text 22"]
    learnt = [record["text"] for name in ("training", "tuning") for record in sides[name]]
    assert len(learnt) == len(set(learnt)) == 8
    assert set(learnt) < {f"Text {i}" for i in range(9)}
    with pytest.raises(ValueError, match=r"--prompts: expected fewer than all of the 9 there, got 9"):
        kinds.Run(arguments(tmp_path / "few", prompts=9, **given))
    with pytest.raises(ValueError, match=r"--held-out-from: expected prompts that .* does not have, got none"):
        kinds.Run(arguments(tmp_path / "same", **given | {"held_out_from": str(file)}))


def test_requests_to_learn_and_to_choose_trees_on_are_others(tmp_path: Path) -> None:
    kinds.Run(arguments(tmp_path))
    asked = {name: [one["messages"][0]["content"] for one in part] for name, part in prompts_in(tmp_path).items()}
    assert [len(part) for part in asked.values()] == [6, 3, 3]
    assert len({text for part in asked.values() for text in part}) == 12
    assert {name: names_held_out(part) for name, part in asked.items()} == {
        "training": {False}, "tuning": {False}, "held-out": {True}
    }  # fmt: skip


@pytest.mark.slow
def test_kinds_of_heads(tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    asked = tmp_path / "asked.jsonl"
    asked.write_text("".join(json.dumps({"prompt": request.text}) + "\n" for request in draw(12, 5)))
    own = ["--model", str(BASE), "--prompts-from", str(asked)]
    sizes = ["--quick", "--out", str(tmp_path / "out"), *own, "--seeds", "0", "3", "--set", "heads.num_heads=2"]
    called = [
        "heads",
        *sizes,
        "--temperature",
        "0.8",
        "--measured",
        "8",
        "64",
        "--only",
        "own projections",
        "own, int8",
    ]
    assert command.main(called) == 0
    table = capsys.readouterr().out
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
    assert "| own, int8 | " in table

    def refused(*given: Any, **settings: Any) -> Any:
        raise AssertionError("nothing is trained or measured again")

    for name in ("train", "own_text_ranks"):
        monkeypatch.setattr(kinds, name, refused)
    assert command.main(called) == 0
    assert capsys.readouterr().out.endswith(table[table.index("| heads |") :])
    with pytest.raises(SystemExit):
        command.main([*called, "--set", "optimisation.learning_rate=0.5"])
    assert "out: expected a new folder, or the settings in" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        command.main(["heads", "--out", str(tmp_path), "--model", str(BASE)])
    assert "--prompts-from: expected a file of prompts for a model of your own" in capsys.readouterr().err


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
        table_2.Sizes(**given)
