"""Tensor parallel: two real processes (torchrun, gloo) write what one process writes.

Run by torchrun, this file is the program of those processes: it decodes the models that a test has saved in a folder
and writes there what each process saw. Nothing waits for a process that is gone: gloo gives up after a minute, torchrun
ends the others when one fails, and the tests end torchrun.
"""

import json
import os
import re
import signal
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from models import heads_for, padded, prompts, tiny, transformers_greedy
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.integrations.tensor_parallel import ALL_PARALLEL_STYLES

from medusa_decoding import MedusaModel, Tree
from medusa_decoding.backbone.attention_swap import TreeAttention
from medusa_decoding.backbone.fused_layers import obstacle
from medusa_decoding.backbone.kv_cache import TreeCache
from medusa_decoding.backbone.tensor_parallel import Peers, is_sharded, leave
from medusa_decoding.decode.runtime import state_pool
from medusa_decoding.demo import CHECKPOINT

pytestmark = pytest.mark.slow  # starts processes of its own
PROCESSES = 2
NEW_TOKENS = 24
# Even vocabularies: transformers 5.17 shards no others.
MODELS = {
    "llama": ("llama", {"vocab_size": 12, "tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"vocab_size": 12, "attention_bias": True}),
    # Shared projections with whole results: of norms over all heads, and of a joint projection. Then experts.
    "olmo2": ("olmo2", {"vocab_size": 12}),
    "phi3": ("phi3", {"vocab_size": 12}),
    "mixtral": ("mixtral", {"vocab_size": 12}),
}
WHOLE = {"olmo2", "phi3"}
# 24 columns of keys would be split in the middle of the second of three heads.
ODD = {
    "odd KV heads": {"num_attention_heads": 6, "num_key_value_heads": 3},
    "odd heads": {"num_attention_heads": 3, "num_key_value_heads": 1},
}
TREE = Tree.cartesian([3, 2, 1])


def build(name):
    family, settings = MODELS.get(name) or ("llama", {"vocab_size": 12, "hidden_size": 48} | ODD[name])
    return tiny(family, **settings)


def rows():
    return prompts(2, [5, 9], vocab=12)


# --- what each process does


def decode(folder, name):
    """Decode one model with every token selection; called by all processes together."""
    whole = build(name)
    base = load(folder / name)
    originals = [layer.self_attn for layer in base.model.layers]
    ids, mask = padded(rows())
    seen = {"world_size": Peers.from_model(base).size, "sharded": sum(map(is_sharded, base.parameters()))}
    for shared in (False, True):
        with MedusaModel(base, heads_for(whole, 3, shared=shared), TREE) as model:
            seen["kv_heads"] = model.backbone.kv_shape(1, 64)[3]
            seen["obstacle"] = obstacle(base.model)
            for kind, tree in (("tree", TREE), ("plain", Tree([]))):
                out = model.generate(ids, mask, max_new_tokens=NEW_TOKENS, tree=tree)
                seen[f"{kind}, shared lm_head" if shared else kind] = out.sequences[:, ids.shape[1] :].tolist()
                seen[f"steps, {kind}"] = out.steps
            seen["base, swapped"] = transformers_greedy(base, rows()[0], 4)
    seen["undone"] = [layer.self_attn for layer in base.model.layers] == originals
    seen["base, undone"] = transformers_greedy(base, rows()[0], 4)
    return seen


def load(folder, plan="auto"):
    return AutoModelForCausalLM.from_pretrained(folder, tp_plan=plan).eval()


def refusals(folder):
    seen = {}
    for name in ODD:
        base = load(folder / name)
        seen[name] = refusal(base)
    for style in ("colwise_rep", "sequence_parallel"):
        base.tp_plan = base.tp_plan | {"model.layers.*.self_attn.k_proj": style}
        seen[style] = refusal(base)
    base._tp_size = None  # as if something else had sharded it
    seen["sharded otherwise"] = refusal(base)
    seen["left alone"] = not any(isinstance(layer.self_attn, TreeAttention) for layer in base.model.layers)
    return seen


def refusal(base):
    try:
        MedusaModel(base)
    except ValueError as error:
        return str(error)
    return "not refused"


def whole_attention(folder):
    """Decode a model whose heads cannot be shared with a plan that leaves attention whole."""
    name = "odd KV heads"
    plan = dict(load(folder / name).tp_plan)
    for key in [key for key in plan if "self_attn" in key]:
        plan[key] = "replicate"
        if "replicate" not in ALL_PARALLEL_STYLES:  # transformers 5.17, whose plans are not merged with the model's own
            del plan[key]
    with MedusaModel(load(folder / name, plan), heads_for(build(name), 3), TREE) as model:
        ids, mask = padded(rows())
        sequences = model.generate(ids, mask, max_new_tokens=NEW_TOKENS).sequences
        return {"kv_heads": model.backbone.kv_heads, "text": sequences[:, ids.shape[1] :].tolist()}


def disagree(folder):
    """Give every process another random state and another stopping criterion."""
    rank = torch.distributed.get_rank()
    ids, mask = padded(rows())
    prompt = rows()[1][None]
    seen = {}
    with MedusaModel(load(folder / "llama"), heads_for(build("llama"), 3), TREE) as model:
        for kind, tree in (("tree", TREE), ("plain", Tree([]))):
            torch.manual_seed(5 + rank)
            out = model.generate(ids, mask, max_new_tokens=NEW_TOKENS, tree=tree, do_sample=True)
            seen[f"sampled, {kind}"] = out.sequences[:, ids.shape[1] :].tolist()

        def stop(prefix, scores, **kwargs):
            return torch.tensor([prefix.shape[1] >= prompt.shape[1] + 5 + 6 * rank])

        stopped = model.generate(prompt, max_new_tokens=NEW_TOKENS, stopping_criteria=[stop])
        seen["stopped"] = stopped.sequences[0, prompt.shape[1] :].tolist()
        for backend in ("compiled", "graph"):
            model.backend = backend
            try:
                model.generate(ids, mask, max_new_tokens=2)
            except ValueError as error:
                seen[backend] = str(error)
    return seen


def talk(folder):
    """Share a different number from every process and record which one arrives."""
    peers = Peers.from_model(load(folder / "llama"))
    rank = torch.distributed.get_rank()
    return {
        "rank": [peers.rank, rank],
        "agreed": [peers.agree(7 + rank), peers.agree(0.1 + rank), peers.agree(rank == 0), peers.agree(2**62 + rank)],
    }


def out_of_memory(folder):
    """Let one process alone run out of memory, and decode again."""
    rank, seen = torch.distributed.get_rank(), {}
    ids, mask = padded(rows())

    def fail(**_):
        raise MemoryError("no memory for a cache")

    with MedusaModel(load(folder / "llama"), heads_for(build("llama"), 3), TREE) as model:

        def text():
            try:
                return model.generate(ids, mask, max_new_tokens=NEW_TOKENS).sequences[:, ids.shape[1] :].tolist()
            except (MemoryError, RuntimeError) as error:
                return f"{type(error).__name__}: {error}"

        for name, target, attribute, value in (
            ("generation", state_pool, "available", lambda device: 10_000),
            ("cache", TreeCache, "allocate", fail),
        ):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(state_pool, "UNCHECKED", 0)
                if rank == 1:
                    patch.setattr(target, attribute, value)
                seen[name] = text()
        seen["afterwards"] = text()
    return seen


def work(folder):
    torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=60))
    seen = {name: decode(folder, name) for name in MODELS}
    for task in (refusals, whole_attention, talk, disagree, out_of_memory):
        seen[task.__name__] = task(folder)
    (folder / f"rank{torch.distributed.get_rank()}.json").write_text(json.dumps(seen))
    leave()


