"""The parts of SGLang that heads with a tree would use; docs/engines.md says how to install it for this test."""

import ast
import importlib.util
from pathlib import Path
from types import SimpleNamespace

import pytest

spec_info = pytest.importorskip("sglang.srt.speculative.spec_info", reason="needs SGLang: see docs/engines.md")


def test_an_algorithm_from_outside_is_registered_and_chosen_by_its_name():
    from sglang.srt.speculative.spec_registry import CustomSpecAlgo

    class Medusa(CustomSpecAlgo):
        def handle_server_args(self, server_args):
            server_args.enable_return_hidden_states = True

        def has_draft_kv(self):
            return False

    class Worker:
        pass

    register = spec_info.SpeculativeAlgorithm.register
    register("MEDUSA_TREE", supports_overlap=True, spec_class=Medusa)(lambda server_args: Worker)
    found = spec_info.SpeculativeAlgorithm.from_string("medusa_tree")
    given = SimpleNamespace(disable_overlap_schedule=False)
    found.handle_server_args(given)
    assert found.create_worker(given) is Worker
    assert given.enable_return_hidden_states
    assert not found.has_draft_kv()
    with pytest.raises(ValueError, match="already registered"):
        register("MEDUSA_TREE")


def test_the_worker_for_trees_of_copies_has_the_parts_that_one_for_heads_would_reuse():
    # Read, not imported: the module needs SGLang's CUDA kernels.
    source = Path(importlib.util.find_spec("sglang.srt.speculative.ngram_worker").origin).read_text()
    (worker,) = [one for one in ast.parse(source).body if isinstance(one, ast.ClassDef) and one.name == "NGRAMWorker"]
    methods = {one.name: ast.unparse(one) for one in worker.body if isinstance(one, ast.FunctionDef)}
    assert "-> tuple[np.ndarray, np.ndarray]" in methods["_prepare_draft_tokens"]
    assert "NgramVerifyInput(draft_token=" in methods["_prepare_for_speculative_decoding"]
    for call in ("_prepare_for_speculative_decoding(", "eagle_sample(", "move_accept_tokens_to_target_kvcache("):
        assert call in methods["forward_batch_generation"]
