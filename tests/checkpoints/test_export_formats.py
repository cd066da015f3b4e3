"""Heads of every kind in every format: exported heads propose the same tokens, or are refused in one line."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import LlamaForCausalLM

from medusa_decoding import MedusaModel
from medusa_decoding.checkpoints import TARGETS, export, read_heads, write_heads
from medusa_decoding.checkpoints.exporting import readers
from medusa_decoding.heads import MedusaHeads, Storage

HIDDEN, VOCAB = 8, 11
MAP = torch.tensor([10, 0, 4, 7])

KINDS: dict[str, tuple[Storage, dict[str, Any]]] = {
    "own": ("float", {}),
    "one head": ("float", {"num_heads": 1}),
    "two blocks": ("float", {"num_layers": 2}),
    "no bias": ("float", {"bias": False}),
    "no bias, two blocks": ("float", {"bias": False, "num_layers": 2}),
    "bfloat16": ("float", {"dtype": torch.bfloat16}),
    "shared": ("float", {"shared_projection": True}),
    "shared, two blocks": ("float", {"shared_projection": True, "num_layers": 2}),
    "shared, no bias": ("float", {"shared_projection": True, "bias": False}),
    "trimmed": ("float", {"token_map": MAP}),
    "shared, trimmed": ("float", {"shared_projection": True, "token_map": MAP}),
    "int8": ("int8", {}),
    "fp8, trimmed": ("fp8", {"token_map": MAP}),
    "parents": ("float", {"parent_rank": 2}),
    "shared, trimmed, parents": ("float", {"shared_projection": True, "token_map": MAP, "parent_rank": 2}),
    "root": ("float", {"root_rank": 3}),
    "features": ("float", {"feature_layers": (3, 7)}),
    "shared, parents and root": ("float", {"shared_projection": True, "parent_rank": 2, "root_rank": 2}),
}

REFUSED: dict[str, dict[str, str]] = {
    "original-v1": {
        "trimmed": r"the whole vocabulary for original-v. \(native and embedded hold it.* got 4 of 11 tokens",
        "shared, trimmed": "the whole vocabulary",
        "int8": r"in floats for original-v. .*--storage float.*, got int8",
        "fp8, trimmed": "in floats .*, got fp8",
        "parents": r"parent token for original-v. .*heads\.parent_rank 0.*, got parent_rank 2",
        "shared, trimmed, parents": "parent token",
        "root": r"hidden state for original-v. \(native and embedded hold it.*heads\.root_rank 0.*root_rank 3",
        "features": r"last hidden state alone for original-v. .*heads\.feature_layers.*, got feature_layers \[3, 7\]",
        "shared, parents and root": "only input is the hidden state",
    },
    "vllm": {
        "trimmed": r"the whole vocabulary for vllm \(native and embedded hold it.* got 4 of 11 tokens",
        "int8": "in floats for vllm .*--storage float.*, got int8",
        "fp8, trimmed": "in floats",
        "parents": "parent token for vllm",
        "shared, trimmed, parents": "parent token",
        "root": "only input is the hidden state for vllm",
        "features": "last hidden state alone for vllm",
        "shared, parents and root": "only input is the hidden state",
    },
}
REFUSED["original-v2"] = REFUSED["original-v1"] | {
    **{kind: r"shared with lm_head .*original-v1 .*, got own" for kind in ("own", "one head", "two blocks")},
    **{kind: "shared with lm_head" for kind in ("no bias", "no bias, two blocks", "bfloat16")},
    "shared, two blocks": "one residual block per head for original-v2 .*, got 2",
}


def made(kind: str) -> MedusaHeads:
    storage, arguments = KINDS[kind]
    heads = MedusaHeads(HIDDEN, VOCAB, **{"num_heads": 3, **arguments})
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return heads if storage == "float" else heads.quantized(storage)


@pytest.fixture
def base(tmp_path: Path, tiny_llama: LlamaForCausalLM) -> Path:
    tiny_llama.save_pretrained(tmp_path / "base")
    (tmp_path / "base" / "tokenizer.json").write_text("{}")
    (tmp_path / "base" / "modeling_own.py").write_text("raise SystemExit")
    return tmp_path / "base"


@pytest.fixture
def checkpoint(tmp_path: Path, base: Path) -> Callable[..., Path]:
    def write(kind: str) -> Path:
        write_heads(made(kind), tmp_path / "heads", base_model="../base")
        (tmp_path / "heads" / "README.md").write_text("the card")
        (tmp_path / "heads" / "medusa_tree.json").write_text("[[0]]")
        (tmp_path / "heads" / "calibration.json").write_text("{}")
        return tmp_path / "heads"

    return write


def logits(heads: MedusaHeads, lm_head: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    """The paper's formula over all of V, [K, B, V]; what is never proposed has -inf."""
    found = []
    for k in range(heads.num_heads):
        state = hidden
        for layer in range(heads.num_layers):
            bias = 0 if heads.b1 is None else heads.b1[k, layer].float()
            state = state + F.silu(state @ heads.w1[k, layer].float().T + bias)
        if heads.w2 is None:
            weight = lm_head if heads.token_map is None else lm_head[heads.token_map]
        else:
            weight = heads.w2[k].float() * (1 if heads.w2_scale is None else heads.w2_scale[k, :, None])
        whole = torch.full((len(hidden), VOCAB), float("-inf"))
        whole[:, torch.arange(VOCAB) if heads.token_map is None else heads.token_map] = state @ weight.T
        found.append(whole)
    return torch.stack(found)


