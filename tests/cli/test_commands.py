"""The command line: what it prints, and how it refuses."""

import io
import json
import re

import pytest
import torch

import medusa_kernels
from medusa_decoding import cli
from medusa_decoding.backbone import fused_layers
from medusa_decoding.cli import demo, main
from medusa_decoding.demo import CHECKPOINT
from medusa_kernels import OPS


def run_json(capsys, *argv):
    assert main([*argv, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("source", "tree"),
    [("prompt", "root"), ("file", "cartesian:3,2"), ("stdin", "dynamic:6,3"), ("prompt", "dynamic:4,2,2+lookup:3")],
)
def test_generate_writes_the_models_own_text(capsys, checkpoint, model_text, tmp_path, monkeypatch, source, tree):
    prompt = "def f(x):\n"
    (tmp_path / "prompt.txt").write_text(prompt)
    monkeypatch.setattr("sys.stdin", io.StringIO(prompt))
    where = {"prompt": ["--prompt", prompt], "file": ["--file", str(tmp_path / "prompt.txt")], "stdin": []}[source]
    heads = str(checkpoint / "heads")
    out = run_json(capsys, "generate", "--model", heads, *where, "--tree", tree, "--max-new-tokens", "20")
    assert out["text"] == model_text(prompt, 20)
    assert out["new_tokens"] == 20
    if tree == "root":
        assert out["steps"] == 19


def test_generate_streams_the_same_text(capsys, checkpoint, model_text):
    argv = ["generate", "--model", str(checkpoint / "heads"), "--prompt", "abc", "--max-new-tokens", "12"]
    assert main(argv) == 0
    captured = capsys.readouterr()
    assert captured.out.strip("\n") == model_text("abc", 12).strip("\n")
    assert "12 tokens" in captured.err


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["generate", "--model", "HEADS", "--prompt", ""], "prompt: give some text"),
        (["generate", "--model", "HEADS", "--file", "missing.txt"], "missing.txt"),
        (["generate", "--model", "HEADS", "--prompt", "a" * 128], "fewer than 128 tokens .*got 128"),
        (["generate", "--model", "HEADS", "--prompt", "a", "--tree", "chain:4"], "depth 4, expected at most 3"),
        (["generate", "--model", "EMPTY", "--prompt", "a"], "expected a checkpoint of Medusa heads"),
        (["tree", "show", "HEADS", "--device", "gpu"], "--device: expected cpu, cuda or a number .*, got gpu"),
        (["generate", "--prompts", "EMPTY", "--out", "OUT"], "--out: expected a file outside the folder of"),
        (["demo", "--base-model", "EMPTY"], "--base-model needs --model"),
    ],
)
def test_bad_input_is_one_line_and_code_2(refused, checkpoint, tmp_path, argv, words):
    places = {"HEADS": checkpoint / "heads", "EMPTY": tmp_path, "OUT": tmp_path / "a.jsonl"}
    refused(words, *(places.get(arg, arg) for arg in argv))


def test_an_out_of_memory_error_of_a_gpu_is_one_line(refused, monkeypatch):
    def run(args):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr("medusa_decoding.cli.doctor.run", run)
    refused("CUDA out of memory", "doctor")


def test_piped_text_may_have_a_byte_order_mark_and_any_line_ends(monkeypatch):
    piped = io.TextIOWrapper(io.BytesIO(b"\xef\xbb\xbfa\r\nb\xc3\xa4\n"), encoding="ascii", newline="\n")
    monkeypatch.setattr("sys.stdin", piped)
    cli._prepare_streams()
    assert piped.read() == "a\nb\u00e4\n"


