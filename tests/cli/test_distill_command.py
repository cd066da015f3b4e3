"""The command `medusa distill`: what it generates and passes to training, how it is stopped, and what it refuses."""

import json
import os
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
import yaml

from medusa_decoding import MedusaModel
from medusa_decoding.cli import main
from medusa_decoding.training.distill import distill
from medusa_decoding.training.distill.record_file import asked_of
from medusa_decoding.training.loop import run as training_run
from medusa_decoding.training.loop.backbone import TrainingBackbone
from medusa_decoding.training.loop.log import read_log

QUESTIONS = [["how are you", "and then"], ["hello"], ["tell me more", "why"], ["a seat", "ten", "more"], ["no"]]


@pytest.fixture
def place(chat, tmp_path, write_lines):
    """A chat checkpoint, seeds, and a way to run the command with sections of its configuration changed."""
    turns = ([{"role": "user", "content": text} for text in texts] for texts in QUESTIONS)
    seeds = write_lines("seeds.jsonl", *({"messages": messages} for messages in turns))
    values = {
        "model": {"name": str(chat.folder / "base"), "dtype": "float32", "quantization": "none"},
        "data": {"train": [{"path": str(seeds)}], "length": 200, "held_out_share": 0.2},
        "generation": {"max_new_tokens": 9, "temperature": 0.0, "turns": 2, "batch_size": 2},
        "output": {"folder": str(tmp_path / "out"), "trackers": []},
    }

    def run(*argv, method="self-distillation", **changes):
        given = {name: values.get(name, {}) | changes.get(name, {}) for name in {*values, *changes}}
        (tmp_path / "config.yaml").write_text(yaml.safe_dump(given | {"method": method}))
        return main(["distill", "--config", str(tmp_path / "config.yaml"), *argv])

    return SimpleNamespace(run=run, seeds=seeds, file=tmp_path / "out" / "generated" / "records.jsonl", chat=chat)


@pytest.fixture
def trained(monkeypatch):
    """Replace training, and record its arguments."""
    asked = []

    def train(config, **options):
        asked.append((config, options))
        result = {"heads": "out/heads", "base_model": "../model", "steps": 7, "heads_step": 7, "seconds": 1.0}
        return SimpleNamespace(measured=None, **result)

    monkeypatch.setattr(training_run, "train", train)
    return asked


def lines(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


def check_answers(chat, file, questions=QUESTIONS, turns=2):
    found = {line["seed"]["number"]: line for line in lines(file)}
    assert sorted(found) == list(range(len(questions)))
    for number, texts in enumerate(questions):
        line = found[number]
        ids = line["input_ids"]
        assert ids[: line["learnt"][0][0]] == chat.ids([{"role": "user", "content": texts[0]}])
        assert len(line["learnt"]) == min(turns, len(texts))
        for start, end in line["learnt"]:
            assert ids[start:end] == chat.write(ids[:start], 9)
        said = [turn["content"] for turn in line["messages"] if turn["role"] == "user"]
        assert said == texts[:turns]


@pytest.mark.parametrize("heads", [{}, {"generation": "heads"}, {"initial": "heads"}])
def test_the_model_s_own_answers_are_written(capsys, place, heads):
    changes = {}
    if "generation" in heads:
        changes["generation"] = {"heads": place.chat.heads}
    if "initial" in heads:
        changes["heads"] = {"initial": place.chat.heads, "num_heads": 3}
    assert place.run("--only-data", "--json", **changes) == 0
    out = json.loads(capsys.readouterr().out)
    assert out["records"] == str(place.file)
    assert (out["generation"]["records"], out["generation"]["answers"]) == (5, 8)
    assert "training" not in out
    check_answers(place.chat, place.file)
    told = json.loads((place.file.parent / "records.jsonl.settings").read_text())
    assert (told["heads"] is None) == (not heads)
    assert out["generation"]["tokens_per_step"] >= 1.0


@pytest.mark.parametrize("content", [b"", b'{"prompt": "how are you"}\n', None], ids=["empty", "no answer", "no file"])
def test_held_out_data_that_training_cannot_read_is_refused_first(capsys, place, trained, tmp_path, content):
    file = tmp_path / "held-out.jsonl"
    if content is not None:
        file.write_bytes(content)
    assert place.run(data={"held_out": [{"path": str(file)}], "held_out_share": None}) == 2
    words = {b"": "there is no record", None: f"got {file} (there is no such file)"}
    assert words.get(content, "data.held_out: expected records with answers, got 1 prompts") in capsys.readouterr().err
    assert not place.file.exists()


def test_ctrl_c_keeps_the_records_and_resume_continues(capsys, place, trained, monkeypatch):
    following = distill.Answers.next

    def interrupted(answers):
        if place.file.exists() and len(lines(place.file)) == 2:
            raise KeyboardInterrupt
        return following(answers)

    monkeypatch.setattr(distill.Answers, "next", interrupted)
    assert place.run() == 130
    err = capsys.readouterr().err
    assert f"what was generated is in {place.file}; --resume continues from there" in err
    assert len(lines(place.file)) == 2
    before = place.file.read_bytes()
    monkeypatch.setattr(distill.Answers, "next", following)
    assert place.run() == 2
    assert "continue with them (--resume)" in capsys.readouterr().err
    assert place.file.read_bytes() == before
    assert trained == []
    assert place.run("--resume") == 0
    shown = [line for line in capsys.readouterr().err.splitlines() if "/5 seeds" in line]
    assert shown[0] == "2/5 seeds (40 %), 00:00 elapsed, ? left"  # earlier answers say nothing about the pace
    assert set(before.splitlines()) < set(place.file.read_bytes().splitlines())
    check_answers(place.chat, place.file)
    assert trained[0][1]["resume"] is True


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"method": "medusa-2"}, "method: expected self-distillation or medusa-1 .* got medusa-2"),
        ({"generation": {"temperature": -1}}, "generation.temperature: expected greater than or equal to 0, got -1"),
        ({"data": {"train": [{"path": "none.jsonl"}]}}, "expected a file, a folder or a hub name, got none.jsonl"),
        ({"data": {"length": 20}}, "data.train: the model can answer none of the records"),
    ],
)
def test_bad_input_is_one_line_and_code_2(capsys, place, trained, changes, words, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert place.run(**changes) == 2
    (first, *_) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("medusa: ")]
    assert re.search(words, first)
    assert trained == []
    assert not place.file.exists() or place.file.read_bytes() == b""