HIDDEN_STATES = torch.randn(6, HIDDEN, generator=torch.Generator().manual_seed(8))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_heads_drafts_the_same_in_every_format(
    tmp_path: Path, checkpoint: Callable[..., Path], tiny_llama: LlamaForCausalLM, kind: str, target: Any
) -> None:
    source, out = checkpoint(kind), tmp_path / "out"
    message = REFUSED.get(target, {}).get(kind)
    if message is not None:
        with pytest.raises(ValueError, match=rf"^heads: expected .*{message}"):
            export(source, out, target)
        assert sorted(entry.name for entry in tmp_path.iterdir()) == ["base", "heads"]
        return
    done = export(source, out, target, base_model="someone/base" if target == "hub" else None)
    assert (done.folder, done.format) == (out, target)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["base", "heads", "out"]
    read = read_heads(out)
    assert read.notes == []
    assert read.format == {
        "native": "original",
        "hub": "original",
        "original-v1": "original",
        "original-v2": "original",
    }.get(target, target)
    assert read.base_model == done.base_model
    assert done.base_model == {"embedded": str(out), "hub": "someone/base"}.get(target, str(tmp_path / "base"))
    trimmed = target == "vllm" and kind == "shared, trimmed"  # written with the whole lm_head
    heads, lm_head = made("shared" if trimmed else kind), tiny_llama.lm_head.weight.detach()
    if target in ("native", "hub", "embedded"):
        before, after = heads.state_dict(), read.heads.state_dict()
        assert before.keys() == after.keys()
        for name, tensor in before.items():
            assert after[name].dtype == tensor.dtype
            assert torch.equal(after[name].float(), tensor.float()), name
    found, expected = (logits(of, lm_head, HIDDEN_STATES) for of in (read.heads, heads))
    if (read.heads.token_map is None) == (heads.token_map is None):
        assert torch.equal(found, expected)
    else:  # rows in another order may be added up in another one
        assert torch.allclose(found, expected, atol=1e-5)
    if heads.w1.dtype == torch.float32:
        best, proposed = (
            found.propose(
                HIDDEN_STATES.repeat(1, 1 + len(found.feature_layers)),
                3,
                tiny_llama.lm_head if found.shared_projection else None,
                root_embedding=HIDDEN_STATES.flip(0) if found.root_rank else None,
            )
            for found in (heads, read.heads)
        )
        assert torch.equal(best[1], proposed[1])
    says = "> The heads here have all 11 tokens. All figures below are of heads with 4 of the tokens.\n\n"
    card = (out / "README.md").read_text()
    assert card == says * trimmed + "the card" or (target == "hub" and "\nthe card\n\n" in card)
    assert (out / "medusa_tree.json").read_text() == "[[0]]"
    assert not (out / "calibration.json").exists()


# Which programs can read heads of a kind, with the arguments of the export that writes them; by docs/export.md.
V1, V2 = "--format original-v1", "--format original-v2"
SAFE, FLOATS = " --file safetensors", " --storage float"
READABLE = {
    "own": {"vLLM": "--format vllm", "text-generation-inference": V1 + SAFE, "TensorRT-LLM": V1},
    "shared": {"vLLM": "--format vllm", "text-generation-inference": V2 + SAFE, "TensorRT-LLM": V1},
    "shared, two blocks": {"vLLM": "--format vllm", "text-generation-inference": V1 + SAFE, "TensorRT-LLM": V1},
    "int8": {
        "vLLM": "--format vllm" + FLOATS,
        "text-generation-inference": V1 + SAFE + FLOATS,
        "TensorRT-LLM": V1 + FLOATS,
    },
    "shared, trimmed": {"vLLM": "--format vllm"},
    "trimmed": {},
    "fp8, trimmed": {},
    "parents": {},
    "root": {},
}


