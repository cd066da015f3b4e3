"""Writing the paper's layout: the files written, and that a failed write leaves no trace."""

from __future__ import annotations

import json
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from medusa_decoding.checkpoints import read_heads, write_heads
from medusa_decoding.heads import MedusaHeads

WriteFolder = Callable[..., Path]


def random_heads(heads: int = 3, layers: int = 2, seed: int = 0, **kwargs: Any) -> MedusaHeads:
    made = MedusaHeads(6, 11, heads, layers, **kwargs)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return made


def names_in(file: Path) -> set[str]:
    with safe_open(str(file), "pt") as opened:
        return set(opened.keys())


def test_layout_is_the_papers(tmp_path: Path) -> None:
    heads, tmp_path = random_heads(2, 1), tmp_path / "new"
    write_heads(heads, tmp_path / "heads", base_model="../base")
    assert sorted(file.name for file in (tmp_path / "heads").iterdir()) == ["config.json", "medusa_lm_head.safetensors"]
    assert json.loads((tmp_path / "heads" / "config.json").read_text()) == {
        "base_model_name_or_path": "../base",
        "medusa_num_heads": 2,
        "medusa_num_layers": 1,
        "hidden_size": 6,
        "vocab_size": 11,
    }
    weights = tmp_path / "heads" / "medusa_lm_head.safetensors"
    assert names_in(weights) == {
        *("0.0.linear.weight", "0.0.linear.bias", "0.1.weight"),
        *("1.0.linear.weight", "1.0.linear.bias", "1.1.weight"),
    }
    with safe_open(str(weights), "pt") as opened:
        assert opened.metadata() == {"format": "pt"}
        assert torch.equal(opened.get_tensor("1.1.weight"), heads.w2[1])  # type: ignore[index]
        assert torch.equal(opened.get_tensor("1.0.linear.bias"), heads.b1[1, 0])  # type: ignore[index]


def test_shared_heads_are_version_2(tmp_path: Path) -> None:
    heads = random_heads(2, 1, shared_projection=True, token_map=torch.tensor([3, 1]))
    write_heads(heads, tmp_path / "heads", base_model="someone/base")
    assert json.loads((tmp_path / "heads" / "config.json").read_text())["version"] == "2"
    assert names_in(tmp_path / "heads" / "medusa_lm_head.safetensors") == {
        *("0.0.linear.weight", "0.0.linear.bias", "1.0.linear.weight", "1.0.linear.bias"),
        "token_map",
    }


def test_an_older_checkpoint_is_replaced_and_other_files_stay(tmp_path: Path) -> None:
    folder = tmp_path / "heads"
    write_heads(random_heads(3), folder, base_model="old/base")
    (folder / "medusa_tree.json").write_text("[[0]]")
    newer = random_heads(4, seed=1)
    write_heads(newer, folder, base_model="new/base")
    read = read_heads(folder)
    assert torch.equal(read.heads.w1, newer.w1)
    assert read.base_model == "new/base"
    assert (folder / "medusa_tree.json").read_text() == "[[0]]"
    assert [entry.name for entry in tmp_path.iterdir()] == ["heads"]


class TestFailedWrite:
    @pytest.fixture
    def old(self, tmp_path: Path) -> dict[str, bytes]:
        write_heads(random_heads(3), tmp_path / "heads", base_model="old/base")
        return self.content(tmp_path / "heads")

    @staticmethod
    def content(folder: Path) -> dict[str, bytes]:
        return {file.name: file.read_bytes() for file in folder.iterdir()}

    def test_an_error_of_the_operating_system_is_raised(self, tmp_path: Path, old: dict[str, bytes]) -> None:
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
        try:
            with pytest.raises(OSError, match=r"heads: the weights could not be written"):
                write_heads(random_heads(8), tmp_path / "heads", base_model="new/base")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert self.content(tmp_path / "heads") == old
        assert [entry.name for entry in tmp_path.iterdir()] == ["heads"]


class TestRefuses:
    def test_no_base_model_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="base_model: expected a hub id or a folder"):
            write_heads(random_heads(), tmp_path / "heads", base_model="")
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.parametrize("config", [{"model_type": "llama"}, {"medusa_num_heads": 3, "architectures": ["X"]}])
    def test_the_folder_of_a_model_is_refused(self, tmp_path: Path, config: dict[str, Any]) -> None:
        (tmp_path / "config.json").write_text(json.dumps(config))
        with pytest.raises(ValueError, match="folder: expected a new one or one of heads alone"):
            write_heads(random_heads(), tmp_path, base_model="someone/base")
        assert json.loads((tmp_path / "config.json").read_text()) == config