# --- what is expected of them


def torchrun(*argv):
    """Run two processes; return the finished run, or fail when they are stuck."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(PROCESSES), *argv]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    run = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        out, err = run.communicate(timeout=240)
    except subprocess.TimeoutExpired:
        run.send_signal(signal.SIGTERM)  # torchrun ends its processes on this
        out, err = run.communicate(timeout=60)
        pytest.fail(f"stuck: {err[-2000:]}")
    finally:
        run.kill()
    assert run.returncode == 0, err[-4000:]
    return out, err


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tensor_parallel")
    for name in (*MODELS, *ODD):
        build(name).save_pretrained(folder / name)
    torchrun(__file__, str(folder))
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(PROCESSES)]


@pytest.mark.parametrize("name", MODELS)
def test_processes_write_the_text_of_one(reports, name):
    model = build(name)
    texts = [transformers_greedy(model, row, NEW_TOKENS) for row in rows()]
    for report in reports:
        seen = report[name]
        assert seen["world_size"] == PROCESSES
        assert seen["sharded"] > 0
        assert seen["kv_heads"] == model.config.num_key_value_heads // (1 if name in WHOLE else PROCESSES)
        assert "tensor parallel" in seen["obstacle"]
        for kind in ("tree", "plain", "tree, shared lm_head", "plain, shared lm_head"):
            assert seen[kind] == texts, kind
        assert seen["steps, tree"] < seen["steps, plain"], "the tree has never helped"


@pytest.mark.parametrize("name", MODELS)
def test_undo_restores_a_sharded_model(reports, name):
    text = transformers_greedy(build(name), rows()[0], 4)
    for report in reports:
        assert report[name]["undone"]
        assert report[name]["base, swapped"] == report[name]["base, undone"] == text


def test_heads_that_processes_cannot_share_are_refused_by_name(reports):
    for report in reports:
        seen = report["refusals"]
        assert seen["odd KV heads"] == "base_model: expected num_key_value_heads divisible by 2 processes, got 3"
        assert seen["odd heads"] == "base_model: expected num_attention_heads divisible by 2 processes, got 3"
        assert seen["left alone"]


def test_plans_that_shard_otherwise_are_refused(reports):
    for report in reports:
        assert re.search("attention sharded as .*got .*'k_proj': 'colwise_rep'", report["refusals"]["colwise_rep"])
        assert re.search("tp_plan: .*, got sequence_parallel$", report["refusals"]["sequence_parallel"])
        assert "transformers' tensor parallel plan alone, got " in report["refusals"]["sharded otherwise"]


def test_attention_may_stay_whole(reports):
    model = build("odd KV heads")
    for report in reports:
        assert report["whole_attention"]["kv_heads"] == 3
        assert report["whole_attention"]["text"] == [transformers_greedy(model, row, NEW_TOKENS) for row in rows()]


def test_the_first_process_decides(reports):
    for rank, report in enumerate(reports):
        talk = report["talk"]
        assert talk["rank"] == [rank, rank]
        assert talk["agreed"] == [7, 0.1, True, 2**62]


def test_processes_sample_and_stop_together(reports):
    first, other = (report["disagree"] for report in reports)
    assert first == other
    assert first["sampled, tree"] == first["sampled, plain"]
    assert first["sampled, tree"] != reports[0]["llama"]["tree"], "drawn, not greedy"
    assert first["stopped"] == transformers_greedy(build("llama"), rows()[1], 5)


@pytest.mark.parametrize("backend", ["compiled", "graph"])
def test_steps_of_sharded_models_are_eager_or_refused(reports, backend):
    words = f"backend: expected 'auto' or 'eager' for a tensor parallel model, got '{backend}'"
    assert all(report["disagree"][backend] == words for report in reports)


def test_processes_run_out_of_memory_together(reports):
    first, other = (report["out_of_memory"] for report in reports)
    assert first == other
    assert first["generation"].startswith(
        "MemoryError: memory: expected at most 9.8 KiB (free on cpu in each of 2 processes), got "
    )
    assert first["cache"] == "MemoryError: process 1 of 2: no memory for a cache"
    assert first["afterwards"] == [transformers_greedy(build("llama"), row, NEW_TOKENS) for row in rows()]


def test_command_prints_once_what_transformers_writes():
    prompt = "def main("
    out, err = torchrun(
        "-m", "medusa_decoding", "generate", "--tensor-parallel", "--prompt", prompt, "--max-new-tokens", "24"
    )
    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT / "base")
    ids = tokenizer(prompt, return_tensors="pt").input_ids[0]
    base = AutoModelForCausalLM.from_pretrained(CHECKPOINT / "base", dtype=torch.float32)
    assert out.strip("\n") == tokenizer.decode(transformers_greedy(base, ids, 24)).strip("\n")
    assert err.count("24 tokens in") == 1


if __name__ == "__main__":
    work(Path(sys.argv[1]))