@pytest.mark.parametrize("kind", READABLE)
def test_programs_that_can_read_heads_are_named_and_their_exports_work(
    kind: str, tmp_path: Path, checkpoint: Callable[..., Path]
) -> None:
    found = {reader.program.split()[0]: reader for reader in readers(made(kind))}
    assert {name: reader.options for name, reader in found.items() if reader.options is not None} == READABLE[kind]
    for name, reader in found.items():
        assert (reader.reason == "") == (reader.options is not None)
        if reader.options is not None:
            options = dict(zip(*[iter(reader.options.replace("--", "").split())] * 2, strict=True))
            export(checkpoint(kind), tmp_path / name, **options)  # type: ignore[arg-type]


class TestVllm:
    @pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in REFUSED["vllm"]])
    def test_vllms_loader_finds_every_parameter(
        self, tmp_path: Path, checkpoint: Callable[..., Path], tiny_llama: LlamaForCausalLM, kind: str
    ) -> None:
        """As in vLLM's source: every parameter that the config asks for is in the file."""
        export(checkpoint(kind), tmp_path / "out", "vllm")
        config = json.loads((tmp_path / "out" / "config.json").read_text())
        tensors = load_file(tmp_path / "out" / "model.safetensors")
        assert config["model_type"] == "medusa"
        assert config["architectures"] == ["MedusaModel"]
        assert [key for key in config if "num" in key and "heads" in key] == ["num_heads"]
        assert [key for key in config if "num" in key and "layers" in key] == ["num_hidden_layers"]
        # vLLM's loader does not count a token map as initialised, and raises for any map.
        assert "token_map" not in tensors
        assert config["truncated_vocab_size"] is None
        size = config["vocab_size"]
        wanted = {}
        for k in range(config["num_heads"]):
            for layer in range(config["num_hidden_layers"]):
                wanted[f"blocks.{k}.layers.{layer}.weight"] = (HIDDEN, HIDDEN)
                if config["medusa_fc_bias"]:
                    wanted[f"blocks.{k}.layers.{layer}.bias"] = (HIDDEN,)
            wanted["lm_head.weight" if config["original_lm_head"] else f"lm_heads.{k}.weight"] = (size, HIDDEN)
        assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == wanted
        whole = "shared" if kind == "shared, trimmed" else kind
        expected = logits(made(whole), tiny_llama.lm_head.weight.detach(), HIDDEN_STATES).argmax(-1)
        for k in range(config["num_heads"]):
            state = HIDDEN_STATES
            for layer in range(config["num_hidden_layers"]):
                name = f"blocks.{k}.layers.{layer}"
                bias = tensors[f"{name}.bias"].float() if config["medusa_fc_bias"] else None
                state = state + F.silu(F.linear(state, tensors[f"{name}.weight"].float(), bias))
            weight = tensors["lm_head.weight" if config["original_lm_head"] else f"lm_heads.{k}.weight"].float()
            assert torch.equal((state @ weight.T).argmax(-1), expected[k])

    def test_the_launch_line_survives_a_shell(self, tmp_path: Path, base: Path) -> None:
        name = "heads of 'mine' $HOME; `rm`"
        write_heads(made("two blocks"), tmp_path / "from", base_model="../base")
        done = export(tmp_path / "from", tmp_path / name, "vllm")
        assert done.launch is not None
        shown = subprocess.run(
            ["/bin/sh", "-c", f'vllm() {{ printf "%s\\0" "$@"; }}; {done.launch}'], capture_output=True, check=True
        ).stdout.decode()
        *words, speculation, _ = shown.split("\0")
        assert words == ["serve", str(base), "--speculative-config"]
        assert json.loads(speculation) == {
            "method": "medusa",
            "model": str(tmp_path / name),
            "num_speculative_tokens": 3,
        }

    @pytest.fixture
    def published(self, tmp_path: Path) -> Callable[..., Path]:
        """A folder as other projects write it, tensor by tensor."""

        def write(tensors: dict[str, torch.Tensor], **config: Any) -> Path:
            (tmp_path / "v").mkdir()
            sizes = {"model_type": "medusa", "hidden_size": HIDDEN, "vocab_size": VOCAB, "num_heads": 2}
            (tmp_path / "v" / "config.json").write_text(json.dumps(sizes | {"num_hidden_layers": 1} | config))
            save_file(tensors, tmp_path / "v" / "model.safetensors")
            return tmp_path / "v"

        return write

    BLOCKS = {f"blocks.{k}.layers.0.weight": torch.full((HIDDEN, HIDDEN), k + 1.0) for k in range(2)}  # noqa: RUF012
    OWN = {f"lm_heads.{k}.weight": torch.arange(88.0).view(VOCAB, HIDDEN) * (k + 1) for k in range(2)}  # noqa: RUF012

    def test_a_published_folder_is_read(self, published: Callable[..., Path]) -> None:
        tensors = {f"medusa_heads.{name}": tensor for name, tensor in (self.BLOCKS | self.OWN).items()}
        read = read_heads(published(tensors, truncated_vocab_size=None, architectures=["MedusaModel"]))
        assert (read.format, read.base_model, read.notes) == ("vllm", None, [])
        assert (read.heads.num_heads, read.heads.num_layers, read.heads.b1) == (2, 1, None)
        assert torch.equal(read.heads.w1[1, 0], torch.full((HIDDEN, HIDDEN), 2.0))
        assert torch.equal(read.heads.w2[1], self.OWN["lm_heads.1.weight"])  # type: ignore[index]

    def test_a_token_map_that_vllm_ignores_is_ignored(self, published: Callable[..., Path]) -> None:
        read = read_heads(published(self.BLOCKS | self.OWN | {"token_map": MAP}, truncated_vocab_size=None))
        assert read.heads.token_map is None
        assert read.heads.w2.shape == (2, VOCAB, HIDDEN)  # type: ignore[union-attr]

    def test_one_projection_shared_by_all_heads(self, published: Callable[..., Path]) -> None:
        tensors = self.BLOCKS | {"lm_heads.0.weight": self.OWN["lm_heads.1.weight"]}
        read = read_heads(published(tensors, original_lm_head=True))
        for k in range(2):
            assert torch.equal(read.heads.w2[k], self.OWN["lm_heads.1.weight"])  # type: ignore[index]

    @pytest.mark.parametrize(
        ("tensors", "message"),
        [
            (BLOCKS, r"the projection lm_heads\.0\.weight is missing"),
            (BLOCKS | OWN | {"fc.weight": torch.ones(1)}, r"fc\.weight in .*: expected names that vLLM reads"),
            (BLOCKS | {"lm_heads.0.weight": OWN["lm_heads.0.weight"]}, r"missing 1\.1\.weight"),
        ],
    )
    def test_damaged_files_are_named(
        self, published: Callable[..., Path], tensors: dict[str, torch.Tensor], message: str
    ) -> None:
        with pytest.raises(ValueError, match=message):
            read_heads(published(tensors))

    def test_a_trimmed_vocabulary_is_refused(self, published: Callable[..., Path]) -> None:
        folder = published(self.BLOCKS | self.OWN | {"token_map": MAP.int()}, truncated_vocab_size=4)
        with pytest.raises(ValueError, match=r"^truncated_vocab_size: expected the whole vocabulary of 11, got 4 in "):
            read_heads(folder)


