"""examples/ray_data.py: a killed run continues, with every id once and the texts and tokens of one machine."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from medusa_decoding.cli import main
from medusa_decoding.demo import CHECKPOINT
from medusa_decoding.training.config import SourceConfig
from medusa_decoding.training.data.records import Report, read_records

pytest.importorskip("ray.data")
pytestmark = pytest.mark.slow
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
COUNT = 40  # so many blocks that the run goes on for seconds after the first one
SAMPLED = ["--chat", "--dtype", "float32", "--temperature", "0.8", "--seed", "3", "--max-new-tokens", "48"]


@pytest.fixture
def example(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    # For Ray's workers, which this process starts.
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(EXAMPLES), os.environ.get("PYTHONPATH", "")]))
    import ray_data

    return ray_data


@pytest.fixture
def prompts(tmp_path):
    file = tmp_path / "prompts.jsonl"
    with (CHECKPOINT / "answers.jsonl").open() as answers:
        asked = [json.loads(line)["request"] for line, _ in zip(answers, range(COUNT), strict=False)]
    file.write_text("".join(json.dumps({"id": f"q{n}", "prompt": text}) + "\n" for n, text in enumerate(asked)))
    return file


def lines(*files):
    found = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    return sorted(found, key=lambda line: line["index"] if "index" in line else line["seed"]["number"])


def test_a_killed_driver_leaves_every_id_once_with_the_answers_of_one_machine(example, prompts, tmp_path):
    asked, out = ["generate", "--prompts", str(prompts), *SAMPLED], tmp_path / "out"
    argv = ["--rows", "1", "--out", str(out), *asked]
    driver = subprocess.Popen([sys.executable, str(EXAMPLES / "ray_data.py"), *argv], env=os.environ)
    while driver.poll() is None and not list(out.glob("checkpoint/*[0-9].parquet")):
        time.sleep(0.01)
    driver.kill()
    assert driver.wait() == -9
    committed = [out / "records" / f"{file.stem}.jsonl" for file in out.glob("checkpoint/*[0-9].parquet")]
    before = {file: file.read_bytes() for file in committed}
    assert 0 < len(before) < COUNT

    own = SimpleNamespace(address="local", actors=None, cpus=None, rows=20, id="id", out=out, command=asked)
    assert f"{COUNT} ids in" in example.run(own)
    after = list(out.glob("records/*.jsonl"))
    assert {file: file.read_bytes() for file in committed} == before
    assert main([*asked, "--out", str(tmp_path / "alone.jsonl")]) == 0
    alone = [{"id": f"q{line['index']}", **line} for line in lines(tmp_path / "alone.jsonl")]
    assert [line | {"steps": 0} for line in lines(*after)] == [line | {"steps": 0} for line in alone]

    with pytest.raises(ValueError, match=r"run\.json is of other records or settings"):
        example.run(SimpleNamespace(**vars(own) | {"command": [*asked, "--stop", "x"]}))


def test_records_of_distillation_are_those_of_the_command(example, tmp_path):
    seeds = [["Write a class A with x: int.", "Write a class B with y: str."], ["Write a function f(x)."], ["x" * 4000]]
    turns = [[{"role": "user", "content": text} for text in texts] for texts in seeds]
    rows = "".join(json.dumps({"key": n, "messages": messages}) + "\n" for n, messages in enumerate(turns))
    (tmp_path / "seeds.jsonl").write_text(rows)
    values = {
        "model": {"name": str(CHECKPOINT / "base"), "dtype": "float32", "quantization": "none"},
        "data": {"train": [{"path": str(tmp_path / "seeds.jsonl")}], "length": 200, "max_bad_share": 0.5},
        "generation": {"max_new_tokens": 20, "temperature": 0.8, "heads": str(CHECKPOINT / "heads")},
        "output": {"folder": str(tmp_path / "out")},
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(values))
    asked = ["distill", "--config", str(tmp_path / "config.yaml")]
    assert main([*asked, "--only-data"]) == 0

    own = SimpleNamespace(
        address="local", actors=None, cpus=None, rows=2, id="key", out=tmp_path / "ray", command=asked
    )
    assert example.run(own).startswith("3 ids in")
    folder = tmp_path / "ray/records"
    *records, bad = lines(*folder.glob("*.jsonl"))
    alone = lines(tmp_path / "out/generated/records.jsonl")
    assert records == [{"id": line["seed"]["number"], **line} for line in alone]
    assert (bad["id"], bad["error"]) == (2, "its prompt leaves no room within 200 tokens")
    read = list(read_records([SourceConfig(str(folder))], Report()))
    assert [record.tokens.ids.tolist() for record in read] == [line["input_ids"] for line in alone]
    values["data"]["train"] = [{"path": str(folder)}]
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(values))
    assert main(["train", "--config", str(tmp_path / "config.yaml"), "--check"]) == 0


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        ([1, 2, "1"], "prompts.jsonl:3: expected an id of its own, got '1' like .*:1"),
        ([1, None], ":2: .* 'id' .* None"),
    ],
)
def test_ids_that_are_missing_or_not_unique_are_refused(example, prompts, ids, words):
    prompts.write_text("".join(json.dumps({"id": one, "prompt": "a"}) + "\n" for one in ids))
    args = example.argument_parser().parse_args(["generate", "--prompts", str(prompts)])
    with pytest.raises(ValueError, match=words):
        example.read(args, "id")


@pytest.mark.parametrize(("cpus", "actors", "asked"), [(1, None, None), (4, 2, 1.5), (8, 3, None)])
def test_a_cluster_on_which_ray_would_wait_forever_is_refused(example, monkeypatch, cpus, actors, asked):
    monkeypatch.setattr(example.ray, "cluster_resources", lambda: {"CPU": cpus, **({"GPU": 2} if cpus == 8 else {})})
    with pytest.raises(ValueError, match=f"it waits forever.* got {cpus} CPUs"):
        example.share(actors, asked)
