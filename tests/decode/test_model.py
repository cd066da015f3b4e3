"""MedusaModel's public methods: refusals before any work, outputs, streaming."""

import functools
import importlib

import numpy as np
import pytest
import torch
from models import VOCAB, heads_for, padded, prompts, rope, tiny, transformers_greedy
from transformers.generation.streamers import BaseStreamer

from medusa_decoding import MedusaHeads, MedusaModel, Tree
from medusa_decoding.backbone.attention_swap import TreeAttention

heads_module = importlib.import_module("medusa_decoding.heads")
verify_module = importlib.import_module("medusa_decoding.decode.verify")


@pytest.fixture
def medusa():
    model = tiny()
    with MedusaModel(model, heads_for(model), Tree.cartesian([3, 2])) as swapped:
        yield swapped


@pytest.fixture
def no_work(medusa, monkeypatch):
    def forward(*args):
        raise AssertionError("the model ran before the arguments were refused")

    monkeypatch.setattr(medusa.backbone, "forward", forward)
    return medusa


IDS = torch.tensor([[1, 2, 3]])


@pytest.mark.parametrize(
    ("ids", "kwargs", "words"),
    [
        (IDS[0], {}, r"input_ids: expected int64 \[B, T\]"),
        (IDS.float(), {}, "input_ids: expected int64"),
        (IDS[:0], {}, "at least one row and one token"),
        (torch.tensor([[1, VOCAB]]), {}, rf"ids in \[0, {VOCAB}\) in row 0, got 1 to {VOCAB}"),
        (IDS, {"attention_mask": torch.ones(1, 2)}, r"attention_mask: expected shape \[1, 3\], got \[1, 2\]"),
        (IDS, {"attention_mask": torch.tensor([[1, 0, 1]])}, "row 0 padded at one end only"),
        (IDS, {"attention_mask": torch.tensor([[0, 0, 0]])}, "row 0 has no token"),
        (IDS, {"attention_mask": torch.tensor([[1, 2, 1]])}, "only 0 and 1"),
        (IDS, {"max_new_tokens": 0}, "max_new_tokens: expected at least 1, got 0"),
        (IDS, {"min_new_tokens": 9, "max_new_tokens": 8}, "min_new_tokens: expected 0 to 8"),
        (torch.ones(1, 96, dtype=torch.int64), {}, "fewer than 96 tokens .*, got 96"),
        (IDS, {"tree": Tree.chain(5)}, r"path \[0, 0, 0, 0, 0\] has depth 5, expected at most 4"),
        (IDS, {"tree": Tree([[VOCAB]])}, rf"path \[{VOCAB}\] has rank {VOCAB}, expected below {VOCAB}"),
        (IDS, {"tree": [[0]]}, r"tree: expected a Tree or 'auto', got \[\[0\]\]"),
        (IDS, {"acceptance": "loose"}, "acceptance: expected 'lossless' or 'typical', got 'loose'"),
        (IDS, {"acceptance": "typical", "do_sample": True}, "do_sample: expected False with acceptance='typical'"),
        (IDS, {"acceptance": "typical", "repetition_penalty": 1.5}, "'lossless' with RepetitionPenaltyLogitsProcessor"),
        (IDS, {"acceptance": "typical", "output_scores": True}, "'lossless' with output_scores or output_logits"),
        (IDS, {"acceptance": "typical", "posterior_threshold": 0.0}, "posterior_threshold: expected above 0"),
        (IDS, {"acceptance": "typical", "posterior_alpha": 1.0}, "posterior_alpha: expected above 0 and below 1"),
        (IDS, {"acceptance": "typical", "temperature": 0.0}, "temperature: expected above 0"),
        (IDS, {"max_new_token": 4}, "max_new_token: expected an argument of generate .*, got an unknown one"),
        (IDS, {"num_return_sequences": 2}, "num_return_sequences: expected 1 without do_sample=True"),
        (IDS, {"do_sample": True, "num_return_sequences": 0}, "num_return_sequences: expected at least 1, got 0"),
        (IDS, {"do_sample": True, "temperature": 0.0}, "temperature: expected above 0"),
        (IDS, {"do_sample": True, "top_p": 1.5}, "top_p: expected above 0 and at most 1, got 1.5"),
        (IDS, {"do_sample": True, "top_k": -1}, "top_k: expected at least 0, got -1"),
        (IDS, {"do_sample": True, "min_p": 2.0}, "min_p: expected 0 to 1, got 2.0"),
        (IDS, {"typical_p": 0.5}, "typical_p: expected 1.0 without do_sample=True, got 0.5"),
        (IDS, {"posterior_threshold": 0.2}, "posterior_threshold, posterior_alpha: expected 0.09 and 0.3 with"),
        (IDS, {"generation_config": {"do_sample": True}}, "generation_config: expected a GenerationConfig"),
        (IDS, {"seed": 2**70}, "seed: expected a whole number of up to 64 bits"),
        (IDS, {"stop_strings": "a"}, "tokenizer: expected the model's tokenizer with stop_strings"),
        (IDS, {"stop_strings": [""], "tokenizer": object()}, "stop_strings: expected one or more non-empty"),
        (IDS, {"max_new_tokens": 4.5}, "max_new_tokens: expected a whole number, got 4.5"),
        (IDS, {"eos_token_id": "a"}, "eos_token_id: expected token ids"),
        (IDS, {"temperature": 0.7}, "temperature: expected 1.0"),
        (IDS, {"stopping_criteria": [3]}, "stopping_criteria: expected callables, got 3"),
        (IDS.repeat(2, 1), {"streamer": BaseStreamer()}, "streamer: expected a batch of 1, got 2"),
    ],
)
def test_bad_arguments_are_refused_before_any_work(no_work, ids, kwargs, words):
    with pytest.raises(ValueError, match=words):
        no_work.generate(ids, **kwargs)