class TestOriginal:
    @pytest.mark.parametrize("file", ["pt", "safetensors"])
    @pytest.mark.parametrize("kind", ["own", "no bias", "shared", "shared, no bias"])
    def test_the_original_projects_modules_load_all_of_version_1(
        self, tmp_path: Path, checkpoint: Callable[..., Path], tiny_llama: LlamaForCausalLM, kind: str, file: Any
    ) -> None:
        class Block(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.linear = nn.Linear(HIDDEN, HIDDEN)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return x + F.silu(self.linear(x))

        export(checkpoint(kind), tmp_path / "out", "original-v1", file=file)
        heads = nn.ModuleList(nn.Sequential(Block(), nn.Linear(HIDDEN, VOCAB, bias=False)) for _ in range(3))
        path = tmp_path / "out" / f"medusa_lm_head.{file}"
        heads.load_state_dict(torch.load(path, weights_only=True) if file == "pt" else load_file(path), strict=True)
        expected = logits(made(kind), tiny_llama.lm_head.weight.detach(), HIDDEN_STATES)
        for k, head in enumerate(heads):
            assert torch.allclose(head(HIDDEN_STATES), expected[k], atol=1e-5)
        config = json.loads((tmp_path / "out" / "config.json").read_text())
        assert (config["medusa_num_heads"], config["medusa_num_layers"]) == (3, 1)
        assert not {"version", "architectures", "medusa_storage"} & config.keys()

    def test_version_2_has_only_blocks_and_biases(self, tmp_path: Path, checkpoint: Callable[..., Path]) -> None:
        export(checkpoint("shared, no bias"), tmp_path / "out", "original-v2")
        tensors = torch.load(tmp_path / "out" / "medusa_lm_head.pt", weights_only=True)
        assert set(tensors) == {f"{k}.0.linear.{name}" for k in range(3) for name in ("weight", "bias")}
        assert not any(tensors[f"{k}.0.linear.bias"].any() for k in range(3))
        assert json.loads((tmp_path / "out" / "config.json").read_text())["version"] == "2"

    def test_a_shared_lm_head_is_written_once(self, tmp_path: Path, checkpoint: Callable[..., Path]) -> None:
        export(checkpoint("shared"), tmp_path / "out", "original-v1")
        tensors = torch.load(tmp_path / "out" / "medusa_lm_head.pt", weights_only=True)
        assert len({tensors[f"{k}.1.weight"].data_ptr() for k in range(3)}) == 1

    @pytest.mark.parametrize("kind", ["own", "shared"])
    def test_text_generation_inference_finds_the_tokenizer(
        self, tmp_path: Path, checkpoint: Callable[..., Path], base: Path, kind: str
    ) -> None:
        (base / "tokenizer_config.json").write_text('{"a": 1}')
        (base / "special.json").write_text("{}")
        export(checkpoint(kind), tmp_path / "out", "original-v1", file="safetensors")
        names = {"config.json", "medusa_lm_head.safetensors", "README.md", "medusa_tree.json"}
        found = {entry.name for entry in (tmp_path / "out").iterdir()}
        assert found == names | {"tokenizer.json", "tokenizer_config.json"}
        assert (tmp_path / "out" / "tokenizer_config.json").read_text() == '{"a": 1}'
        export(checkpoint(kind), tmp_path / "pt", "original-v1")
        assert not (tmp_path / "pt" / "tokenizer.json").exists()


class TestEmbedded:
    @pytest.mark.parametrize("shards", ["1GB", "2KB"])
    def test_the_base_model_is_included(
        self, tmp_path: Path, checkpoint: Callable[..., Path], tiny_llama: LlamaForCausalLM, shards: str
    ) -> None:
        source = checkpoint("own")
        shutil.rmtree(tmp_path / "base")
        tiny_llama.save_pretrained(tmp_path / "base", max_shard_size=shards)
        assert (len(list((tmp_path / "base").glob("*.safetensors"))) > 1) == (shards == "2KB")
        (tmp_path / "base" / "tokenizer.json").write_text("{}")
        (tmp_path / "base" / "own.py").touch()
        export(source, tmp_path / "out", "embedded")
        shutil.rmtree(tmp_path / "base")
        shutil.rmtree(source)
        with MedusaModel.from_pretrained(tmp_path / "out", dtype=torch.float32) as model:
            ids = torch.tensor([[1, 5, 9]])
            expected = tiny_llama.generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=0)
            assert torch.equal(model.generate(ids, max_new_tokens=8).sequences, expected)
        assert (tmp_path / "out" / "tokenizer.json").is_file()
        assert not (tmp_path / "out" / "own.py").exists()

    def test_heads_already_in_the_model_are_replaced(self, tmp_path: Path, checkpoint: Callable[..., Path]) -> None:
        export(checkpoint("shared, two blocks"), tmp_path / "first", "embedded")
        # All in one file, as the paper's trainer writes it.
        tensors = {k: t for file in (tmp_path / "first").glob("*.safetensors") for k, t in load_file(file).items()}
        for file in [*(tmp_path / "first").glob("*.safetensors"), *(tmp_path / "first").glob("*.index.json")]:
            file.unlink()
        save_file(tensors, tmp_path / "first" / "model.safetensors", metadata={"format": "pt"})
        export(tmp_path / "first", tmp_path / "second", "embedded", dtype=torch.bfloat16)
        held = [name for file in (tmp_path / "second").glob("*.safetensors") for name in load_file(file)]
        assert len(held) == len(set(held)) == len(tensors)
        read = read_heads(tmp_path / "second").heads
        assert torch.equal(read.w1, made("shared, two blocks").w1.bfloat16())
        config = json.loads((tmp_path / "second" / "config.json").read_text())
        assert (config["medusa_num_layers"], config["version"], config["model_type"]) == (2, "2", "llama")

    def test_a_base_model_without_safetensors_is_refused(
        self, tmp_path: Path, checkpoint: Callable[..., Path], base: Path
    ) -> None:
        (base / "model.safetensors").rename(base / "weights.safetensors")
        with pytest.raises(ValueError, match=r"^base_model: expected a model's safetensors files for embedded, got no"):
            export(checkpoint("own"), tmp_path / "out", "embedded")
        assert not (tmp_path / "out").exists()

    def test_an_adapter_next_to_the_model_is_refused(
        self, tmp_path: Path, checkpoint: Callable[..., Path], base: Path
    ) -> None:
        (base / "adapter_config.json").write_text("{}")
        for kind, target in (("own", "embedded"), ("shared", "original-v1")):
            with pytest.raises(ValueError, match=r"^base_model: expected .*, got an adapter \(merge it first\) in"):
                export(checkpoint(kind), tmp_path / "out", target)  # type: ignore[arg-type]
        assert not (tmp_path / "out").exists()


