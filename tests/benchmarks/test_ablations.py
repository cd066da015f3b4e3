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
from benchmarks.ablations import context, draft, figure_5, figure_7, measuring, selector, setup, table_3, writing
from medusa_decoding.demo import CHECKPOINT
from medusa_decoding.heads import MedusaHeads
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


@pytest.fixture
def texts(tmp_path: Path) -> tuple[MedusaModel, Path]:
    """A model whose heads have a parents' term, and a file of records."""
    torch.manual_seed(0)
    base = tiny()
    heads = MedusaHeads(32, 11, 2, shared_projection=True, parent_rank=4, root_rank=4)
    for weight in heads.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    file = tmp_path / "greedy" / "generated" / "records.jsonl"
    file.parent.mkdir(parents=True)
    records = [{"input_ids": row.tolist(), "learnt": [[5, len(row)]]} for row in prompts(6, [30, 41, 27])]
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return MedusaModel(base, heads.eval()), file


def test_texts_are_read_and_ranked_as_steps_do(texts: tuple[MedusaModel, Path]) -> None:
    model, file = texts
    found, trunk = selector.read([file], model, [1]), selector.Trunk(model)
    assert model.heads is not None
    ranks = selector.ranked(trunk, {"own": selector.Term(trunk.heads, selector.Way(None))}, found, found.prompts)
    for record, answer, [path] in zip(file.read_text().splitlines(), found.prompts, ranks["own"].texts, strict=True):
        ids = json.loads(record)["input_ids"]
        made = model.backbone.causal_lm.model(torch.tensor([ids]), output_hidden_states=True)
        rows = slice(answer.start - 4, answer.stop + 1)
        assert torch.allclose(found.states[rows], made.last_hidden_state[0], atol=1e-5)
        assert torch.allclose(
            found.features[rows, :32], torch.nn.functional.rms_norm(made.hidden_states[1][0], [32]), atol=1e-4
        )
        assert found.later[answer].tolist() == [[*ids[5 + i : 8 + i], -1, -1][:3] for i in range(len(answer))]
        for i, of_heads in enumerate(path):
            root, later = ids[5 + i], [*ids[6 + i : 8 + i], -1][:2]
            children = model.heads.propose_children(
                made.last_hidden_state[:, 4 + i], torch.tensor([root]), 10, model.backbone.lm_head,
                root_embedding=model.backbone.embed_tokens(torch.tensor([root])),
            )  # fmt: skip
            for head, (before, token) in enumerate(zip([root, *later], later, strict=False)):
                parent = 0 if head == 0 else children.tokens[0, 0].tolist().index(before)
                order = children.tokens[0, head][children.order[0, head, parent]].tolist()
                assert of_heads[head] == (order.index(token) if token in order else -1)


def test_gradients_are_of_the_divergence_from_later_states(texts: tuple[MedusaModel, Path]) -> None:
    model, file = texts
    found, trunk = selector.read([file], model), selector.Trunk(model)
    rows = torch.cat([selector.stretches(one) for one in found.prompts]).flatten()
    _, targets = trunk.tokens(found, rows)
    logits, weights = torch.randn(*targets.shape, 11, requires_grad=True), torch.rand(targets.shape) * (targets != -1)
    later = (rows + torch.tensor([[1], [2]])).clamp(max=len(found.states) - 1)
    taught = model.backbone.lm_head(found.states[later]).softmax(-1)
    kl = torch.nn.functional.kl_div(logits.log_softmax(-1), taught, reduction="none").sum(-1)
    [expected] = torch.autograd.grad((kl * weights).sum(), logits)
    assert torch.allclose(selector.gradient(logits, trunk.taught(found, rows), weights), expected, atol=1e-6)


def test_attention_sees_the_last_positions_of_its_own_text(
    texts: tuple[MedusaModel, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, file = texts
    monkeypatch.setattr(context, "WINDOW", 9)
    found = selector.read([file], model, [0, 1])  # and the last one
    reader = context.Reader(selector.Trunk(model), "attention")
    layer, answer = reader.addition, found.prompts[1]
    assert isinstance(layer, context.Attention)
    torch.nn.init.normal_(layer.out.weight)
    rows = selector.stretches(answer)
    added = reader.inputs(found, rows.flatten()) - found.states[rows.flatten()]
    for row, one in zip(rows.flatten().tolist(), added, strict=True):
        if row == answer.stop - 1:
            break
        seen = found.features[max(answer.start - 4, row - 8) : row + 1]
        key, value = (half.unflatten(-1, (4, 8)) for half in layer.keys(seen).chunk(2, -1))
        scores = torch.einsum("hd,thd->ht", layer.query(seen[-1]).view(4, 8), key) / 8**0.5
        shares = (scores + layer.bias[:, : len(seen)].flip(1)).softmax(-1)
        assert torch.allclose(one, layer.out(torch.einsum("ht,thd->hd", shares, value).flatten()), atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["selector", "context"])
def test_ways_start_equal_and_learn(
    name: str, texts: tuple[MedusaModel, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model, file = texts
    one: Any = command.module(name)
    monkeypatch.setattr(selector.harness, "write_record", lambda name, record: records.append((name, record)))
    monkeypatch.setattr(selector, "load", lambda _: model)
    monkeypatch.setattr(selector, "timed", lambda ways, inputs: {way: {} for way in ways if ways[way](inputs[0])})
    monkeypatch.setattr(context, "timed", selector.timed)
    given = ["--records", str(file), "--judged", str(file), "--held-out", "3", "--positions", "64", "--seeds", "0"]
    records: list[Any] = []
    with pytest.raises(SystemExit, match="2"):
        command.main([name, *given, "--positions", "100"])
    assert "--positions: expected a multiple of 32, got 100" in capsys.readouterr().err
    for steps, rate in (("1", "1e-30"), ("9", "0.05")):
        assert command.main([name, *given, "--steps", steps, "--rate", rate]) == 0
    (first, record), (_, learnt) = records
    ways = record["ways"]["greedy"]
    assert (first, list(ways), list(record["cost"])) == (name, list(one.WAYS), list(one.WAYS))
    assert all(ways[way] == ways[selector.CONTROL] for way in one.WAYS)
    by_seed = {way: found["by_seed"] for way, found in learnt["ways"]["greedy"].items()}
    assert by_seed["as it is"] == ways["as it is"]["by_seed"] != by_seed[selector.CONTROL]
