"""The paper's heads-only files: finding them, reading them, and a config that disagrees."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.utils._paths import filter_repo_objects
from safetensors.torch import save_file

from medusa_decoding import MedusaModel
from medusa_decoding.checkpoints import read_heads
from medusa_decoding.checkpoints.reading import stated_base_model

FILES = ["medusa_lm_head.safetensors", "medusa_lm_head.pt"]
Tensors = dict[str, torch.Tensor]
MakeTensors = Callable[..., Tensors]
WriteFolder = Callable[..., Path]


def head_by_the_formula(tensors: Tensors, head: int, layers: int, hidden: torch.Tensor) -> torch.Tensor:
    """W2 (h + SiLU(W1 h + b1)), block after block, SiLU(x) = x / (1 + exp(-x)) written out, in double precision."""
    state = hidden.double()
    for layer in range(layers):
        inner = tensors[f"{head}.{layer}.linear.weight"].double() @ state
        if f"{head}.{layer}.linear.bias" in tensors:
            inner = inner + tensors[f"{head}.{layer}.linear.bias"].double()
        state = state + inner / (1 + torch.exp(-inner))
    return tensors[f"{head}.{layers}.weight"].double() @ state


class TestReads:
    @pytest.mark.parametrize("file", FILES)
    @pytest.mark.parametrize("bias", [True, False])
    @pytest.mark.parametrize(("heads", "layers"), [(1, 1), (5, 1), (3, 2)])
    def test_every_tensor_lands_in_its_place(
        self,
        paper_tensors: MakeTensors,
        write_paper_folder: WriteFolder,
        file: str,
        bias: bool,
        heads: int,
        layers: int,
    ) -> None:
        tensors = paper_tensors(heads, layers, bias=bias)
        read = read_heads(write_paper_folder(tensors, file=file), hidden_size=6, vocab_size=11)

        packed = read.heads
        assert packed.w1.shape == (heads, layers, 6, 6)
        assert packed.w2 is not None
        assert packed.w2.shape == (heads, 11, 6)
        assert (packed.b1 is not None) == bias
        for head in range(heads):
            for layer in range(layers):
                assert torch.equal(packed.w1[head, layer], tensors[f"{head}.{layer}.linear.weight"])
                if packed.b1 is not None:
                    assert torch.equal(packed.b1[head, layer], tensors[f"{head}.{layer}.linear.bias"])
            assert torch.equal(packed.w2[head], tensors[f"{head}.{layers}.weight"])
        assert read.format == "original"
        assert read.base_model == "someone/base"
        assert read.notes == []
        assert packed.vocab_size == 11

    @pytest.mark.parametrize("layers", [1, 2])
    def test_a_read_head_computes_the_papers_formula(
        self, paper_tensors: MakeTensors, write_paper_folder: WriteFolder, layers: int
    ) -> None:
        tensors = paper_tensors(3, layers)
        heads = read_heads(write_paper_folder(tensors)).heads
        hidden = torch.randn(6, generator=torch.Generator().manual_seed(3))
        logits = heads(hidden.unsqueeze(0))[0]
        for head in range(3):
            expected = head_by_the_formula(tensors, head, layers, hidden)
            torch.testing.assert_close(logits[head].double(), expected, rtol=1e-5, atol=1e-5)

    def test_version_2_is_recognised_by_its_tensors(
        self, paper_tensors: MakeTensors, write_paper_folder: WriteFolder
    ) -> None:
        tensors = paper_tensors(2, rows=None)
        read = read_heads(write_paper_folder(tensors), vocab_size=11)
        assert read.heads.w2 is None
        assert read.heads.shared_projection
        assert read.heads.vocab_size == 11
        assert torch.equal(read.heads.w1[1, 0], tensors["1.0.linear.weight"])

    def test_the_old_pytorch_format_is_read(self, paper_tensors: MakeTensors, write_paper_folder: WriteFolder) -> None:
        tensors = paper_tensors(2)
        folder = write_paper_folder(tensors, file="medusa_lm_head.pt")
        torch.save(tensors, folder / "medusa_lm_head.pt", _use_new_zipfile_serialization=False)
        assert torch.equal(read_heads(folder).heads.w1[1, 0], tensors["1.0.linear.weight"])

    @pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16, torch.float32])
    def test_the_dtype_is_that_of_the_file_unless_given(
        self, paper_tensors: MakeTensors, write_paper_folder: WriteFolder, stored: torch.dtype
    ) -> None:
        tensors = paper_tensors(2, dtype=stored)
        folder = write_paper_folder(tensors)
        kept = read_heads(folder).heads
        assert {parameter.dtype for parameter in kept.parameters()} == {stored}
        converted = read_heads(folder, dtype=torch.bfloat16).heads
        assert {parameter.dtype for parameter in converted.parameters()} == {torch.bfloat16}
        assert torch.equal(converted.w1[1, 0], tensors["1.0.linear.weight"].to(torch.bfloat16))

    def test_a_folder_without_config_is_read_with_a_note(
        self, paper_tensors: MakeTensors, write_paper_folder: WriteFolder
    ) -> None:
        read = read_heads(write_paper_folder(paper_tensors(), None))
        assert (read.base_model, read.config) == (None, {})
        assert "config.json" in read.notes[0]


class TestBaseModel:
    def test_a_relative_base_folder_is_relative_to_the_heads(
        self, tmp_path: Path, paper_tensors: MakeTensors, write_paper_folder: WriteFolder
    ) -> None:
        (tmp_path / "base").mkdir()
        folder = write_paper_folder(paper_tensors(), {"base_model_name_or_path": "../base"})
        assert read_heads(folder).base_model == str(tmp_path / "base")
        assert stated_base_model(folder) == (str(tmp_path / "base"), None)

    def test_vocabulary_of_shared_heads_is_the_base_models(
        self, tmp_path: Path, paper_tensors: MakeTensors, write_paper_folder: WriteFolder
    ) -> None:
        (tmp_path / "base").mkdir()
        (tmp_path / "base" / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 23}))
        folder = write_paper_folder(paper_tensors(rows=None), {"base_model_name_or_path": "../base"})
        assert read_heads(folder).heads.vocab_size == 23

    def test_unknown_vocabulary_is_an_error(
        self, tmp_path: Path, paper_tensors: MakeTensors, write_paper_folder: WriteFolder
    ) -> None:
        gone = str(tmp_path / "gone")
        folder = write_paper_folder(paper_tensors(rows=None), {"base_model_name_or_path": gone})
        with pytest.raises(ValueError, match=r"vocab_size: expected the base model's.*got None"):
            read_heads(folder)


class TestConfigDisagrees:
    @pytest.mark.parametrize(
        ("field", "wrong"), [("medusa_num_heads", 2), ("medusa_num_layers", 3), ("hidden_size", 7), ("vocab_size", 12)]
    )
    def test_sizes_are_those_of_the_tensors(
        self, paper_tensors: MakeTensors, write_paper_folder: WriteFolder, field: str, wrong: int
    ) -> None:
        folder = write_paper_folder(paper_tensors(5), {"base_model_name_or_path": "b", field: wrong})
        heads = read_heads(folder).heads
        assert (heads.num_heads, heads.num_layers, heads.hidden_size, heads.vocab_size) == (5, 1, 6, 11)

    @pytest.mark.parametrize(("version", "rows"), [("2", 11), ("2", None), ("1", None), ("1", 11)])
    def test_versions_of_the_layout(
        self, paper_tensors: MakeTensors, write_paper_folder: WriteFolder, version: str, rows: int | None
    ) -> None:
        folder = write_paper_folder(paper_tensors(rows=rows), {"base_model_name_or_path": "b", "version": version})
        assert read_heads(folder, vocab_size=11).heads.shared_projection == (rows is None)


class TestRecognition:
    def test_an_unknown_folder_lists_what_is_there_and_what_is_known(self, tmp_path: Path) -> None:
        (tmp_path / "notes.txt").touch()
        save_file({"model.norm.weight": torch.ones(3)}, tmp_path / "model.safetensors")
        with pytest.raises(
            ValueError, match=r"original \(.*embedded \(.*got a folder with: model.safetensors, notes.txt"
        ):
            read_heads(tmp_path)

    def test_a_missing_path_never_reaches_the_hub(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="path_or_hub_id: expected an existing folder"):
            read_heads(tmp_path / "gone")


class TestHub:
    def test_only_config_and_weights_are_fetched(
        self, paper_tensors: MakeTensors, write_paper_folder: WriteFolder, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        folder = write_paper_folder(paper_tensors(4), {})
        calls = []

        def download(repo: str, **kwargs: Any) -> str:
            calls.append((repo, kwargs))
            return str(folder)

        monkeypatch.setattr("medusa_decoding.checkpoints.reading.snapshot_download", download)
        with pytest.raises(ValueError, match="base_model: expected"):  # the heads name none
            MedusaModel.from_pretrained("someone/heads", token="hf_1", cache_dir="there")
        assert (calls[0][1]["token"], calls.pop()[1]["cache_dir"]) == ("hf_1", "there")
        read = read_heads("someone/heads", revision="v1")
        assert read.heads.num_heads == 4
        assert read.path == folder
        [(repo, kwargs)] = calls
        assert (repo, kwargs["revision"]) == ("someone/heads", "v1")

        held = [
            "config.json",
            "medusa_lm_head.pt",
            "medusa_lm_head.safetensors",
            "model-00001-of-00002.safetensors",
            "consolidated.safetensors",
            "pytorch_model-00001-of-00002.bin",
            "modeling_medusa.py",
            "optimizer.pt",
            "training_args.bin",
            "checkpoint-100/model.safetensors",
        ]
        fetched = filter_repo_objects(
            held, allow_patterns=kwargs["allow_patterns"], ignore_patterns=kwargs["ignore_patterns"]
        )
        assert list(fetched) == held[:4]
        (folder / "medusa_lm_head.safetensors").rename(folder / "pytorch_model.bin")
        with pytest.raises(ValueError, match=r"pytorch_model\.bin: expected a PyTorch file"):
            read_heads("someone/heads")
        assert "pytorch_model*.bin" in calls[-1][1]["allow_patterns"]

    def test_an_unreachable_hub_is_reported(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def download(repo: str, **kwargs: object) -> str:
            raise OSError("offline")

        monkeypatch.setattr("medusa_decoding.checkpoints.reading.snapshot_download", download)
        with pytest.raises(ValueError, match=r"path_or_hub_id: .*'someone/heads' .*offline"):
            read_heads("someone/heads")
