"""`generate(custom_generate=FOLDER or hub id)` of an exported repository: texts, arguments, and what code runs."""

import json
import shutil

import pytest
import torch
from calls import TREE, Recorder, plain, with_heads
from models import prompts
from transformers import dynamic_module_utils

from medusa_decoding.checkpoints import export, write_heads

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def folder(heads, tmp_path, monkeypatch):
    """An exported repository with strange code in it; the heads' folder is gone, and there is no network."""
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.syspath_prepend(tmp_path / "modules")
    write_heads(heads, tmp_path / "trained", base_model="someone/base")
    folder = export(tmp_path / "trained", tmp_path / "repository", "hub").folder
    shutil.rmtree(tmp_path / "trained")
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | {"auto_map": {"AutoConfig": "evil.Config"}}))
    for name in ("evil.py", "custom_generate/evil.py"):
        (folder / name).write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    return folder


@pytest.fixture(params=["folder", "hub id"])
def repository(request, folder, tmp_path):
    """The arguments of `generate` that name the repository."""
    if request.param == "folder":
        return {"custom_generate": str(folder)}
    cached = tmp_path / "hub" / "models--someone--heads"
    shutil.copytree(folder, cached / "snapshots" / COMMIT)
    (cached / "refs").mkdir()
    (cached / "refs" / "v1").write_text(COMMIT)
    return {"custom_generate": "someone/heads", "cache_dir": str(tmp_path / "hub"), "revision": "v1"}


def test_texts_are_those_without_the_repository(model, heads, repository):
    [row] = prompts(1, [6])
    expected, got = Recorder(), Recorder()
    text = plain(model, row[None], streamer=expected)
    named = {**repository, "trust_remote_code": True}
    assert torch.equal(plain(model, row[None], streamer=got, **named), text)
    assert (got.values, got.ended) == (expected.values, 1)
    ids = torch.tensor([[0, 0, 1, 2], [3, 4, 5, 6]])
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    batch = {"attention_mask": mask, "pad_token_id": 0}
    assert torch.equal(plain(model, ids, **batch, **named), plain(model, ids, **batch))
    # Sampling, the tree and the counts arrive: without the seed and the tree they would differ.
    drawn = {"do_sample": True, "top_k": 5, "seed": 3, "tree": TREE, "return_dict_in_generate": True}
    expected, got = with_heads(model, heads, row[None], **drawn), plain(model, row[None], **drawn, **named)
    assert torch.equal(got.sequences, expected.sequences)
    assert (got.steps, got.new_tokens) == (expected.steps, expected.new_tokens)


def test_code_runs_only_if_trusted_and_only_that_of_generate(model, repository, tmp_path):
    ids = prompts(1, [6])[0][None]
    with pytest.raises(ValueError, match="trust_remote_code=True"):
        plain(model, ids, trust_remote_code=False, **repository)
    assert not (tmp_path / "modules").exists()
    plain(model, ids, trust_remote_code=True, **repository)
    assert not (tmp_path / "ran").exists()


def test_called_directly_it_asks_for_heads(model, heads, folder):
    generate = model.load_custom_generate(str(folder), trust_remote_code=True)
    ids = prompts(1, [6])[0][None]
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "max_new_tokens": 4, "do_sample": False}
    with pytest.raises(ValueError, match=r"heads: expected a folder or hub id of heads, because .*, got None"):
        generate(model, **given)
    assert torch.equal(generate(model, heads=heads, **given), plain(model, ids, max_new_tokens=4))
