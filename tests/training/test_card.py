"""The model card: valid front matter and tables, numbers computed by hand, and the files written."""

import re
import sys
from collections import Counter

import pytest
import torch
import yaml

from medusa_decoding.training.config import Config
from medusa_decoding.training.data.records import Report
from medusa_decoding.training.loop.accuracy import HeadAccuracy
from medusa_decoding.training.loop.card import CardFacts, card_text, check_plotting, write_card

# Two heads, two ranks: alone, the first is right in 1/2 and 1/4 of 8 cases, the second in 1/4 and 1/4.
ACCURACY = HeadAccuracy(torch.tensor([[4, 6], [2, 4]]), torch.tensor([8, 8]))


def config(**sections):
    values = {
        "model": {"name": "lmsys/vicuna-7b-v1.5"},
        "data": {"train": [{"path": "anon8231489123/ShareGPT"}, {"path": "more|data.jsonl", "format": "text"}]},
        "output": {"folder": "out"},
    }
    for name, section in sections.items():
        values[name] = {**values.get(name, {}), **section} if isinstance(section, dict) else section
    return Config.of(values)


def facts(**changes):
    report = Report(100, Counter({"turn 2 has an unknown from: 'a|b'": 3, "not JSON (x)": 4}), [], Counter({"cut": 2}))
    settings = {
        "config": config(optimisation={"learning_rate": 1e-3}, heads={"num_heads": 2}),
        "report": report,
        "train_records": 90,
        "held_out_records": 3,
        "accuracy": ACCURACY,
        "losses": [(step, 10 / step) for step in range(1, 42)],
        "steps": 41,
        "seconds": 3725.0,
        "versions": {"torch": "2.13.0", "transformers": "5.23.0"},
    }
    return CardFacts(**(settings | changes))


def tables(text):
    """Every table as a list of rows of cells, escapes undone; rows must be as wide as their header."""
    found, rows = [], []
    for line in [*text.splitlines(), ""]:
        if line.startswith("| "):
            cells = re.split(r"(?<!\\)\|", line)[1:-1]
            rows.append([re.sub(r"\\(.)", r"\1", cell.strip()) for cell in cells])
        elif rows:
            assert set(rows[1]) == {"---"}
            assert {len(row) for row in rows} == {len(rows[0])}
            found.append([rows[0], *rows[2:]])
            rows = []
    return found


def table(text, first):
    """The table whose header begins with these cells."""
    [found] = [rows for rows in tables(text) if rows[0][: len(first)] == first]
    return found


def front_matter(text):
    return yaml.safe_load(re.match(r"---\n(.*?)\n---\n\n# ", text, re.DOTALL)[1])


def test_local_paths_are_not_written_as_hub_names(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "chats.jsonl").write_text("")
    local = config(model={"name": str(tmp_path / "model")}, data={"train": [{"path": str(tmp_path / "chats.jsonl")}]})
    assert set(front_matter(card_text(facts(config=local)))) == {"library_name", "tags"}


def test_accuracies_and_expected_tokens_by_hand():
    text = card_text(facts())
    assert table(text, ["", "top-1"]) == [
        ["", "top-1", "top-2", "tokens"],
        ["head 1", "50.0", "75.0", "8"],
        ["head 2", "25.0", "50.0", "8"],
    ]
    # The paths by their products: [0] 1/2, [1] 1/4, [0 0] 1/8, [0 1] 1/8, [1 0] 1/16, [1 1] 1/16.
    rows = dict(table(text, ["nodes"])[1:])
    assert rows["4"] == f"{1 + 1 / 2 + 1 / 4 + 1 / 8:.2f}"
    whole = f"{1 + 1 / 2 + 1 / 4 + 2 / 8 + 2 / 16:.2f}"
    assert [rows[f"{size} (the heads fill 7)"] for size in (8, 16, 32, 64)] == [whole] * 4
    nothing = card_text(facts(accuracy=HeadAccuracy.empty(2)))
    assert "no held-out data" in nothing
    assert "top-1" not in nothing


def test_data_sources_and_bad_records_are_listed():
    text = card_text(facts())
    assert table(text, ["", "source"])[1:] == [
        ["training", "anon8231489123/ShareGPT", "auto", "train", "newest"],
        ["training", "more|data.jsonl", "text", "", ""],
    ]
    assert "90 records to train on, 3 held out. 2 % of prompts are held out" in text
    assert "100 records read, 7 of them left out, because of:" in text
    reasons = [["reason", "records"], ["not JSON (x)", "4"], ["turn 2 has an unknown from: 'a|b'", "3"]]
    assert table(text, ["reason"]) == reasons
    assert table(text, ["noted"]) == [["noted", "times"], ["cut", "2"]]
    own = config(data={"held_out": [{"path": "held.jsonl"}]})
    text = card_text(facts(config=own, held_out_report=Report(5), tokens=1234567))
    assert ["held out", "held.jsonl", "auto", "", ""] in table(text, ["", "source"])


