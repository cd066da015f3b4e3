"""What the paper's layout does not have: 8-bit projections with scales, the parent term and the root input."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from medusa_decoding.checkpoints import read_heads, write_heads
from medusa_decoding.heads import MedusaHeads, Storage

HIDDEN, VOCAB = 6, 11
MAP = torch.tensor([10, 0, 4])
Tensors = dict[str, torch.Tensor]

KINDS: dict[str, tuple[Storage, dict[str, Any]]] = {
    "int8": ("int8", {}),
    "fp8": ("fp8", {}),
    "fp8 beside bfloat16": ("fp8", {"dtype": torch.bfloat16}),
    "parents": ("float", {"parent_rank": 3}),
    "shared, trimmed, parents": ("float", {"shared_projection": True, "token_map": MAP, "parent_rank": 2}),
    "shared, trimmed, all parents": (  # as earlier versions wrote them
        "float",
        {"shared_projection": True, "token_map": MAP, "parent_rank": 2, "all_parents": True},
    ),
    "int8, trimmed, parents": ("int8", {"token_map": MAP, "parent_rank": 2}),
    "root": ("float", {"root_rank": 2}),
    "shared, root, parents, no bias": (
        "float",
        {"shared_projection": True, "parent_rank": 2, "root_rank": HIDDEN, "bias": False},
    ),
    "features, root, parents": ("float", {"feature_layers": (1, 12), "parent_rank": 2, "root_rank": 2}),
    "fp8, trimmed, parents, bfloat16": ("fp8", {"token_map": MAP, "parent_rank": 2, "dtype": torch.bfloat16}),
}


def made(kind: str, seed: int = 0) -> MedusaHeads:
    storage, arguments = KINDS[kind]
    heads = MedusaHeads(HIDDEN, VOCAB, 3, 2, **arguments)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return heads if storage == "float" else heads.quantized(storage)


@pytest.mark.parametrize("kind", KINDS)
def test_round_trip(tmp_path: Path, kind: str) -> None:
    heads = made(kind)
    write_heads(heads, tmp_path / "heads", base_model="someone/base")
    torch.manual_seed(1)
    read = read_heads(tmp_path / "heads", hidden_size=HIDDEN, vocab_size=VOCAB)
    drawn = torch.rand(2)
    torch.manual_seed(1)
    assert torch.equal(drawn, torch.rand(2)), "reading drew random numbers"
    assert read.notes == []
    assert (read.heads.storage, read.heads.parent_rank) == (heads.storage, heads.parent_rank)
    assert (read.heads.root_rank, read.heads.feature_layers) == (heads.root_rank, heads.feature_layers)
    before, after = heads.state_dict(), read.heads.state_dict()
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert after[name].dtype == tensor.dtype
        assert torch.equal(after[name].float(), tensor.float()), name
    assert not any(parameter.requires_grad for parameter in read.heads.parameters())


def test_names_and_config(tmp_path: Path) -> None:
    heads = made("int8, trimmed, parents")
    write_heads(heads, tmp_path / "heads", base_model="someone/base")
    tensors = load_file(tmp_path / "heads" / "medusa_lm_head.safetensors")
    beside = {"token_map", "parent_tokens", "candidate_tokens"}
    a_head = ("0.linear.weight", "0.linear.bias", "1.linear.weight", "1.linear.bias", "2.weight", "2.weight_scale")
    assert set(tensors) == beside | {f"{h}.{name}" for h in range(3) for name in (*a_head, "parent_mix")}
    assert (tensors["1.2.weight"].dtype, tensors["1.2.weight"].shape) == (torch.int8, (3, HIDDEN))
    assert (tensors["1.2.weight_scale"].dtype, tensors["1.2.weight_scale"].shape) == (torch.float32, (3,))
    assert tensors["parent_tokens"].shape == (4, 2)
    assert tensors["candidate_tokens"].shape == (3, 2)
    assert torch.equal(tensors["2.parent_mix"], heads.parent_mix[2])  # type: ignore[index]
    config = json.loads((tmp_path / "heads" / "config.json").read_text())
    assert (config["medusa_storage"], config["medusa_parent_rank"]) == ("int8", 2)
    write_heads(MedusaHeads(HIDDEN, VOCAB, 3), tmp_path / "plain", base_model="someone/base")
    assert (
        not {"medusa_storage", "medusa_parent_rank", "medusa_root_rank", "medusa_feature_layers"}
        & json.loads((tmp_path / "plain" / "config.json").read_text()).keys()
    )


ROOT_DAMAGES: dict[str, tuple[Callable[[Tensors], Any], str]] = {
    "one root missing": (lambda t: t.pop("1.root_up"), r"missing 1\.root_up$"),
    "no matrix of all": (lambda t: t.pop("root_down"), r"missing root_down$"),
    "a rank above the hidden size": (
        lambda t: t.update({"root_down": torch.ones(HIDDEN + 1, HIDDEN)}),
        r"root_down in .*: expected at most 6 rows \(the hidden size\), got 7",
    ),
}


@pytest.mark.parametrize("damage", ROOT_DAMAGES)
def test_damage_of_a_root_input_is_named(tmp_path: Path, damage: str) -> None:
    write_heads(made("root"), tmp_path / "heads", base_model="someone/base")
    change, message = ROOT_DAMAGES[damage]
    rewrite(tmp_path / "heads", change)
    with pytest.raises(ValueError, match=message):
        read_heads(tmp_path / "heads", vocab_size=VOCAB)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_heads(made("int8, trimmed, parents"), tmp_path / "heads", base_model="someone/base")
    return tmp_path / "heads"


def rewrite(folder: Path, change: Callable[[Tensors], Any]) -> None:
    file = folder / "medusa_lm_head.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_requested_dtype_does_not_change_8_bit_weights(folder: Path, dtype: torch.dtype) -> None:
    heads, stored = read_heads(folder, dtype=dtype).heads, made("int8, trimmed, parents")
    assert {parameter.dtype for parameter in heads.parameters()} == {dtype}
    assert torch.equal(heads.w2, stored.w2)  # type: ignore[arg-type]
    assert torch.equal(heads.w2_scale, stored.w2_scale)  # type: ignore[arg-type]


def test_the_parent_term_gives_the_vocabulary(tmp_path: Path) -> None:
    write_heads(made("shared, trimmed, all parents"), tmp_path / "heads", base_model=str(tmp_path / "gone"))
    config = json.loads((tmp_path / "heads" / "config.json").read_text())
    (tmp_path / "heads" / "config.json").write_text(json.dumps(config | {"vocab_size": 99}))
    read = read_heads(tmp_path / "heads")
    assert read.heads.vocab_size == VOCAB
    assert len(read.heads.remade().parent_tokens) == VOCAB
    with pytest.raises(
        ValueError, match=r"parent_tokens in .*: expected 12 rows \(the .*\) or 4 \(the token_map's .*, got 11"
    ):
        read_heads(tmp_path / "heads", vocab_size=12)
    rewrite(tmp_path / "heads", lambda t: t.update(token_map=torch.arange(10), candidate_tokens=torch.ones(10, 2)))
    with pytest.raises(ValueError, match=r"parent_tokens in .*: expected at most 10 rows \(the vocabulary\), got 11"):
        read_heads(tmp_path / "heads", vocab_size=10)


def poisoned(tensor: torch.Tensor, value: float) -> torch.Tensor:
    tensor = tensor.clone()
    tensor.view(-1)[-1] = value
    return tensor


DAMAGES: dict[str, tuple[Callable[[Tensors], Any], str]] = {
    "a misshapen scale": (
        lambda t: t.update({"1.2.weight_scale": torch.ones(4)}),
        r"1\.2\.weight_scale in .*: expected shape \[3\], got \[4\]",
    ),
    "an infinite scale": (
        lambda t: t.update({"2.2.weight_scale": poisoned(t["2.2.weight_scale"], float("inf"))}),
        r"2\.2\.weight_scale in .*: expected finite weights",
    ),
    "a float projection among them": (
        lambda t: t.update({"1.2.weight": torch.ones(3, HIDDEN)}),
        r"1\.2\.weight in .*: expected dtype int8, got float32",
    ),
    "NaN in fp8": (
        lambda t: t.update(
            {f"{h}.2.weight": poisoned(torch.ones(3, HIDDEN), float("nan")).to(torch.float8_e4m3fn) for h in range(3)}
        ),
        r"0\.2\.weight in .*: expected finite weights, got values from nan",
    ),
    "no candidates": (lambda t: t.pop("candidate_tokens"), r"missing candidate_tokens$"),
    "candidates of all tokens": (
        lambda t: t.update({"candidate_tokens": torch.ones(VOCAB, 2)}),
        r"candidate_tokens in .*: expected shape \[3, 2\], got \[11, 2\]",
    ),
    "a mix of another rank": (
        lambda t: t.update({"1.parent_mix": torch.eye(3)}),
        r"1\.parent_mix in .*: expected shape \[2, 2\], got \[3, 3\]",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_named(folder: Path, damage: str) -> None:
    change, message = DAMAGES[damage]
    rewrite(folder, change)
    with pytest.raises(ValueError, match=message):
        read_heads(folder, vocab_size=VOCAB)


def test_what_a_reader_would_refuse_is_not_written(tmp_path: Path) -> None:
    heads = made("int8, trimmed, parents")
    heads.w2_scale.view(-1)[-1] = float("nan")  # type: ignore[operator, union-attr]
    with pytest.raises(ValueError, match=r"2\.2\.weight_scale .*expected finite"):
        write_heads(heads, tmp_path / "heads", base_model="someone/base")
    assert list(tmp_path.iterdir()) == []