class TestSharedLmHead:
    def test_a_shared_lm_head_is_taken_from_tied_embeddings(
        self, tmp_path: Path, checkpoint: Callable[..., Path], base: Path
    ) -> None:
        tensors = load_file(base / "model.safetensors")
        embeddings = tensors["model.embed_tokens.weight"]
        del tensors["lm_head.weight"]
        save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(ValueError, match=r"^base_model: the weight files of .* have no lm_head"):
            export(checkpoint("shared"), tmp_path / "out", "vllm")
        config = json.loads((base / "config.json").read_text())
        (base / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
        for number, prefix in enumerate(("model.", "")):  # the decoder alone is saved without the prefix
            named = {prefix + name.removeprefix("model."): tensor for name, tensor in tensors.items()}
            save_file(named, base / "model.safetensors", metadata={"format": "pt"})
            out = tmp_path / f"out-{number}"
            export(checkpoint("shared"), out, "vllm")
            assert torch.equal(load_file(out / "model.safetensors")["lm_head.weight"], embeddings)

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"lm_head.bias": torch.ones(VOCAB)}, r"a plain lm_head, got lm_head\.bias"),
            ({"lm_head.weight": torch.ones(VOCAB + 1, HIDDEN)}, r"an lm_head \[11, 8\] like the heads, got \[12, 8\]"),
            ({"lm_head.weight": torch.ones(VOCAB, HIDDEN, dtype=torch.int8)}, "an lm_head of floats, got torch.int8"),
        ],
    )
    def test_an_lm_head_of_another_kind_is_refused(
        self, tmp_path: Path, checkpoint: Callable[..., Path], base: Path, change: Any, message: str
    ) -> None:
        save_file(load_file(base / "model.safetensors") | change, base / "model.safetensors")
        with pytest.raises(ValueError, match=f"^base_model: expected {message}"):
            export(checkpoint("shared"), tmp_path / "out", "original-v1")
        assert not (tmp_path / "out").exists()

    @pytest.mark.parametrize("target", ["vllm", "original-v1"])
    def test_values_too_large_for_the_dtype_are_refused(
        self, tmp_path: Path, checkpoint: Callable[..., Path], base: Path, target: Any
    ) -> None:
        tensors = load_file(base / "model.safetensors")
        tensors["lm_head.weight"][3, 2] = 1e5
        save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(ValueError, match=r"^dtype: expected one that holds lm_head, got torch\.float16"):
            export(checkpoint("shared"), tmp_path / "out", target, dtype=torch.float16)
        tensors["lm_head.weight"][3, 2] = float("nan")
        save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(ValueError, match=r"^base_model: expected a finite lm_head, got NaN or Inf in"):
            export(checkpoint("shared"), tmp_path / "out", target)
        assert not (tmp_path / "out").exists()

    def test_neither_heads_nor_lm_head_are_rounded_unless_asked(
        self, tmp_path: Path, base: Path, tiny_llama: LlamaForCausalLM
    ) -> None:
        heads = MedusaHeads(HIDDEN, VOCAB, 1, shared_projection=True, dtype=torch.bfloat16)
        write_heads(heads, tmp_path / "heads", base_model=base)
        for dtype, expected in ((None, torch.float32), (torch.bfloat16, torch.bfloat16)):
            done = export(tmp_path / "heads", tmp_path / str(dtype), "vllm", dtype=dtype)
            found = load_file(done.folder / "model.safetensors")
            assert {tensor.dtype for tensor in found.values()} == {expected}
            assert torch.equal(found["lm_head.weight"], tiny_llama.lm_head.weight.to(expected))


