"""The model card: valid front matter and tables, numbers computed by hand, and the files written."""

import re
from collections import Counter

import pytest
import torch
import yaml

from medusa_decoding.training.config import Config
from medusa_decoding.training.data.records import Report
from medusa_decoding.training.loop.accuracy import HeadAccuracy
from medusa_decoding.training.loop.card import CardFacts, card_text, write_card

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
        "reports": (report, None),
        "records": (90, 3),
        "tokens": 1234567,
        "accuracy": ACCURACY,
        "losses": [(step, 10 / step) for step in range(1, 42)],
        "steps": 41,
        "seconds": 7325.0,
        "best_step": None,
        "made_with": {"torch": "2.13.0", "on": "2 x a|b"},
        "generated": {},
        "trained_model": None,
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


def test_local_paths_are_not_written_as_hub_names(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "chats.jsonl").write_text("")
    local = config(model={"name": str(tmp_path / "model")}, data={"train": [{"path": str(tmp_path / "chats.jsonl")}]})
    front_matter = re.match(r"---\n(.*?)\n---\n\n# ", card_text(facts(config=local)), re.DOTALL)[1]
    assert set(yaml.safe_load(front_matter)) == {"library_name", "tags"}


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
    assert list(rows) == ["4"]  # the heads fill 7 nodes
    nothing = card_text(facts(accuracy=None))
    assert "no held-out data" in nothing
    assert "top-1" not in nothing


def test_data_sources_and_bad_records_are_listed():
    text = card_text(facts())
    assert table(text, ["", "source"])[1:] == [
        ["training", "anon8231489123/ShareGPT", "auto", "train", "newest"],
        ["training", "more|data.jsonl", "text", "", ""],
    ]
    assert "90 records to train on, 3 held out. 2 % of prompts are held out" in text
    assert "1,234,567 tokens of training data." in text
    assert "100 records read, 7 of them left out." in text
    reasons = [["reason", "records"], ["not JSON (x)", "4"], ["turn 2 has an unknown from: 'a|b'", "3"]]
    assert table(text, ["reason"]) == reasons
    assert table(text, ["noted"]) == [["noted", "times"], ["cut", "2"]]
    own = config(data={"held_out": [{"path": "held.jsonl"}]})
    text = card_text(facts(config=own, reports=(Report(5), Report(5))))
    assert ["held out", "held.jsonl", "auto", "", ""] in table(text, ["", "source"])


def test_self_generated_data_names_its_prompts():
    how = {"temperature": None, "top_k": 0, "max_new_tokens": 64, "turns": 2, "seed": 7}
    seeds = {"train": [{"path": "seeds_1.jsonl"}, {"path": "more.jsonl"}]}
    settings = {"generation": how, "data": seeds, "model": {"name": "/there/base"}}
    settings["decoding"] = {"do_sample": True, "temperature": 0.6}
    text = card_text(facts(generated={"out/records.jsonl": settings}))
    assert (
        "out/records.jsonl contains answers of base itself to the prompts of seeds\\_1.jsonl, more.jsonl "
        "(do\\_sample True, temperature 0.6, top\\_k 0, max\\_new\\_tokens 64, turns 2, seed 7)."
    ) in text


def test_training_and_settings():
    text = card_text(facts(trained_model="../model", best_step=20))
    assert "41 steps in 2 h 2 min, with torch 2.13.0, on 2 x a\\|b." in text
    assert f"Training loss 10 at step 1, {10 / 41:.4g} at step 41." in text
    assert "`../model`" in text
    assert "The heads are those of step 20: of all that were measured" in text
    listed = re.search(r"<details>.*?```yaml\n(.*?)```\n\n</details>", text, re.DOTALL)[1]
    assert Config.of(yaml.safe_load(listed)) == facts().config


def test_files_are_replaced_and_reproducible(tmp_path):
    pytest.importorskip("matplotlib", reason="the extra 'bench' is not installed")
    (tmp_path / "README.md").write_text("old")
    write_card(tmp_path, facts())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["README.md", "accuracy.png"]
    first = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert first["README.md"].decode() == card_text(facts())
    assert "](accuracy.png)" in card_text(facts())
    assert first["accuracy.png"].startswith(b"\x89PNG\r\n\x1a\n")
    write_card(tmp_path, facts())
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == first
    write_card(tmp_path, facts(losses=[], accuracy=None))
    assert (tmp_path / "accuracy.png").read_bytes() != first["accuracy.png"]
