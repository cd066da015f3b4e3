"""The vLLM plugin against a stand-in for vLLM's runner. With vLLM itself: `make test-vllm`."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from medusa_decoding.checkpoints import write_heads
from medusa_decoding.decode.arrange import arrange
from medusa_decoding.decode.propose import propose
from medusa_decoding.decode.tree_tensors import TreeTensors
from medusa_decoding.heads import MedusaHeads
from medusa_decoding.trees.tree import Tree

sys.path.insert(0, str(Path(__file__).parents[2] / "integrations" / "vllm"))
from medusa_vllm import MedusaProposer, proposer, register

H, V = 16, 96
KINDS: dict[str, dict[str, Any]] = {
    "shared": {"shared_projection": True},
    "own, two blocks": {"num_layers": 2},
    "shared, trimmed, root": {"shared_projection": True, "token_map": torch.arange(0, V, 2), "root_rank": 4},
    "own, trimmed, root and parent": {"token_map": torch.arange(1, V, 2), "root_rank": 4, "parent_rank": 8},
    "shared, parent": {"shared_projection": True, "parent_rank": 8},
}
FEATURES = {"feature_layers": (1,)}


class Runner:
    """What the plugin uses of vLLM's runner: it calls the proposer without hidden states."""

    def __init__(self, drafter: Any) -> None:
        self.drafter = drafter

    def propose_draft_token_ids(self, scheduler_output, sampled_token_ids, sample_hidden_states, spec_decode_metadata):
        return self.drafter.propose(sampled_token_ids, None, None, slot_mappings=None)


class Target(torch.nn.Module):
    """A served model: its embedding and its projection."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.lm_head = torch.nn.Embedding(V, H), torch.nn.Linear(H, V, bias=False)

    def embed_input_ids(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.embedding(tokens)

    def compute_logits(self, states: torch.Tensor) -> torch.Tensor:
        assert states.dim() == 2  # vLLM's takes rows only
        return self.lm_head(states)


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> type[Runner]:
    """Install a module of vLLM's with a runner that nothing has wrapped."""
    module, fresh = ModuleType("vllm.v1.worker.gpu_model_runner"), type("GPUModelRunner", (Runner,), {})
    module.GPUModelRunner = fresh  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__="0.99.0"))
    return fresh


@pytest.fixture
def served(tmp_path: Path) -> SimpleNamespace:
    """Write heads with random weights of a kind; return vLLM's configuration that names them."""
    torch.manual_seed(0)

    def model(kind: str = "shared") -> SimpleNamespace:
        heads = MedusaHeads(H, V, 3, **({"num_layers": 1} | KINDS.get(kind, FEATURES)))
        for weight in heads.parameters():
            torch.nn.init.normal_(weight, std=0.5)
        shutil.rmtree(tmp_path / "heads", ignore_errors=True)
        write_heads(heads.requires_grad_(False), tmp_path / "heads", base_model="base")
        sizes = {"get_hidden_size": lambda: H, "get_vocab_size": lambda: V, "dtype": torch.float32, "model": "base"}
        return SimpleNamespace(
            additional_config={"medusa_heads": str(tmp_path / "heads")},
            model_config=SimpleNamespace(**sizes, hf_text_config=SimpleNamespace(num_hidden_layers=2)),
            speculative_config=SimpleNamespace(num_speculative_tokens=3),
            parallel_config=SimpleNamespace(pipeline_parallel_size=1),
        )

    return SimpleNamespace(model=model)


def drafts(
    runner: Runner, sampled: list[list[int]], states: torch.Tensor, counts: list[int] | None, length: int = 3
) -> list[list[int]]:
    """Have the runner propose after a step that verified `counts` draft tokens per request."""
    return runner.propose_draft_token_ids(
        SimpleNamespace(num_spec_tokens_to_schedule=length),
        sampled,
        sample_hidden_states=states,
        spec_decode_metadata=None if counts is None else SimpleNamespace(num_draft_tokens=counts),
    )