@pytest.mark.parametrize(
    ("sampling", "decoding", "drawn"),
    [
        # Records without top_k or the generation config are older.
        ({"temperature": 0.3, "top_p": 1.0}, None, "drawn at temperature 0.3,"),
        ({"temperature": None}, {"temperature": 0.6}, "greedy (its generation config),"),
        (
            {"temperature": None, "top_k": 0},
            {"do_sample": True, "top_k": 0, "min_p": 0.05},
            "drawn at temperature 1, min-p 0.05 (its generation config),",
        ),
    ],
)
def test_self_generated_data_names_its_prompts(sampling, decoding, drawn):
    how = {**sampling, "max_new_tokens": 64, "turns": 2, "seed": 7}
    seeds = {"train": [{"path": "seeds_1.jsonl"}, {"path": "more.jsonl"}]}
    settings = {"generation": how, "data": seeds, "model": {"name": "/there/base"}}
    settings |= {} if decoding is None else {"decoding": decoding}
    text = card_text(facts(generated={"out/records.jsonl": settings}))
    assert (
        f"out/records.jsonl contains answers of base itself to the prompts of seeds\\_1.jsonl, more.jsonl: {drawn} "
        "at most 64 tokens per answer, at most 2 turns, seed 7."
    ) in text


def test_settings_that_differ_from_the_paper_and_all_settings_are_listed():
    text = card_text(facts())
    rows = {row[0]: row[1:3] for row in table(text, ["setting"])[1:]}
    assert rows == {"optimisation.learning_rate": ["0.001", "0.0005"], "heads.num_heads": ["2", "5"]}
    listed = re.search(r"<details>.*?```yaml\n(.*?)```\n\n</details>", text, re.DOTALL)[1]
    assert Config.of(yaml.safe_load(listed)) == facts().config
    # A value that only the method changes counts as its default.
    text = card_text(facts(config=config(method="medusa-2", lora={"rank": 8})))
    assert {row[0]: row[1:3] for row in table(text, ["setting"])[1:]} == {"lora.rank": ["8", "32"]}
    assert "The defaults of medusa-1." in card_text(facts(config=config()))


def test_training_and_origin():
    text = card_text(facts(trained_model="../model", machine="a|b"))
    assert "41 steps in 1 h 2 min." in text
    assert f"Training loss 10 at step 1, {10 / 41:.4g} at step 41, lowest {10 / 41:.4g} at step 41." in text
    points = table(text, ["step", "training loss"])[1:]
    assert [row[0] for row in points] == ["1", "6", "11", "16", "21", "26", "31", "36", "41"]
    assert points[1][1] == f"{10 / 6:.4g}"
    made = [["torch", "2.13.0"], ["transformers", "5.23.0"], ["machine", "a|b"]]
    assert table(text, ["", "version"])[1:] == made
    assert "`../model`" in text
    assert "The heads are those of step 20: of all that were measured" in card_text(facts(best_step=20))
    few = card_text(facts(losses=[(1, 2.0), (2, float("nan")), (3, 1.0)]))
    assert table(few, ["step", "training loss"])[1:] == [["1", "2"], ["2", "nan"], ["3", "1"]]


def test_files_are_replaced_and_reproducible(tmp_path):
    pytest.importorskip("matplotlib", reason="the extra 'bench' is not installed")
    (tmp_path / "README.md").write_text("old")
    assert write_card(tmp_path, facts()) == tmp_path / "README.md"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["README.md", "accuracy.png"]
    first = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert first["README.md"].decode() == card_text(facts())
    assert "](accuracy.png)" in card_text(facts())
    assert first["accuracy.png"].startswith(b"\x89PNG\r\n\x1a\n")
    write_card(tmp_path, facts())
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == first
    write_card(tmp_path, facts(losses=[], accuracy=HeadAccuracy.empty(2)))
    assert (tmp_path / "accuracy.png").read_bytes() != first["accuracy.png"]


def test_without_matplotlib_no_card_is_written(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for call in (check_plotting, lambda: write_card(tmp_path, facts())):
        with pytest.raises(ModuleNotFoundError, match=r"matplotlib: expected the library"):
            call()
    assert list(tmp_path.iterdir()) == []