class TestConversion:
    @pytest.mark.parametrize("storage", ["int8", "fp8"])
    def test_conversion_to_8_bits_and_back(self, tmp_path: Path, checkpoint: Callable[..., Path], storage: Any) -> None:
        stored = made("own").quantized(storage)
        export(checkpoint("own"), tmp_path / "small", "native", storage=storage)
        assert torch.equal(read_heads(tmp_path / "small").heads.w2.float(), stored.w2.float())  # type: ignore[union-attr]
        export(tmp_path / "small", tmp_path / "back", "vllm", storage="float")
        found = read_heads(tmp_path / "back").heads
        assert torch.equal(found.w2, stored.w2.float() * stored.w2_scale[..., None])  # type: ignore[arg-type, index, union-attr]
        assert torch.equal(found.w1, made("own").w1)

    @pytest.mark.parametrize(
        ("kind", "arguments", "message"),
        [
            ("int8", {"storage": "fp8"}, "heads: expected an own projection in floats, got one in int8"),
            ("own", {"storage": "int4"}, "storage: expected 'float', 'int8', 'fp8' or None, got 'int4'"),
            ("own", {"format": "trtllm"}, "format: expected one of native, hub, .*, got 'trtllm'"),
        ],
    )
    def test_impossible_conversions_are_refused(
        self, tmp_path: Path, checkpoint: Callable[..., Path], kind: str, arguments: Any, message: str
    ) -> None:
        with pytest.raises(ValueError, match=f"^{message}"):
            export(checkpoint(kind), tmp_path / "out", **{"format": "native"} | arguments)
        assert not (tmp_path / "out").exists()

    FRONT = "---\nlibrary_name: medusa-kernels\n---\n\n"

    @pytest.mark.parametrize("front", [FRONT, ""])
    def test_figures_of_float_heads_are_not_claimed_for_8_bit_heads(
        self, tmp_path: Path, checkpoint: Callable[..., Path], front: str
    ) -> None:
        source = checkpoint("own")
        (source / "README.md").write_text(front + "# Heads\n\n--- 63.1 % ---\n")
        (source / "measured.json").write_text("{}")
        kept = export(source, tmp_path / "bf16", "native", storage="float", dtype=torch.bfloat16)
        assert kept.notes == []
        assert (kept.folder / "measured.json").is_file()
        assert (kept.folder / "README.md").read_text() == (source / "README.md").read_text()
        done = export(source, tmp_path / "small", "native", storage="int8")
        assert not (done.folder / "measured.json").exists()
        said = "> The heads here have projections stored in int8. "
        said += "All figures below are of heads with projections stored in float.\n\n"
        assert (done.folder / "README.md").read_text() == front + said + "# Heads\n\n--- 63.1 % ---\n"
        words = (
            "heads with projections stored in float, and these have projections stored in int8: measured.json is left"
        )
        assert words in done.notes[0]
        assert (done.folder / "medusa_tree.json").read_text() == "[[0]]"


