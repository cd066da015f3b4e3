"""The paper's ablations: what each measures and writes, lossless methods compared with plain text, bad input."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import random
import statistics
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.ablations import (
    __main__ as command,
)
from benchmarks.ablations import (
    draft,
    dynamic,
    figure_3b,
    figure_4,
    figure_5,
    figure_7,
    measuring,
    setup,
    table_3,
    writing,
)
from benchmarks.bench_generate import prompts as demo_prompts
from medusa_decoding.demo import CHECKPOINT
from medusa_decoding.evaluation.prompts import Prompt
from medusa_decoding.model import MedusaModel
from medusa_decoding.trees.tree import Tree
from recipes.demo.requests import draw

sys.path.append(str(Path(__file__).resolve().parents[1] / "decode"))
from models import heads_for, prompts, tiny, transformers_greedy

NEW = 12


class Tokenizer:
    """Letters are tokens."""

    chat_template = eos_token = None

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": [ord(letter) % 11 for letter in text]}

    def decode(self, tokens: list[int], **_: Any) -> str:
        return "".join(chr(97 + token) for token in tokens)


@pytest.fixture(scope="module")
def bench() -> Any:
    base = tiny()
    base.generation_config.pad_token_id = None  # token 0 is an ordinary one
    rows = [row[None] for row in prompts(5, [6, 9])]
    asked, tuning = ([setup.Asked(i, ids) for i, ids in enumerate(some)] for some in (rows[:3], rows[3:]))
    with MedusaModel(base, heads_for(base)) as model:
        made = setup.Bench(model, Tokenizer(), asked, tuning, NEW, {"eos_token_id": []})
        made.described = {"model": "tiny", "dtype": "float32", "backend": "eager", "prompts": 3}
        yield made


def texts_of_transformers(bench: setup.Bench) -> list[list[int]]:
    bench.model.suspend()
    base = bench.model._suspended[1]()  # type: ignore[index]
    texts = [transformers_greedy(base, one.ids[0], NEW) for one in bench.asked]
    bench.model.resume()
    return texts


def write(folder: Path, name: str, described: dict[str, Any], figures: dict[str, Any]) -> Path:
    path = folder / f"{name}.json"
    path.write_text(json.dumps(writing.record(name, described, figures, ["--limit", "3"])))
    return path


def as_drawn(name: str, bench: setup.Bench, figures: dict[str, Any], tmp_path: Path) -> dict[str, Any]:
    """Write a record, read it, plot it and describe it, as the command does."""
    pytest.importorskip("matplotlib")
    path = write(tmp_path, name, bench.described, figures)
    record = json.loads(path.read_text())
    command.draw(record, tmp_path / "picture.svg")
    assert (tmp_path / "picture.svg").read_text().rstrip().endswith("</svg>")
    assert command.module(name).as_text(record)
    return record


# -- ways of decoding --------------------------------------------------------------------------------------------------


def test_texts_and_steps(bench: setup.Bench) -> None:
    expected = texts_of_transformers(bench)
    ways = {"plain": measuring.ours(bench, Tree([])), "transformers": measuring.transformers(bench)}
    ways["tree"] = measuring.ours(bench, Tree.cartesian([3, 2]))
    found = measuring.compare(bench, ways, {"tree": "plain", "transformers": "plain"})
    for one in found.values():
        assert [written.text for written in one.written] == expected
        assert all(written.seconds > 0 for written in one.written)
    # The prefill's token is not a step of ours; transformers calls the model once per token, including the prefill.
    assert [(w.committed, w.steps) for w in found["plain"].written] == [(NEW - 1, NEW - 1)] * 3
    assert [(w.committed, w.steps) for w in found["transformers"].written] == [(NEW, NEW)] * 3
    assert all(w.committed == NEW - 1 for w in found["tree"].written)
    assert sum(w.steps for w in found["tree"].written) < 3 * (NEW - 1)
    assert found["tree"].figures()["same_text"] == 3
    assert "same_text" not in found["plain"].figures()


def test_texts_end_at_the_models_eos(bench: setup.Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = texts_of_transformers(bench)
    end = next(token for token in whole[0] if token in whole[1] and whole[0].index(token) != whole[1].index(token))
    expected = [text[: text.index(end) + 1] if end in text else text for text in whole]
    assert len(set(map(len, expected))) > 1
    monkeypatch.setattr(bench.model.backbone.causal_lm.generation_config, "eos_token_id", end)
    other = setup.bench_of(bench.model, [one.ids for one in bench.asked], [], NEW)
    ways = {"plain": measuring.ours(other, Tree([])), "transformers": measuring.transformers(other)}
    ways["tree"] = measuring.ours(other, Tree.cartesian([3, 2]))
    for name, one in measuring.compare(other, ways, {"tree": "plain", "transformers": "plain"}).items():
        assert [written.text for written in one.written] == expected
        first = 0 if name == "transformers" else 1  # our prefill's token is not a step's
        assert [written.committed for written in one.written] == [len(text) - first for text in expected]


def test_the_first_different_text_ends_the_run(bench: setup.Bench) -> None:
    plain = measuring.ours(bench, Tree([]))

    def wrong(asked: setup.Asked) -> measuring.Written:
        one = plain(asked)
        text = [*one.text[:4], (one.text[4] + 1) % 11, *one.text[5:]] if asked.number == 1 else one.text
        return measuring.Written(text, one.seconds, one.committed, one.steps)

    with pytest.raises(
        measuring.OtherTextError, match="wrong: expected the text of plain on prompt 1, got another from new token 4 on"
    ):
        measuring.compare(bench, {"plain": plain, "wrong": wrong}, {"wrong": "plain"})


def test_in_lower_precision_different_texts_are_counted(bench: setup.Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(setup.Bench, "exact", False)

    def written(text: list[int]) -> measuring.Way:
        return lambda asked: measuring.Written(text, 1.0, 2, 1)

    ways = {"plain": written([1, 2]), "other": written([1, 3]), "same": written([1, 2])}
    found = measuring.compare(bench, ways, {"other": "plain", "same": "plain"})
    assert (found["other"].same, found["same"].same) == (0, 3)


def test_captured_steps_run_once_before_they_are_timed(bench: setup.Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(setup.Bench, "captured", True)
    monkeypatch.setattr(measuring, "BLOCK", 2)
    called: list[str] = []

    def way(name: str) -> measuring.Way:
        def one(asked: setup.Asked) -> measuring.Written:
            called.append(name)
            return measuring.Written([1], float(len(called)), 1, 1)

        return one

    names = ["plain", "a", "b", "c"]
    found = measuring.compare(bench, {name: way(name) for name in names}, before_block=lambda: called.append("free"))
    first, second = called[1 : called.index("free", 1)], called[called.index("free", 1) + 1 :]
    assert called[0] == "free"
    assert {"a", "b", "plain"} == set(first)
    assert {"c", "plain"} == set(second)
    assert [first.count(name) for name in ("plain", "a", "b")] == [1 + 2 * 3] * 3
    # The first of each three is not timed, then a round that is not, then the one that is.
    assert set(first[:3]) == set(first[3:6]) == set(first[6:9])
    assert all(len(found[name].written) == len(found[name].plain) == 3 for name in names)
    assert found["a"].plain == found["plain"].written != found["c"].plain


def test_figures_by_hand() -> None:
    found = measuring.Found(
        [measuring.Written([0] * 8, 1.0, 7, 2), measuring.Written([0] * 4, 1.0, 3, 3)],
        [measuring.Written([0] * 8, 4.0, 7, 7), measuring.Written([0] * 4, 1.0, 3, 3)],
    )
    figures = found.figures()
    assert figures["tokens_per_step"]["value"] == 10 / 5
    assert figures["tokens_per_second"] == 12 / 2
    assert figures["speedup"]["value"] == (12 / 2) / (12 / 5)
    assert figures["median_speedup_of_prompts"] == (4 + 1) / 2
    # With two prompts, one of them is drawn twice in half of the draws.
    assert (figures["speedup"]["low"], figures["speedup"]["high"]) == (1.0, 4.0)


# -- figure 4 ----------------------------------------------------------------------------------------------------------


def test_products_are_all_there_are() -> None:
    expected = {
        widths
        for depth in (1, 2, 3)
        for widths in itertools.product(range(1, 6), repeat=depth)
        if 8 < 1 + sum(math.prod(widths[: d + 1]) for d in range(depth)) <= 20
    }
    found = figure_4.products(3, 5, 8, 20)
    assert len(found) == len(set(found))
    assert set(found) == expected
    assert all(8 < Tree.cartesian(widths).num_nodes <= 20 for widths in found)


def test_dense_trees_are_drawn_from_every_range() -> None:
    drawn = figure_4.sample_dense(4, 10, [4, 8, 16, 64], 3, seed=0)
    sizes = [Tree.cartesian(widths).num_nodes for widths in drawn]
    assert [sum(low < size <= high for size in sizes) for low, high in ((1, 4), (4, 8), (8, 16), (16, 64))] == [3] * 4
    assert len(set(drawn)) == 12
    assert drawn == figure_4.sample_dense(4, 10, [4, 8, 16, 64], 3, seed=0)
    assert drawn != figure_4.sample_dense(4, 10, [4, 8, 16, 64], 3, seed=1)
    # Two nodes: only one product.
    assert figure_4.sample_dense(4, 10, [2], 3, seed=0) == [(1,)]


@pytest.mark.slow
def test_figure_4(bench: setup.Bench, tmp_path: Path) -> None:
    record = as_drawn("figure-4", bench, figure_4.measure(bench, [4, 8, 64], 2), tmp_path)
    kinds = [tree["kind"] for tree in record["trees"]]
    assert kinds == ["dense"] * 6 + ["optimised"] * 3
    assert [tree["nodes"] for tree in record["trees"][6:]] == [4, 8, 64]
    for tree in record["trees"]:
        assert tree["same_text"] == tree["texts"] == 3
        assert 1.0 <= tree["tokens_per_step"]["value"] <= 1 + tree["depth"]
        if tree["kind"] == "dense":
            widths = [int(width) for width in tree["name"].removeprefix("dense ").split("x")]
            assert tree["nodes"] == Tree.cartesian(widths).num_nodes


# -- figure 5 ----------------------------------------------------------------------------------------------------------


def test_surprise_is_transformers_own_loss(bench: setup.Bench) -> None:
    base, ids = bench.model.backbone.causal_lm, bench.asked[0].ids
    text = [3, 1, 4, 1, 5]
    whole = torch.cat([ids, torch.tensor([text])], 1)
    labels = whole.clone()
    labels[:, : ids.shape[1]] = -100
    assert figure_5.surprise(base, ids, text) == pytest.approx(base(whole, labels=labels).loss.item() * 5, rel=1e-5)


@pytest.mark.slow
def test_figure_5(bench: setup.Bench, tmp_path: Path) -> None:
    record = as_drawn("figure-5", bench, figure_5.measure(bench, [0.01, 0.25], 8, 0.7), tmp_path)
    ways = record["ways"]
    assert list(ways) == ["plain", "sampling, plain", "greedy", "sampling"]
    assert ways["greedy"]["same_text"] == ways["sampling"]["same_text"] == 3
    assert ways["greedy"]["perplexity"] == ways["plain"]["perplexity"] != ways["sampling"]["perplexity"]
    assert ways["sampling"]["perplexity"] == ways["sampling, plain"]["perplexity"]
    assert [point["epsilon"] for point in record["typical"]] == [0.01, 0.25]
    # A smaller epsilon accepts whatever a larger one accepts, step by step; nearly all drafts at 0.01.
    assert record["typical"][0]["tokens_per_step"]["value"] > ways["greedy"]["tokens_per_step"]["value"]
    assert "same_text" not in record["typical"][0]


def test_a_sampled_text_may_differ_only_at_a_boundary_of_two_probabilities(bench: setup.Bench) -> None:
    asked = bench.asked[0]
    logits = bench.model.backbone.causal_lm(torch.cat([asked.ids, torch.tensor([[4, 2]])], 1)).logits[0, -1]
    shares = (logits / 0.5).softmax(-1).tolist()
    assert figure_5.gap(bench, asked.ids, [4, 2], (3, 8), 0.5) == pytest.approx(sum(shares[4:8]), abs=1e-6)
    assert figure_5.gap(bench, asked.ids, [4, 2], (8, 3), 0.5) == pytest.approx(sum(shares[4:8]), abs=1e-6)
    assert figure_5.gap(bench, asked.ids, [4, 2], (3, 4), 0.5) == 0.0

    def found(token: int) -> measuring.Found:
        texts = [[4, 2, token, 1], [1, 2, 3, 4], [1, 2, 3, 4]]
        return measuring.Found([measuring.Written(text, 1.0, 3, 3) for text in texts])

    assert figure_5.same_draws(bench, found(3), found(3), 0.5) == 3
    assert figure_5.same_draws(bench, found(4), found(3), 0.5) == 2
    with pytest.raises(
        measuring.OtherTextError,
        match="sampling: expected the text of sampling, plain on prompt 0, got another from new",
    ):
        figure_5.same_draws(bench, found(8), found(3), 0.5)


# -- figure 7 ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_figure_7(bench: setup.Bench, tmp_path: Path) -> None:
    small = tiny(seed=5, num_hidden_layers=1)
    record = as_drawn("figure-7", bench, figure_7.measure(bench, small, [1, 3]), tmp_path)
    assert [row["gamma"] for row in record["drafting"]] == [1, 3]
    for row in (*record["drafting"], record["medusa"], record["transformers"]):
        assert row["same_text"] == 3
    for row in record["drafting"]:
        assert 1.0 <= row["tokens_per_step"]["value"] <= 1 + row["gamma"]
        milliseconds = record["step_milliseconds"]
        expected = row["tokens_per_step"]["value"] * milliseconds["plain"] / milliseconds["round"][str(row["gamma"])]
        assert row["estimate"] == pytest.approx(expected, rel=1e-2)
    rounds = [milliseconds["round"][gamma] - int(gamma) * milliseconds["draft"] for gamma in ("1", "3")]
    assert all(verification > 0 for verification in rounds)


def test_a_perfect_draft_is_always_right(bench: setup.Bench) -> None:
    same = tiny()  # the same weights as the base model
    same.generation_config.pad_token_id = None
    way = figure_7.assisted(bench, same, 3)
    written = way(bench.asked[0])
    assert written.text == texts_of_transformers(bench)[0]
    assert (written.committed, written.steps) == (NEW, NEW / 4)


def test_a_draft_of_another_vocabulary_is_refused(bench: setup.Bench, tmp_path: Path) -> None:
    tiny(vocab_size=13).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="--draft: expected a vocabulary of 11, got 13"):
        figure_7.load_draft(str(tmp_path), bench)
    with pytest.raises(ValueError, match=r"^--draft: expected a model's folder or hub id within reach, got "):
        figure_7.load_draft(str(tmp_path / "missing"), bench)


# -- table 3 and dynamic trees -----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_table_3(bench: setup.Bench, tmp_path: Path) -> None:
    base = tiny(seed=3)
    with MedusaModel(base, heads_for(base, 3)) as other:
        models = {"own heads": bench.model, "medusa-2": other}
        record = as_drawn("table-3", bench, table_3.measure(bench, models, [2, 2, 2]), tmp_path)
    assert (record["transformers"]["same_text"], record["transformers"]["tokens_per_step"]["value"]) == (3, 1.0)
    rungs = [table_3.CHAIN, table_3.DENSE, table_3.OPTIMISED, table_3.TUNED, table_3.DYNAMIC]
    own, trained = (record["ladders"][name]["rungs"] for name in ("own heads", "medusa-2"))
    assert list(own) == rungs
    assert list(trained) == ["plain", *rungs]
    assert [own[rung]["nodes"] for rung in rungs[:3]] == [5, 15, 15]
    assert [trained[rung]["nodes"] for rung in rungs[:3]] == [4, 15, 15]
    for one in (*own.values(), *(trained[rung] for rung in rungs)):
        assert one["same_text"] == 3
    weighed = record["ladders"]["own heads"]["tuning"]
    best = max(weighed, key=lambda one: one["expected_tokens"] / one["milliseconds"])
    assert own[table_3.TUNED]["nodes"] == best["nodes"]


def test_dynamic(bench: setup.Bench, tmp_path: Path) -> None:
    record = as_drawn("dynamic", bench, dynamic.measure(bench, [4, 8]), tmp_path)
    assert [one["nodes"] for one in record["sizes"]] == [4, 8]
    for one in record["sizes"]:
        assert one["optimised"]["same_text"] == one["dynamic"]["same_text"] == 3
        expected = one["dynamic"]["tokens_per_step"]["value"] / one["optimised"]["tokens_per_step"]["value"]
        assert one["tokens_per_step_over"]["value"] == pytest.approx(expected, rel=1e-3)


# -- figure 3b ---------------------------------------------------------------------------------------------------------


def test_figure_3b(bench: setup.Bench, tmp_path: Path) -> None:
    asked = [Prompt((f"question {i}", "and then"), ("math", "coding")[i % 2], f"/folder/q.jsonl:{i}") for i in range(4)]
    figures = figure_3b.measure(bench.model, bench.tokenizer, asked, NEW)
    record = as_drawn("figure-3b", bench, figures, tmp_path)
    assert list(record["categories"]) == ["math", "coding"]
    assert [one["texts"] for one in record["categories"].values()] == [4, 4]
    assert set(record["overall"]["speedup"]) == {"plain", "transformers"}
    assert record["overall"]["identical"] == {"plain": 8, "transformers": 8}
    assert "/folder" not in json.dumps(record)


def test_a_tree_from_the_accuracies_next_to_the_heads(bench: setup.Bench, tmp_path: Path) -> None:
    args = argparse.Namespace(model=str(tmp_path), nodes=4)
    with pytest.raises(ValueError, match=r"--nodes: expected calibration\.json or measured\.json in .*, got neither"):
        figure_3b.best_tree(args, bench.model)
    hits = [[90, 95], [10, 50], [5, 10], [1, 2]]
    (tmp_path / "measured.json").write_text(json.dumps({"accuracy": {"hits": hits, "total": [100] * 4}}))
    # Of 0.9 (head 1's first), 0.9 * 0.1 and 0.9 * 0.4 (then head 2's first and second) and 0.05 the largest three.
    assert figure_3b.best_tree(args, bench.model).choices == [[0], [0, 0], [0, 1]]


# -- the command -------------------------------------------------------------------------------------------------------


def test_prompts_set_aside_are_spread_evenly() -> None:
    assert set_aside_of(10, 2) == ([0, 1, 3, 4, 5, 6, 8, 9], [2, 7])
    assert set_aside_of(3, 1) == ([0, 2], [1])
    with pytest.raises(ValueError, match=r"--tuning: expected below 4 .*, got 4"):
        set_aside_of(4, 4)


def set_aside_of(count: int, aside: int) -> tuple[list[int], list[int]]:
    return setup.set_aside(list(range(count)), aside)


def test_a_command_names_no_folder_of_this_machine() -> None:
    told = writing.command(
        "figure-4", ["--prompts", "/home/me/mt_bench.jsonl", "--model", "runs/heads", "--limit", "3"]
    )
    assert told == "python -m benchmarks.ablations figure-4 --prompts mt_bench.jsonl --model runs/heads --limit 3"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["figure-4", "--nodes", "1,4"], "expected sizes from 2 to 256 nodes, got 1,4"),
        (["figure-4", "--nodes", "300"], "expected sizes from 2 to 256 nodes, got 300"),
        (["figure-4", "--model", "heads"], "--prompts: expected files of prompts for a model of your own, got none"),
        (["figure-4", "--categories", "math"], "--categories: expected --prompts with it, got none"),
        (["figure-5", "--thresholds", "0,0.1"], "expected thresholds above 0 and below 1, got 0,0.1"),
        (["figure-5", "--thresholds", "1.0"], "expected thresholds above 0 and below 1, got 1.0"),
        (["figure-7", "--draft", "x", "--gamma", "0"], "expected at least 1, got 0"),
        (["table-3", "--dense", "20,20"], "expected at most 255 choices in all"),
        (["figure-3b"], "the following arguments are required: --prompts"),
        (["figure-4", "--out", "file"], "figure-4: [Errno"),
        (["redraw", "file"], "file: expected the record of one of figure-3b, "),
        (["redraw", "nothing"], "redraw: [Errno"),
    ],
)
def test_bad_arguments_are_refused(
    arguments: list[str],
    words: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text('{"ablation": "another"}')
    with pytest.raises(SystemExit) as stopped:
        command.main(arguments)
    assert stopped.value.code == 2
    assert words in capsys.readouterr().err


needs_demo = pytest.mark.skipif(
    not (CHECKPOINT / "measured.json").is_file(), reason="the embedded checkpoint is not there"
)


@needs_demo
@pytest.mark.slow
def test_one_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    small = ["--limit", "2", "--tuning", "1", "--max-new-tokens", "8"]
    arguments = ["figure-4", *small, "--nodes", "4", "--dense", "1", "--out", str(tmp_path)]
    assert command.main(arguments) == 0
    [path] = tmp_path.glob("*/figure-4.json")
    assert path.with_suffix(".svg").is_file()
    record = json.loads(path.read_text())
    assert record["prompts"] == 2
    assert record["model"] == setup.DEMO
    lengths = [ids.shape[1] for ids in demo_prompts(held_out=True, count=2, seed=11)]
    assert record["prompt_tokens"] == {
        "least": min(lengths), "median": statistics.median(lengths), "most": max(lengths)
    }  # fmt: skip
    assert record["prompts_from"] == setup.DEMO_PROMPTS
    assert record["shape"]["heads"] == 4
    assert record["versions"]["torch"]
    assert str(tmp_path) not in path.read_text()
    assert "optimised 4" in capsys.readouterr().out
    questions = tmp_path / "questions.jsonl"
    lines = [{"question_id": i, "category": "math", "turns": [f"How much is {i}?"]} for i in range(3)]
    lines[2]["turns"] = ["long " * 1100]
    questions.write_text("\n".join(map(json.dumps, lines)))
    asked = ["--prompts", str(questions), "--limit", "3", *small[2:]]
    path.with_suffix(".svg").unlink()
    assert command.main(["figure-4", *asked, *arguments[7:], "--no-picture"]) == 0
    assert not path.with_suffix(".svg").exists()
    assert command.main(["redraw", str(path)]) == 0
    assert path.with_suffix(".svg").is_file()
    record = json.loads(path.read_text())
    assert (record["prompts"], record["prompts_too_long"]) == (1, 1)
    assert record["prompts_from"] == ["questions.jsonl"]


@needs_demo
def test_the_demo_model_is_asked_held_out_requests() -> None:
    bench = setup.load(command.parser().parse_args(["figure-4", "--limit", "2", "--tuning", "1"]))
    with bench.model:
        assert bench.ends == {"eos_token_id": [bench.tokenizer.eos_token_id]}
        for asked, expected in ((bench.asked, draw(2, 11, held_out=True)), (bench.tuning, draw(1, 3))):
            texts = [bench.tokenizer.decode(one.ids[0]) for one in asked]
            assert texts == [f"<|user|>{request.text}<|end|><|assistant|>" for request in expected]


def test_a_draft_learns_the_tokens_of_answers_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: contextlib.nullcontext())
    base, small = tiny(), tiny(seed=5, num_hidden_layers=1)
    settings = draft.DraftSettings(steps=1, rows=8)
    texts = [(torch.tensor([1, 2, 3, 4, 5, 6, 7]), 3), (torch.tensor([8, 9, 1, 2]), 1)]
    tokens, total = 0, 0.0
    with torch.no_grad():
        for text, prompt in random.Random(settings.seed).choices(texts, k=8):
            wanted, said = (model(text[None]).logits[0, prompt - 1 : -1].log_softmax(-1) for model in (base, small))
            tokens += len(text) - prompt
            total += float((wanted.exp() * (wanted - said)).sum())
    found = draft._train(base, small, texts, settings)
    assert found == {"tokens": tokens, "last_kl": pytest.approx(total / tokens, abs=1e-4)}


@pytest.mark.slow
@needs_demo
def test_a_draft_learns(tmp_path: Path) -> None:
    settings = draft.DraftSettings(steps=4, requests=2, new_tokens=32, rows=4)
    said = draft.make(settings, tmp_path)
    assert 4 * 4 < said["tokens"] <= 4 * 4 * 32
    made = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    base = AutoModelForCausalLM.from_pretrained(draft.BASE, dtype=torch.float32)
    assert made.config.vocab_size == base.config.vocab_size
    assert said["parameters"] == sum(p.numel() for p in made.parameters()) < base.num_parameters() / 2
    # Its loss falls from that of an untrained one.
    rows = demo_prompts(held_out=False, count=1, seed=0)[0]
    fresh = draft.new_draft(base, settings)
    wanted = base(rows).logits.log_softmax(-1)

    def loss(model: Any) -> float:
        said = model(rows).logits.log_softmax(-1)
        return float((wanted.exp() * (wanted - said)).sum(-1).mean())

    with torch.no_grad():
        assert loss(made) < loss(fresh)
    assert json.loads((tmp_path / "draft.json").read_text())["command"].endswith("draft --steps 4")
    with pytest.raises(SystemExit):
        command.main(["draft", "--out", str(tmp_path)])
