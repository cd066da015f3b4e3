"""The paper's ablations: what each measures and writes, lossless methods compared with plain text, bad input."""

from __future__ import annotations

import contextlib
import json
import random
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.ablations import __main__ as command
from benchmarks.ablations import draft, figure_5, figure_7, measuring, setup, table_3, writing
from medusa_decoding.demo import CHECKPOINT
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


def as_drawn(name: str, bench: setup.Bench, figures: dict[str, Any], tmp_path: Path) -> dict[str, Any]:
    """Write a record, read it, plot it and describe it, as the command does."""
    pytest.importorskip("matplotlib")
    record = json.loads(json.dumps(writing.record(name, bench.described, figures, ["--limit", "3"])))
    command.draw(record, tmp_path / "picture.svg")
    assert (tmp_path / "picture.svg").read_text().rstrip().endswith("</svg>")
    assert command.module(name).as_text(record)
    return record


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


@pytest.mark.slow
def test_figure_7(bench: setup.Bench, tmp_path: Path) -> None:
    small = tiny(seed=5, num_hidden_layers=1)
    record = as_drawn("figure-7", bench, figure_7.measure(bench, small, [1, 3]), tmp_path)
    for row in (*record["drafting"], record["medusa"], record["transformers"]):
        assert row["same_text"] == 3
    for row in record["drafting"]:
        assert 1.0 <= row["tokens_per_step"]["value"] <= 1 + row["gamma"]
        milliseconds = record["step_milliseconds"]
        expected = row["tokens_per_step"]["value"] * milliseconds["plain"] / milliseconds["round"][str(row["gamma"])]
        assert row["estimate"] == pytest.approx(expected, rel=1e-2)


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
    for one in (*own.values(), *(trained[rung] for rung in rungs)):
        assert one["same_text"] == 3
    weighed = record["ladders"]["own heads"]["tuning"]
    best = max(weighed, key=lambda one: one["expected_tokens"] / one["milliseconds"])
    assert own[table_3.TUNED]["nodes"] == best["nodes"]


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
    assert str(tmp_path) not in path.read_text()
    assert "optimised 4" in capsys.readouterr().out


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