@pytest.mark.parametrize(
    "config",
    [{"max_new_tokens": 9}, {"max_length": 13}, {"max_new_tokens": 9, "min_new_tokens": 6, "eos_token_id": [0, 5, 7]}],
)
def test_lengths_of_the_generation_config_are_obeyed(medusa, config):
    for name, value in config.items():
        setattr(medusa.base.generation_config, name, value)
    ids, mask = padded(prompts(3, [4, 2, 6]))
    expected = medusa.base.generate(ids, attention_mask=mask, do_sample=False)
    assert medusa.generate(ids, mask).sequences.tolist() == expected.tolist()


@pytest.mark.parametrize("eos", [torch.tensor([5, 2]), np.int64(5), [VOCAB + 3]])
def test_eos_is_accepted_in_every_form(medusa, eos):
    [row] = prompts(1, [6])
    listed = [token for token in np.atleast_1d(np.asarray(eos)).tolist() if 0 <= token < VOCAB]
    for min_new in (0, 3):
        kwargs = {"eos_token_id": listed, "min_new_tokens": min_new or None} if listed else {}
        output = medusa.generate(row[None], max_new_tokens=15, eos_token_id=eos, min_new_tokens=min_new)
        assert output.sequences[0, 6:].tolist() == transformers_greedy(medusa.base, row, 15, **kwargs)


def test_autocast_is_refused(no_work):
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(ValueError, match="autocast: expected off"):
        no_work.generate(IDS)


def test_heads_see_one_row_and_no_logits_of_the_prompt_are_made(medusa, monkeypatch):
    heads_rows, verified = [], []
    topk, verify = heads_module.heads_topk, verify_module.tree_verify
    monkeypatch.setattr(
        heads_module, "heads_topk", lambda hidden, *a, **k: heads_rows.append(hidden.shape) or topk(hidden, *a, **k)
    )
    monkeypatch.setattr(
        verify_module, "tree_verify", lambda hidden, *a, **k: verified.append(hidden.shape) or verify(hidden, *a, **k)
    )
    ids, mask = padded(prompts(2, [20, 31]))
    output = medusa.generate(ids, mask, max_new_tokens=12)
    steps = max(len(row) for row in output.accept_lengths)
    nodes = medusa.tree.num_nodes
    assert heads_rows == [(2, 32)] * steps
    assert verified == [(2, 1, 32)] + [(2, nodes, 32)] * steps


@functools.cache
def greedy_texts(seed):
    """Prompts of 64 tokens from a seed, and 65 new tokens of each from transformers."""
    rows, model = prompts(4, [64], seed=seed), tiny(seed=seed, max_position_embeddings=256)
    return rows, [transformers_greedy(model, row, 65) for row in rows]


@pytest.mark.slow
@pytest.mark.parametrize("new", [7, 64, 65])
@pytest.mark.parametrize("tree", [Tree.chain(4), Tree.cartesian([5, 3, 2])], ids=["chain", "cartesian"])
def test_rows_that_end_early_stay_within_a_cache_without_slack(monkeypatch, tree, new):
    # A row may accept past its budget and then stays in the batch: nothing may depend on the bucket's slack.
    monkeypatch.setattr("medusa_decoding.decode.runtime.state_pool.bucket", lambda rows: rows)
    for seed in range(6):
        model = tiny(seed=seed, max_position_embeddings=256)
        rows, expected = greedy_texts(seed)
        with MedusaModel(model, heads_for(model), tree) as medusa:
            output = medusa.generate(torch.stack(rows), max_new_tokens=new)
        assert output.sequences[:, 64:].tolist() == [text[:new] for text in expected]