def test_a_quantised_copy_does_not_answer_unless_the_model_is_deployed_so(capsys, place, monkeypatch, trained):
    def loads(config):
        raise ValueError("loads now")

    monkeypatch.setattr("medusa_decoding.cli.distill.load", loads)
    quantised = {"quantization": "4bit"}
    assert place.run(method="medusa-1", model=quantised) == 2
    assert re.search(r"medusa: model.quantization: expected none .*, got 4bit\n", capsys.readouterr().err)
    for model, generation in ((quantised, {"quantized": True}), ({"quantization": "none"}, {})):
        assert place.run("--only-data", method="medusa-1", model=model, generation=generation) == 2
        said = capsys.readouterr().err
        assert "medusa: loads now" in said
        assert "quantised" not in said


def test_whose_answers_are_learnt_is_not_left_to_the_command(capsys, place, trained):
    from medusa_decoding.cli.distill import on_own_data
    from medusa_decoding.training import Config

    assert place.run(data={"answers": "given"}) == 2
    said = capsys.readouterr().err
    assert re.search(r"medusa: data.answers: expected own or null with `medusa distill` .*, got given", said)
    assert not place.file.exists()
    needed = {"model": {"name": "m"}, "output": {"folder": "o"}}
    own = Config.of({**needed, "data": {"train": [{"path": "seeds.jsonl"}], "answers": "own"}})
    assert on_own_data(own, place.file).data.answers is None


LAUNCHED = """
import json, os, shutil, sys
from torch import distributed
from medusa_decoding.cli import main
from medusa_decoding.training.distill.record_file import RecordFile

rank, folder, config = int(os.environ["RANK"]), sys.argv[1], ["distill", "--config", sys.argv[2], "--only-data"]
codes, append = [main([*config, "--set", f"output.folder={folder}/of-{rank}"])], RecordFile.append

def stopped(file, records):
    found = append(file, records)
    if found:
        raise KeyboardInterrupt
    return found

RecordFile.append = stopped
config += ["--set", f"output.folder={folder}/two"]
codes.append(main(config))
RecordFile.append = append
distributed.barrier()
if rank == 0:
    with open(f"{folder}/two/generated/records.jsonl.part-1", "a") as file:
        file.write('{"cut": ')  # as a kill leaves it
    shutil.copytree(f"{folder}/two", f"{folder}/one")
distributed.barrier()
codes.append(main([*config, "--json", "--resume"]))
with open(f"{folder}/codes-{rank}", "w") as file:
    json.dump(codes, file)
"""