class TestFolder:
    def test_an_existing_folder_is_not_overwritten_unless_asked(
        self, tmp_path: Path, checkpoint: Callable[..., Path]
    ) -> None:
        source = checkpoint("own")
        export(source, tmp_path / "out", "vllm")
        with pytest.raises(ValueError, match=r"^folder: expected a new one \(or overwrite, --overwrite\), got"):
            export(source, tmp_path / "out", "original-v1")
        export(source, tmp_path / "out", "original-v1", overwrite=True)
        assert read_heads(tmp_path / "out").format == "original"
        assert not (tmp_path / "out" / "model.safetensors").exists()
        assert sorted(entry.name for entry in tmp_path.iterdir()) == ["base", "heads", "out"]

    def test_the_source_and_folders_without_checkpoints_are_never_overwritten(
        self, tmp_path: Path, checkpoint: Callable[..., Path], base: Path
    ) -> None:
        source = checkpoint("shared")
        for out in (source, tmp_path, base):
            with pytest.raises(ValueError, match=r"^folder: expected (another one than what is read|a checkpoint)"):
                export(source, out, "vllm", overwrite=True)
        (tmp_path / "photos").mkdir()
        (tmp_path / "photos" / "cat.jpg").touch()
        with pytest.raises(ValueError, match=r"^folder: expected a checkpoint of heads to overwrite"):
            export(source, tmp_path / "photos", "vllm", overwrite=True)
        assert (tmp_path / "photos" / "cat.jpg").exists()

    @pytest.mark.parametrize("entry", ["notes/", "model.safetensors", "a.json"])
    def test_other_files_next_to_heads_are_not_deleted(
        self, tmp_path: Path, checkpoint: Callable[..., Path], entry: str
    ) -> None:
        source = checkpoint("own")
        export(source, tmp_path / "out", "native")
        other = tmp_path / "out" / entry.rstrip("/")
        other.mkdir() if entry.endswith("/") else other.write_text("years of work")
        with pytest.raises(ValueError, match=rf"^folder: expected a checkpoint of heads alone .* {other.name} in it"):
            export(source, tmp_path / "out", "vllm", overwrite=True)
        assert other.exists()

    @pytest.mark.parametrize("target", ["embedded", "original-v1"])
    def test_a_full_disk_leaves_the_old_files(
        self, tmp_path: Path, checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, target: Any
    ) -> None:
        source = checkpoint("own")
        export(source, tmp_path / "out", "vllm")
        before = {file.name: file.read_bytes() for file in (tmp_path / "out").iterdir()}

        def full(*args: object, **kwargs: object) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr("medusa_decoding.checkpoints.tensor_files.save_file", full)
        monkeypatch.setattr(torch, "save", full)
        with pytest.raises(OSError, match="No space left"):
            export(source, tmp_path / "out", target, overwrite=True)
        assert {file.name: file.read_bytes() for file in (tmp_path / "out").iterdir()} == before
        assert sorted(entry.name for entry in tmp_path.iterdir()) == ["base", "heads", "out"]