@pytest.mark.parametrize("scaling", ["dynamic", "yarn"])
def test_scaled_rope_stretches_the_context_limit(scaling):
    trained = {"original_max_position_embeddings": 32} if scaling == "yarn" else {}
    settings = {"max_position_embeddings": 32, **rope(scaling, factor=4.0, **trained)}
    model = tiny(**settings)
    [row] = prompts(1, [40])
    with MedusaModel(model) as medusa:
        got = medusa.generate(row[None], max_new_tokens=5).sequences[0, 40:].tolist()
        with pytest.raises(ValueError, match="fewer than 128"):
            medusa.generate(torch.ones(1, 128, dtype=torch.int64))
    assert got == transformers_greedy(tiny(**settings), row, 5)


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda m: MedusaModel(m, MedusaHeads(16, VOCAB, 1)), "hidden_size 32 like the base model, got 16"),
        (lambda m: MedusaModel(m, MedusaHeads(32, 12, 1)), "vocab_size 11 like the base model, got 12"),
        (lambda m: MedusaModel(m, MedusaHeads(32, VOCAB, 1, dtype=torch.bfloat16)), "torch.float32 on cpu"),
        (
            lambda m: MedusaModel(m, MedusaHeads(32, VOCAB, 1, feature_layers=[1, 2])),
            r"feature_layers below 2 \(the base model's\), got \[1, 2\]",
        ),
        (lambda m: MedusaModel(m.double()), r"^base_model: expected .* got torch\.float64$"),
        (lambda m: MedusaModel(m, MedusaHeads(32, VOCAB, 1), Tree.chain(2)), r"path \[0, 0\] has depth 2"),
        (
            lambda m: MedusaModel(m, None, Tree.chain(1)),
            r"the model has no heads, got draft tokens of .* \(path \[0\]\)",
        ),
    ],
)
def test_a_refused_model_is_left_unpatched(build, words):
    model = tiny()
    with pytest.raises(ValueError, match=words):
        build(model)
    assert not any(isinstance(module, TreeAttention) for module in model.modules())


@pytest.mark.slow
def test_compiled_step_equals_eager(medusa, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    rows = prompts(3, [5, 2, 9])
    ids, mask = padded(rows)
    expected = [transformers_greedy(medusa.base, row, 20) for row in rows]
    with MedusaModel(medusa.base, medusa.heads, Tree.cartesian([3, 2]), backend="compiled") as compiled:
        output = compiled.generate(ids, mask, max_new_tokens=20)
    assert output.sequences[:, ids.shape[1] :].tolist() == expected
    assert output.steps < 3 * 19


def test_graphs_need_cuda(medusa):
    with (
        MedusaModel(medusa.base, medusa.heads, backend="graph") as model,
        pytest.raises(ValueError, match="'auto', 'eager' or 'compiled' on cpu, got 'graph'"),
    ):
        model.generate(IDS)


@pytest.mark.parametrize("tree", [Tree([]), Tree.cartesian([4, 3, 2])], ids=["plain", "tree"])
def test_the_cache_grows_with_the_text(medusa, monkeypatch, tree):
    monkeypatch.setattr("medusa_decoding.decode.runtime.runner.HEADROOM", 4)
    model = tiny(max_position_embeddings=512)
    rows = prompts(3, [30, 50, 2])
    expected = [transformers_greedy(model, row, 200) for row in rows]
    ids, mask = padded(rows)
    capacities = []
    with MedusaModel(model, heads_for(model), tree) as grown:
        acquire = grown._steps.pool.acquire

        def recording(*args):
            state = acquire(*args)
            capacities.append(state.cache.capacity)
            return state

        monkeypatch.setattr(grown._steps.pool, "acquire", recording)
        output = grown.generate(ids, mask, max_new_tokens=200)
    assert output.sequences[:, ids.shape[1] :].tolist() == expected
    assert len(capacities) > 2
    assert capacities == sorted(set(capacities))


@pytest.mark.slow
@torch._dynamo.config.patch(recompile_limit=2)
def test_compiled_steps_of_many_shapes_and_trees(medusa, tmp_path, monkeypatch):
    # More graphs than dynamo keeps for one function (2 here): each must still be compiled, and be right.
    monkeypatch.setattr("torch.compile", functools.partial(torch.compile, backend="eager"))
    [row] = prompts(1, [9])
    for tree in (Tree([]), Tree.chain(1), Tree.chain(2)):
        with MedusaModel(medusa.base, medusa.heads, tree, backend="compiled") as compiled:
            for new, eos in ((10, []), (70, [VOCAB - 1, 3]), (30, [5])):
                output = compiled.generate(row[None], max_new_tokens=new, eos_token_id=eos)
                kwargs = {"eos_token_id": eos} if eos else {}
                assert output.sequences[0, 9:].tolist() == transformers_greedy(medusa.base, row, new, **kwargs)


def test_seeds_of_64_bits_and_a_pad_token_without_a_mask(medusa, caplog):
    [row] = prompts(1, [6])
    texts = {
        seed: medusa.generate(row[None], max_new_tokens=20, do_sample=True, seed=seed).sequences[0].tolist()
        for seed in (0, 2**32, 2**63)
    }
    assert len({tuple(text) for text in texts.values()}) == 3
    medusa.generate(torch.tensor([[0, 3, 4], [1, 2, 3]]), max_new_tokens=2)
    assert "the pad token 0 at an end of a row is read as text" in caplog.text