def test_demo_compares_three_ways(capsys, checkpoint, monkeypatch):
    monkeypatch.setattr(demo, "CHECKPOINT", checkpoint)
    out = run_json(capsys, "demo", "--max-new-tokens", "12", "--rounds", "1", "--tree", "chain:2")
    assert out["identical"] is True
    assert set(out["tokens_per_second"]) == {"transformers", "plain", "medusa"}
    steps = sum(out["accepted_length_histogram"].values())
    accepted = sum(int(length) * count for length, count in out["accepted_length_histogram"].items())
    assert accepted + steps == 4 * 11
    assert out["tokens_per_step"] == pytest.approx(44 / steps)
    assert out["steps_by_tree_nodes"] == {"3": steps}


def test_demo_says_when_texts_differ(capsys, checkpoint, monkeypatch):
    monkeypatch.setattr(demo, "CHECKPOINT", checkpoint)
    compare = demo.compare
    monkeypatch.setattr(demo, "compare", lambda *args: compare(*args) | {"identical": False})
    argv = ["demo", "--prompt", "xyz", "--max-new-tokens", "5", "--rounds", "1", "--tree", "chain:2"]
    assert main(argv) == 1
    captured = capsys.readouterr()
    assert "DIFFERENT" in captured.out
    assert "the texts differ" in captured.err


def test_doctor_reports_every_op(capsys):
    report = run_json(capsys, "doctor")
    ops = [(op["op"], op["device"]) for op in report["ops"] if op["device"] == "cpu"]
    assert ops == [(name, "cpu") for name in OPS]
    assert all(op["passed"] and op["reason"] for op in report["ops"])
    assert report["packages"]["torch"]


def test_doctor_says_how_a_models_layers_run(capsys, monkeypatch):
    monkeypatch.setattr(fused_layers, "obstacle", lambda decoder: "layer 0 has a wooden leg")
    report = run_json(capsys, "doctor", "--model", str(CHECKPOINT / "heads"))
    assert report["layers"] == "layers: module by module (layer 0 has a wooden leg)"


def test_doctor_fails_when_an_op_is_wrong(capsys, monkeypatch):
    def broken(*args):
        raise RuntimeError("no kernel image")

    monkeypatch.setattr(medusa_kernels, "add_rms_norm", lambda x, *_: (x, torch.full_like(x, float("nan"))))
    monkeypatch.setattr(medusa_kernels, "tree_verify", broken)
    assert main(["doctor"]) == 1
    captured = capsys.readouterr()
    assert captured.out.count("FAILED") >= 2
    assert "no kernel image" in captured.err


class TestAModelWithoutHeads:
    def test_generate_writes_its_text_and_says_how_to_get_heads(self, capsys, caplog, checkpoint, model_text):
        plain = str(checkpoint / "base")
        argv = ["generate", "--model", plain, "--prompt", "abc", "--max-new-tokens", "12", "--device", "cpu"]
        for tree in ([], ["--tree", "lookup:4"]):
            assert main([*argv, *tree]) == 0
            assert capsys.readouterr().out.strip("\n") == model_text("abc", 12).strip("\n")
        assert f"(`medusa train --init {plain} DATA` begins to train some)" in caplog.text

    @pytest.mark.parametrize(
        ("argv", "words"),
        [
            (["generate", "--prompt", "a", "--tree", "chain:4"], "tree: .* because the model has no heads"),
            (["tune"], "--model: expected a checkpoint of Medusa heads, but .*base is a model without Medusa heads"),
            (["export", "--format", "vllm", "--out", "OUT"], "expected a checkpoint of Medusa heads, but"),
        ],
    )
    def test_what_needs_heads_is_refused_before_it_is_loaded(self, capsys, checkpoint, tmp_path, argv, words):
        for file in (checkpoint / "base").iterdir():
            if "safetensors" not in file.name:
                (tmp_path / file.name).write_bytes(file.read_bytes())
        base = tmp_path.rename(tmp_path.with_name(f"{tmp_path.name}-base"))
        before = sorted(base.iterdir())
        name, *rest = argv
        assert main([name, "--model", str(base), *(str(base / "out") if arg == "OUT" else arg for arg in rest)]) == 2
        assert re.search(words, capsys.readouterr().err)
        assert sorted(base.iterdir()) == before