class TestBaseModel:
    def test_names_and_revisions_are_copied(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("medusa_decoding.checkpoints.exporting.stated_sizes", lambda *asked: {})
        write_heads(made("own"), tmp_path / "heads", base_model="someone/base", base_revision="v2")
        cases: list[tuple[dict[str, Any], str, str | None]] = [
            ({}, "someone/base", "v2"),
            ({"base_model": "other/base"}, "other/base", None),
            ({"base_model": "other/base", "base_revision": "r"}, "other/base", "r"),
            ({"base_model": "someone/base"}, "someone/base", "v2"),
            ({"base_revision": "v3"}, "someone/base", "v3"),
        ]
        for target in ("native", "vllm", "original-v1"):
            for number, (arguments, base, revision) in enumerate(cases):
                out = tmp_path / f"{target}-{number}"
                export(tmp_path / "heads", out, target, **arguments)  # type: ignore[arg-type]
                read = read_heads(out, vocab_size=VOCAB)
                assert (read.base_model, read.base_revision) == (base, revision)

    def test_a_base_model_is_required(self, tmp_path: Path, checkpoint: Callable[..., Path]) -> None:
        (checkpoint("own") / "config.json").unlink()
        with pytest.raises(ValueError, match=r"^base_model: expected a folder or hub id, because .* names none"):
            export(tmp_path / "heads", tmp_path / "out", "vllm")

    @pytest.mark.parametrize("target", ["native", "embedded", "vllm"])
    @pytest.mark.parametrize("given", [False, True])
    def test_a_base_model_of_other_sizes_is_refused(self, tmp_path: Path, base: Path, target: Any, given: bool) -> None:
        for sizes, message in (
            ((HIDDEN + 2, VOCAB), "hidden size 8 .the base model's., got 10"),
            ((HIDDEN, VOCAB + 1), r"(vocab_size 12 like the heads .* got 11|11 rows .the base model's vocabulary.)"),
        ):
            write_heads(MedusaHeads(*sizes, 2), tmp_path / "heads", base_model="x/y" if given else base)
            with pytest.raises(ValueError, match=f"expected {message}"):
                export(tmp_path / "heads", tmp_path / "out", target, base_model=base if given else None)
            assert not (tmp_path / "out").exists()

    @pytest.mark.parametrize("name", ["../gone", "./gone", "~/gone", "runs/a/model"])
    def test_a_missing_path_is_not_taken_for_a_hub_id(self, tmp_path: Path, base: Path, name: str) -> None:
        write_heads(made("own"), tmp_path / "heads", base_model=name)
        write_heads(made("own"), tmp_path / "sound", base_model=base)
        for heads, arguments in (("heads", {}), ("sound", {"base_model": name})):
            with pytest.raises(ValueError, match=rf"^base_model: expected a hub id or a folder that .*, got '{name}'"):
                export(tmp_path / heads, tmp_path / "out", "vllm", **arguments)  # type: ignore[arg-type]
        assert not (tmp_path / "out").exists()

    def test_a_path_of_another_machine_is_kept(self, tmp_path: Path) -> None:
        write_heads(made("own"), tmp_path / "heads", base_model="/models/of/another/machine")
        assert export(tmp_path / "heads", tmp_path / "out", "vllm").base_model == "/models/of/another/machine"

    def test_base_weights_are_fetched_at_their_revision(
        self, tmp_path: Path, base: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        asked = []
        folders = {"someone/base": base, "someone/heads": tmp_path / "heads"}

        def fetch(name: str, **arguments: Any) -> str:
            wanted = {"someone/base": "LICENSE*", "someone/heads": "README.md"}
            assert wanted[name] in arguments["allow_patterns"]
            asked.append((name, arguments["revision"]))
            return str(folders[name])

        monkeypatch.setattr("medusa_decoding.checkpoints.reading.snapshot_download", fetch)
        write_heads(made("shared"), tmp_path / "heads", base_model="someone/base", base_revision="v2")
        export("someone/heads", tmp_path / "out", "vllm", revision="r1")
        assert asked == [("someone/heads", "r1"), ("someone/base", "v2")]