def test_two_processes_write_the_file_of_one_and_any_number_continues_it(capfd, place, tmp_path):
    pytest.importorskip("accelerate", reason="the extra 'train' is not installed")
    drawn = {"generation": {"max_new_tokens": 9, "temperature": 0.9, "batch_size": 2}}
    assert place.run("--only-data", "--json", **drawn) == 0
    expected, figures = place.file.read_bytes(), json.loads(capfd.readouterr().out)["generation"]
    (tmp_path / "launched.py").write_text(LAUNCHED)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [str(tmp_path / "launched.py"), str(tmp_path), str(tmp_path / "config.yaml")]
    subprocess.run(command, check=True, timeout=300, env=os.environ | {"OMP_NUM_THREADS": "1"})
    out, err = capfd.readouterr()
    for rank in range(2):  # a folder of each process; Ctrl-C after the first record; continued
        assert json.loads((tmp_path / f"codes-{rank}").read_text()) == [2, 130, 0]
    assert "on a disk that all 2 processes share" in err
    two, one = (tmp_path / name / "generated" / "records.jsonl" for name in ("two", "one"))
    assert two.read_bytes() == expected
    found = json.loads(out)["generation"]
    names = ("seeds", "records", "answers", "tokens", "cut", "ended")
    assert [found[name] for name in names] == [figures[name] for name in names]
    assert 0 < found["before"] < found["records"]
    assert place.run("--only-data", "--json", "--resume", output={"folder": str(tmp_path / "one")}, **drawn) == 0
    assert one.read_bytes() == expected
    assert json.loads(capfd.readouterr().out)["generation"]["before"] == 2
    assert sorted(path.name for path in one.parent.iterdir()) == sorted(path.name for path in two.parent.iterdir())
    assert len(list(one.parent.iterdir())) == 3


@pytest.mark.parametrize("method", ["self-distillation", "medusa-1"])
def test_distillation_and_training_write_heads(capsys, place, method):
    pytest.importorskip("accelerate", reason="the extra 'train' is not installed")
    pytest.importorskip("peft", reason="the extra 'train' is not installed")
    rates = {"optimizer": "adamw", "batch_size": 2, "warmup_steps": 1, "max_steps": 4, "epochs": 9.0}
    sections = {"heads": {"num_heads": 2}, "optimisation": rates}
    assert place.run("--json", method=method, **sections) == 0
    out = json.loads(capsys.readouterr().out)
    assert out["training"]["steps"] == 4
    card = (place.file.parents[1] / "heads" / "README.md").read_text()
    words = r"records.jsonl contains answers of base itself to the prompts of .*seeds.jsonl \(do\\_sample False, .*s 9,"
    assert re.search(words, card)
    records = next(place.file.parents[1].rglob("records.jsonl"))
    assert asked_of(records)["decoding"]["do_sample"] is False
    with MedusaModel.from_pretrained(out["training"]["heads"]) as model:
        assert model.heads.num_heads == 2
        trained = [weight for weight in model.backbone.causal_lm.parameters() if weight.ndim == 2]
        given = [weight for weight in place.chat.model.parameters() if weight.ndim == 2]
        changed = any(bool((one != other).any()) for one, other in zip(trained, given, strict=True))
        assert changed == (method == "self-distillation")


def test_training_reads_the_states_of_the_answers_instead_of_running_the_model(place, tmp_path, monkeypatch):
    ran, hidden = [], TrainingBackbone.hidden
    monkeypatch.setattr(TrainingBackbone, "hidden", lambda self, batch: ran.append(1) or hidden(self, batch))
    rates = {"optimizer": "adamw", "batch_size": 2, "epochs": 3, "learning_rate": 2e-3, "warmup_steps": 1}
    data = {"cache_hidden": str(tmp_path / "states"), "held_out_share": 0.0, "length": 200}
    output = {"folder": str(tmp_path / "out"), "trackers": [], "log_steps": 1}
    sections = {"optimisation": rates, "heads": {"num_heads": 2}, "output": output}
    assert place.run("--json", method="medusa-1", data=data, **sections) == 0
    assert not ran
    values = yaml.safe_load((tmp_path / "config.yaml").read_text())
    # Rows with answers of two files, as with greedy and sampled ones.
    drawn = sections | {
        "generation": {"temperature": 0.8, "seed": 1},
        "output": output | {"folder": str(tmp_path / "drawn")},
    }
    assert place.run("--json", "--only-data", method="medusa-1", data=data, **drawn) == 0
    copies = [place.file, tmp_path / "drawn" / "generated" / "records.jsonl"]
    both = values["data"] | {"train": [{"path": str(copy)} for copy in copies], "cache_hidden": str(tmp_path / "both")}
    folder = {"folder": str(tmp_path / "both-out")}
    (tmp_path / "both.yaml").write_text(yaml.safe_dump(values | {"data": both, "output": output | folder}))
    assert main(["train", "--config", str(tmp_path / "both.yaml"), "--json"]) == 0
    assert not ran
    values["data"] |= {"train": [{"path": str(place.file)}], "cache_hidden": None}
    values["output"]["folder"] = str(tmp_path / "without")
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(values))
    assert main(["train", "--config", str(tmp_path / "config.yaml"), "--json"]) == 0
    assert ran
    found, expected = ([line["loss"] for line in read_log(tmp_path / name)] for name in ("out", "without"))
    assert len(found) > 2
    assert found == pytest.approx(expected, rel=1e-4)
