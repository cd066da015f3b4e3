"""The base model's revision: written with heads, read, and requested when the base model is fetched."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from medusa_decoding.checkpoints import load_base_model, pretrained, read_heads, write_heads
from medusa_decoding.checkpoints.reading import stated_base_model
from medusa_decoding.heads import MedusaHeads

ALWAYS = {"output_loading_info": True, "trust_remote_code": False}


class AskedError(BaseException):
    """An error that no library converts into another one."""


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, Any]]]:
    """The files requested when a base model is loaded: name and keyword arguments."""
    calls: list[tuple[str, dict[str, Any]]] = []

    def from_hub(name: str, file: str, **kwargs: Any) -> None:
        calls.append((str(name), kwargs))
        raise AskedError

    monkeypatch.setattr(pretrained, "cached_file", from_hub)
    return calls


@pytest.mark.parametrize(
    ("recorded", "base_model", "kwargs", "expected"),
    [
        ("v2", None, {}, ("someone/base", {"revision": "v2"})),
        ("v2", "someone/base", {}, ("someone/base", {"revision": "v2"})),
        ("v2", "other/base", {}, ("other/base", {})),
        ("v2", None, {"revision": "main"}, ("someone/base", {"revision": "main"})),
        (None, None, {}, ("someone/base", {})),
    ],
)
def test_the_recorded_revision_is_fetched_unless_overridden(
    tmp_path: Path, asked: list[Any], recorded: str | None, base_model: str | None, kwargs: Any, expected: Any
) -> None:
    write_heads(MedusaHeads(6, 11, 2), tmp_path / "heads", base_model="someone/base", base_revision=recorded)
    checkpoint = read_heads(tmp_path / "heads")
    assert checkpoint.base_revision == recorded
    assert stated_base_model(tmp_path / "heads") == ("someone/base", recorded)
    with pytest.raises(AskedError):
        load_base_model(checkpoint, base_model, **kwargs)
    assert asked == [expected]


def test_heads_that_share_lm_head_ask_for_the_vocabulary_at_that_revision(tmp_path: Path, asked: list[Any]) -> None:
    heads = MedusaHeads(6, 11, 2, shared_projection=True)
    write_heads(heads, tmp_path / "heads", base_model="someone/base", base_revision="v2")
    config = json.loads((tmp_path / "heads" / "config.json").read_text())
    del config["vocab_size"]
    (tmp_path / "heads" / "config.json").write_text(json.dumps(config))
    with pytest.raises(AskedError):
        read_heads(tmp_path / "heads")
    assert asked == [("someone/base", {"revision": "v2"})]


def test_an_adapter_names_the_revision_of_its_model(tmp_path: Path, asked: list[Any]) -> None:
    (tmp_path / "adapter").mkdir()
    settings = {"base_model_name_or_path": "someone/base", "revision": "v3"}
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(settings))
    write_heads(MedusaHeads(6, 11, 2), tmp_path / "heads", base_model="../adapter")
    with pytest.raises(AskedError):
        load_base_model(read_heads(tmp_path / "heads"))
    assert asked == [("someone/base", {"revision": "v3"})]


class TestTheWeights:
    """Weights come from the same revision as the config: transformers' own arguments reach both."""

    @pytest.fixture
    def loaded(self, tmp_path: Path, tiny_llama: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
        """What the model's own `from_pretrained` is asked for; its config is read from a folder."""
        tiny_llama.save_pretrained(tmp_path / "base")
        calls: list[Any] = []

        def from_pretrained(cls: type, path: object, **kwargs: Any) -> None:
            del kwargs["config"]
            calls.append((str(path), kwargs))
            raise AskedError

        monkeypatch.setattr(LlamaForCausalLM, "from_pretrained", classmethod(from_pretrained))
        return calls

    @pytest.mark.parametrize(
        ("kwargs", "expected"),
        [
            ({}, {"revision": "v2"}),
            ({"revision": "main"}, {"revision": "main"}),
            (
                {"token": "t", "cache_dir": "c", "local_files_only": True, "force_download": False, "proxies": {}},
                {
                    "revision": "v2",
                    "token": "t",
                    "cache_dir": "c",
                    "local_files_only": True,
                    "force_download": False,
                    "proxies": {},
                },
            ),
        ],
    )
    def test_weights_are_those_of_the_recorded_revision(
        self, tmp_path: Path, loaded: list[Any], kwargs: Any, expected: Any
    ) -> None:
        base = str((tmp_path / "base").resolve())
        write_heads(MedusaHeads(8, 11, 2), tmp_path / "heads", base_model=base, base_revision="v2")
        with pytest.raises(AskedError):
            load_base_model(read_heads(tmp_path / "heads"), dtype=torch.bfloat16, **kwargs)
        assert loaded == [(base, ALWAYS | {"dtype": torch.bfloat16} | expected)]


@pytest.mark.parametrize(
    "revision",
    ["/dev/zero", "refs/../../x", 5, "-x"],
)
def test_a_revision_that_is_a_path_is_refused_before_the_hub_is_asked(
    tmp_path: Path, asked: list[Any], revision: Any
) -> None:
    write_heads(MedusaHeads(6, 11, 2), tmp_path / "heads", base_model="someone/base")
    checkpoint = read_heads(tmp_path / "heads")
    for config in ({}, {"config": LlamaConfig(hidden_size=6, vocab_size=11, num_attention_heads=2)}):
        with pytest.raises(ValueError, match=r"revision: expected a branch, tag or commit on the hub, got"):
            load_base_model(checkpoint, revision=revision, **config)
    with pytest.raises(ValueError, match=r"^revision: expected a branch, tag or commit on the hub, got"):
        read_heads("someone/heads", revision=revision)
    assert asked == []
