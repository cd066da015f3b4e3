"""medusa export: what it writes, prints and refuses."""

import json
import re

import pytest
import torch
from safetensors.torch import load_file

from medusa_decoding import MedusaHeads, MedusaModel
from medusa_decoding.checkpoints import read_heads, write_heads
from medusa_decoding.cli import main


def test_export_for_vllm_with_json(capsys, checkpoint, tmp_path):
    argv = ["export", "--model", str(checkpoint / "heads"), "--out", str(tmp_path / "out"), "--format", "vllm"]
    assert main([*argv, "--dtype", "bfloat16", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    file = tmp_path / "out" / "model.safetensors"
    assert said == {
        "folder": str(tmp_path / "out"),
        "format": "vllm",
        "base_model": str(checkpoint / "base"),
        "bytes": file.stat().st_size + (tmp_path / "out" / "config.json").stat().st_size,
        "notes": [],
        "vllm": "0.28 to 0.32",
        "launch": f'vllm serve {checkpoint / "base"} --speculative-config \'{{"method": "medusa", "model": '
        f'"{tmp_path / "out"}", "num_speculative_tokens": 3}}\'',
    }
    tensors = load_file(file)
    assert tensors["lm_heads.2.weight"].dtype == torch.bfloat16
    assert torch.equal(tensors["lm_heads.2.weight"], read_heads(checkpoint / "heads").heads.w2[2].bfloat16())


def test_an_embedded_model_in_int8_writes_the_same_text(capsys, checkpoint, tmp_path, model_text):
    out = str(tmp_path / "out")
    argv = ["export", "--model", str(checkpoint / "heads"), "--out", out, "--format", "embedded", "--storage", "int8"]
    assert main(argv) == 0
    assert re.search(r"storage=int8\nas embedded in .*out \(0\.\d MB\)", capsys.readouterr().out)
    with MedusaModel.from_pretrained(out, dtype=torch.float32) as model:
        assert model.heads.storage == "int8"
    assert main(["generate", "--model", out, "--prompt", "abc", "--max-new-tokens", "8"]) == 0
    assert capsys.readouterr().out.rstrip("\n") in (model_text("abc", 8), "abc" + model_text("abc", 8))


def test_a_tokenizer_is_fetched_at_the_heads_revision(tmp_path, monkeypatch):
    from argparse import Namespace

    from medusa_decoding.checkpoints import pretrained
    from medusa_decoding.cli import _arguments

    write_heads(MedusaHeads(8, 11, 2), tmp_path / "heads", base_model="someone/base", base_revision="v2")
    asked = []

    def fetch(name, file, **arguments):
        asked.append((name, arguments))
        raise KeyboardInterrupt

    monkeypatch.setattr(pretrained, "cached_file", fetch)
    for base in (None, "other/base", "someone/base"):
        with pytest.raises(KeyboardInterrupt):
            _arguments.load_tokenizer(Namespace(model=str(tmp_path / "heads"), base_model=base))
    assert asked == [
        ("someone/base", {"revision": "v2"}),
        ("other/base", {}),
        ("someone/base", {"revision": "v2"}),
    ]
