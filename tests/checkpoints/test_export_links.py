"""Export copies the files of a checkpoint: no file outside the folder that a link points to, and no pipe."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from medusa_decoding.checkpoints import export, read_heads, write_heads
from medusa_decoding.heads import MedusaHeads

SECRET = "not for others"


@pytest.fixture
def base(tmp_path: Path, tiny_llama: LlamaForCausalLM) -> Path:
    tiny_llama.save_pretrained(tmp_path / "base")
    for name in ("tokenizer.json", "LICENSE"):
        (tmp_path / "base" / name).write_text("{}")
    return tmp_path / "base"


@pytest.fixture
def heads(tmp_path: Path, base: Path) -> Path:
    write_heads(MedusaHeads(8, 11, 2), tmp_path / "heads", base_model=base)
    (tmp_path / "heads" / "README.md").write_text("the card")
    return tmp_path / "heads"


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    """A folder next to the others, with files of the same names."""
    folder = tmp_path / "private"
    folder.mkdir()
    (folder / "id_rsa").write_text(SECRET)
    return folder


def linked(file: Path, target: Path) -> None:
    file.unlink(missing_ok=True)
    file.symlink_to(target)


@pytest.mark.parametrize("name", ["tokenizer.json", "notes.txt", "model.safetensors"])
def test_links_out_of_a_base_model_are_refused_by_name(heads: Path, base: Path, secret: Path, name: str) -> None:
    target = secret / "id_rsa"
    if (base / name).exists() and name not in ("tokenizer.json", "LICENSE"):
        target = Path(shutil.move(base / name, secret / name))
    linked(base / name, target)
    with pytest.raises(ValueError, match=rf"{name}: expected a file in .*base, got a link to .*private/{target.name}"):
        export(heads, heads.parent / "out", "embedded", base_model=base)
    assert sorted(entry.name for entry in heads.parent.iterdir()) == ["base", "heads", "private"]


@pytest.mark.parametrize(("target", "name"), [("native", "README.md"), ("embedded", "measured.json")])
def test_links_out_of_a_folder_of_heads_are_refused(heads: Path, secret: Path, name: str, target: Any) -> None:
    linked(heads / name, secret / "id_rsa")
    with pytest.raises(ValueError, match=rf"{name}: expected a file in .*heads, got a link to .*private/id_rsa"):
        export(heads, heads.parent / "out", target)
    assert sorted(entry.name for entry in heads.parent.iterdir()) == ["base", "heads", "private"]


def test_links_of_the_hub_s_cache_and_within_a_folder_are_followed(heads: Path, base: Path) -> None:
    blobs, snapshot = heads.parent / "cache" / "blobs", heads.parent / "cache" / "snapshots" / "1a2b"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for number, file in enumerate(sorted(base.iterdir())):
        shutil.move(file, blobs / f"{number}")
        (snapshot / file.name).symlink_to(Path("../../blobs") / f"{number}")
    (snapshot / "NOTICE").symlink_to("LICENSE")
    # The whole cache may be elsewhere.
    (heads.parent / "link").symlink_to(heads.parent / "cache")
    out = export(
        heads, heads.parent / "out", "embedded", base_model=heads.parent / "link" / "snapshots" / "1a2b"
    ).folder
    assert (out / "tokenizer.json").read_text() == (out / "NOTICE").read_text() == "{}"
    assert not any(entry.is_symlink() for entry in out.iterdir())
    assert torch.equal(read_heads(out).heads.w1, read_heads(heads).heads.w1)


def test_pipes_and_folders_are_neither_read_nor_copied(heads: Path, base: Path) -> None:
    for name in ("tokenizer.model", "NOTICE"):
        os.mkfifo(base / name)
    (base / "chat_template.json").mkdir()
    os.mkfifo(heads / "measured.json")
    (heads / "medusa_tree.json").mkdir()
    out = export(heads, heads.parent / "out", "embedded").folder
    assert not {"tokenizer.model", "NOTICE", "chat_template.json", "measured.json", "medusa_tree.json"} & {
        entry.name for entry in out.iterdir()
    }
    export(heads, heads.parent / "tgi", "original-v1", file="safetensors")
    (base / "config.json").unlink()
    os.mkfifo(base / "config.json")
    with pytest.raises(ValueError, match=r"^base_model: .* has no config\.json, which embedded needs"):
        export(heads, heads.parent / "again", "embedded")