@pytest.mark.parametrize("kind", KINDS)
def test_drafts_are_the_chain_of_the_library(runner, served, kind, monkeypatch):
    target, drafter = Target(), MedusaProposer(served.model(kind))
    drafter.load_model(target)
    monkeypatch.setattr(proposer, "LOGITS", 2 * 3 * V)  # two rows at once
    hidden, root = torch.randn(5, H), torch.randint(V, (5,))
    state, tree = SimpleNamespace(hidden=hidden, root=root), TreeTensors.from_tree(Tree.chain(3), hidden.device)
    found = propose(state, drafter.heads, target.lm_head, tree, embed_tokens=target.embedding)
    expected = arrange(state, found, tree)[0]
    assert drafts(runner(drafter), root[:, None].tolist(), hidden, None) == expected[:, 1:].tolist()


def test_each_request_is_drafted_for_from_its_last_accepted_position(runner, served):
    drafter = MedusaProposer(served.model("own, trimmed, root and parent"))
    drafter.load_model(Target())
    states = torch.randn(9, H)
    # Requests: all 3 draft tokens accepted; still in its prompt; 1 of 2 accepted; no draft tokens.
    sampled, counts, rows = [[5, 6, 7, 8], [], [9, 10], [11]], [3, 0, 2, 0], [3, 6, 8]
    chain = drafter.chain(states[rows], torch.tensor([8, 10, 11])).tolist()
    assert len({tuple(one) for one in drafter.chain(states, torch.zeros(9, dtype=torch.int64)).tolist()}) > 6
    assert drafts(runner(drafter), sampled, states, counts) == [chain[0], [], chain[1], chain[2]]
    shorter = [[chain[0][0]], [], [chain[1][0]], [chain[2][0]]]
    assert drafts(runner(drafter), sampled, states, counts, length=1) == shorter
    assert drafts(runner(drafter), [[], []], states[:2], None) == [[], []]
    with pytest.raises(RuntimeError, match=r"expected hidden states of 4 requests .*got 8 and draft tokens \[3, 0, 2"):
        drafts(runner(drafter), sampled, states[:8], counts)
    with pytest.raises(RuntimeError, match="got none"):
        drafter.propose(sampled)


def test_the_runner_is_wrapped_once_and_other_drafters_are_left_alone(runner, served):
    register()
    wrapped = runner.propose_draft_token_ids
    MedusaProposer(served.model())
    register()
    assert runner.propose_draft_token_ids is wrapped is not Runner.propose_draft_token_ids
    other = SimpleNamespace(propose=lambda sampled, *_, **__: sampled)
    assert drafts(runner(other), [[1]], torch.zeros(1, H), None) == [[1]]


def test_a_changed_runner_is_refused_by_the_proposer_and_reported_by_the_plugin(runner, served, caplog):
    runner.propose_draft_token_ids = lambda self, scheduler_output, hidden: None
    register()
    assert "vLLM 0.99.0" in caplog.text
    with pytest.raises(RuntimeError, match=r"without sample_hidden_states, spec_decode_metadata: \(self, sch"):
        MedusaProposer(served.model())


def test_heads_that_do_not_fit_are_refused_before_the_model_is_loaded(runner, served, tmp_path, caplog):
    def refused(message: str, **changes: Any) -> None:
        config = served.model("shared, trimmed, root")
        for name, value in changes.items():
            setattr(config if hasattr(config, name) else config.model_config, name, value)
        with pytest.raises(ValueError, match=message):
            MedusaProposer(config)

    refused("expected the folder or hub id", additional_config={})
    refused("hidden size 8", get_hidden_size=lambda: 8)
    refused("expected at most 3", speculative_config=SimpleNamespace(num_speculative_tokens=4))
    refused("pipeline_parallel_size: expected 1", parallel_config=SimpleNamespace(pipeline_parallel_size=2))
    with pytest.raises(ValueError, match=r"last hidden state alone, .* got feature_layers \[1\]"):
        MedusaProposer(served.model("features"))
    config = served.model()
    config.model_config.model = "another"
    MedusaProposer(config)
    assert "must be the same model" in caplog.text
    (tmp_path / "heads" / "base").mkdir()
    base = tmp_path / "heads" / "base" / "config.json"
    base.write_text('{"num_hidden_layers": 40}')
    settings = tmp_path / "heads" / "config.json"
    settings.write_text(settings.read_text().replace('"base"', f'"{base.parent}"'))
    with pytest.raises(ValueError, match=r"expected heads of another, got .* 40 instead of 2"):
        MedusaProposer(config)
