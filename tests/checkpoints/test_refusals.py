"""Reasons to refuse the paper's heads-only files, by name."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from medusa_decoding.checkpoints import read_heads

FILES = ["medusa_lm_head.safetensors", "medusa_lm_head.pt"]
Tensors = dict[str, torch.Tensor]
MakeTensors = Callable[..., Tensors]
WriteFolder = Callable[..., Path]


def without(*names: str) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        for name in names:
            del tensors[name]

    return change


def replaced(name: str, make: Callable[[], torch.Tensor]) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        tensors[name] = make()

    return change


def poisoned(name: str, value: float) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        tensors[name].view(-1)[-1] = value

    return change


HEAD_1 = ("1.0.linear.weight", "1.0.linear.bias", "1.1.linear.weight", "1.1.linear.bias", "1.2.weight")
DAMAGES = {
    "a head in the middle": (without(*HEAD_1), r"missing 1\.0\.linear\.weight.*1\.1\.linear\.bias and 1 more"),
    "one projection": (without("0.2.weight"), r"missing 0\.2\.weight$"),
    "a stray tensor": (replaced("0.attn.weight", lambda: torch.ones(2)), r"unexpected 0\.attn\.weight$"),
    "a projection of other rows": (
        replaced("2.2.weight", lambda: torch.ones(12, 6)),
        r"2\.2\.weight in .*expected shape \[11, 6\], got \[12, 6\]",
    ),
    "an integer dtype": (
        replaced("0.0.linear.weight", lambda: torch.ones(6, 6, dtype=torch.int8)),
        r"0\.0\.linear\.weight in .*expected dtype float16, bfloat16 or float32, got int8",
    ),
    "NaN in a block": (poisoned("1.0.linear.weight", float("nan")), r"1\.0\.linear\.weight in .*expected finite"),
    "a token_map of other length": (
        replaced("token_map", lambda: torch.arange(5)),
        r"token_map in .*expected int64 \[11\].*got int64 \[5\]",
    ),
    "a token_map that repeats ids": (
        replaced("token_map", lambda: torch.zeros(11, dtype=torch.int64)),
        r"token_map: expected ids without repetition",
    ),
    "a token_map beyond the vocabulary": (
        replaced("token_map", lambda: torch.arange(1, 12)),
        r"token_map: expected ids in \[0, 11\), got 1 to 11",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_named(paper_tensors: MakeTensors, write_paper_folder: WriteFolder, damage: str) -> None:
    change, message = DAMAGES[damage]
    tensors = paper_tensors(3, 2)
    change(tensors)
    folder = write_paper_folder(tensors)
    with pytest.raises(ValueError, match=message):
        read_heads(folder, vocab_size=11)


class TestRefuses:
    @pytest.mark.parametrize(
        ("sizes", "message"),
        [
            ({"hidden_size": 8}, r"0\.0\.linear\.weight in .*expected hidden size 8 .*got 6"),
            ({"vocab_size": 12}, r"0\.1\.weight in .*expected 12 rows .*got 11 and no token_map"),
        ],
    )
    def test_heads_of_another_base_model_are_refused(
        self,
        paper_tensors: MakeTensors,
        write_paper_folder: WriteFolder,
        sizes: dict[str, Any],
        message: str,
    ) -> None:
        with pytest.raises(ValueError, match=message):
            read_heads(write_paper_folder(paper_tensors()), **sizes)

    @pytest.mark.parametrize("tensors", [{}, {"weight": torch.ones(2)}])
    def test_a_file_without_heads_is_refused(self, write_paper_folder: WriteFolder, tensors: Tensors) -> None:
        with pytest.raises(ValueError, match=r"missing 0\.0\.linear\.weight"):
            read_heads(write_paper_folder(tensors))

    @pytest.mark.parametrize("file", FILES)
    @pytest.mark.parametrize("kept", [0, 0.5, 0.999])
    def test_a_truncated_file_is_refused(
        self, paper_tensors: MakeTensors, write_paper_folder: WriteFolder, file: str, kept: float
    ) -> None:
        folder = write_paper_folder(paper_tensors(), file=file)
        content = (folder / file).read_bytes()
        (folder / file).write_bytes(content[: int(kept * len(content))])
        with pytest.raises(ValueError, match=file):
            read_heads(folder)

    @pytest.mark.parametrize("zipped", [True, False])
    def test_pickled_code_is_not_run(
        self, tmp_path: Path, write_paper_folder: WriteFolder, paper_tensors: MakeTensors, zipped: bool
    ) -> None:
        folder = write_paper_folder(paper_tensors(), file="medusa_lm_head.pt")
        bomb = {"0.0.linear.weight": Bomb(tmp_path / "ran")}
        torch.save(bomb, folder / "medusa_lm_head.pt", _use_new_zipfile_serialization=zipped)
        with pytest.raises(ValueError, match=r"medusa_lm_head\.pt: expected tensors only.*refused"):
            read_heads(folder)
        assert not (tmp_path / "ran").exists()
        pickle.loads(pickle.dumps(Bomb(tmp_path / "ran")))
        assert (tmp_path / "ran").exists(), "the bomb of this test is a dud"

    @pytest.mark.parametrize("content", [[torch.ones(2)], {"0.0.linear.weight": 3}])
    def test_a_pt_file_without_a_dict_of_tensors_is_refused(
        self, write_paper_folder: WriteFolder, paper_tensors: MakeTensors, content: object
    ) -> None:
        folder = write_paper_folder(paper_tensors(), file="medusa_lm_head.pt")
        torch.save(content, folder / "medusa_lm_head.pt")
        with pytest.raises(ValueError, match=r"medusa_lm_head\.pt: .*expected a (dict of tensors|named tensor)"):
            read_heads(folder)

    @pytest.mark.parametrize("text", ["{", "[1]"])
    def test_a_config_that_is_not_a_json_object_is_refused(
        self, paper_tensors: MakeTensors, write_paper_folder: WriteFolder, text: str
    ) -> None:
        folder = write_paper_folder(paper_tensors())
        (folder / "config.json").write_text(text)
        with pytest.raises(ValueError, match=r"config\.json: expected .*JSON"):
            read_heads(folder)


class Bomb:
    """Unpickling it creates a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return open, (str(self.path), "w")
