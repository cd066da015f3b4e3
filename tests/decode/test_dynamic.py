"""Dynamic trees: each step verifies the N likeliest nodes by that step's own probabilities, and the text stays."""

import functools
import itertools
import types

import pytest
import torch
from models import heads_for, padded, prompts, tiny, transformers_greedy
from oracles import assert_some_accepted, new_tokens
from test_variants import MAP, variant
from transformers.generation import logits_process as lp

from medusa_decoding import MedusaModel, Tree
from medusa_decoding.decode.arrange import arrange
from medusa_decoding.decode.lookup import Text
from medusa_decoding.decode.propose import propose
from medusa_decoding.decode.tree_tensors import TreeTensors
from medusa_decoding.heads import DraftTokens

NEW = 24
TREES = {
    "4 nodes": Tree.dynamic(4, depth=3, top_k=3),
    "16 nodes": Tree.dynamic(16, depth=4, top_k=8),
    "70 nodes": Tree.dynamic(70, depth=4, top_k=8),
    "with a copy": Tree.dynamic(9, depth=3, top_k=5).with_lookup(4),
    "of few candidates": Tree([[1], [0], [3], [1, 2], [1, 0], [0, 0], [0, 0, 1]], keep=4),
}
VARIANTS = {
    "plain": {},
    "parents": {"parent_rank": 3},
    "int8, trimmed, parents": {"storage": "int8", "token_map": MAP, "parent_rank": 3},
}


def arranged(tree, logprobs):
    """The tree that `arrange` makes of log-probabilities [B, K, k]; draft tokens are numbered, the root is -7."""
    batch = len(logprobs)
    tokens = torch.arange(logprobs.numel()).view(logprobs.shape)
    state = types.SimpleNamespace(root=torch.full((batch,), -7), check=torch.zeros(batch), text=None)
    best = DraftTokens(logprobs[..., : tree.top_k], tokens[..., : tree.top_k])  # as many as the heads are asked for
    return arrange(state, best, TreeTensors.from_tree(tree, logprobs.device))


def sorted_logprobs(*shape, seed=0, sharpness=2.0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * sharpness).log_softmax(-1).sort(-1, descending=True).values


@pytest.mark.parametrize(("nodes", "depth", "ranks"), [(2, 2, 2), (12, 2, 9), (20, 4, 3)])
def test_candidates_are_all_paths_that_can_be_among_the_likeliest(nodes, depth, ranks):
    """For each possible path, count the paths that no probabilities can make less likely than it."""
    every = [path for length in range(1, depth + 1) for path in itertools.product(range(ranks), repeat=length)]
    wanted = []
    for path in every:
        above = [o for o in every if len(o) <= len(path) and all(a <= b for a, b in zip(o, path, strict=False))]
        if len(above) <= nodes - 1:
            wanted.append(list(path))
    tree = Tree.dynamic(nodes, depth, ranks)
    assert sorted(tree.choices) == sorted(wanted)
    assert (tree.num_nodes, tree.keep, tree.lookup) == (nodes, nodes, 0)
    assert tree.depth == max(map(len, wanted))


@pytest.mark.parametrize(("sharpness", "nodes"), [(0.05, 7), (1.0, 24), (4.0, 65)])
def test_the_kept_nodes_are_the_likeliest_of_all_candidates(sharpness, nodes):
    """Compared with a sort of all paths, for every row."""
    depth, ranks, batch = 3, 8, 4
    logprobs = sorted_logprobs(batch, depth, ranks, seed=nodes, sharpness=sharpness)
    tokens, shape = arranged(Tree.dynamic(nodes, depth, ranks), logprobs)
    for row in range(batch):
        probable = {
            path: sum(float(logprobs[row, head, rank]) for head, rank in enumerate(path))
            for length in range(1, depth + 1)
            for path in itertools.product(range(ranks), repeat=length)
        }
        wanted = sorted(sorted(probable, key=probable.get, reverse=True)[: nodes - 1], key=lambda p: (len(p), p))
        number = {path: place for place, path in enumerate([(), *wanted])}
        flat = [(row * depth + len(path) - 1) * ranks + path[-1] for path in wanted]
        assert tokens[row].tolist() == [-7, *flat]
        assert shape.parents[row].tolist() == [-1, *(number[path[:-1]] for path in wanted)]
        assert shape.depths[row].tolist() == [0, *map(len, wanted)]
        assert shape.children()[row][0] == [number[path] for path in wanted if len(path) == 1]


def test_heads_that_depend_on_the_parent_are_weighed_given_that_parent():
    """Each node's own probability follows from the tokens of the tree; checked together with the tree's shape."""
    model = tiny()
    heads = variant(model, parent_rank=3)
    tree = Tree.dynamic(12, depth=3, top_k=6)
    generator = torch.Generator().manual_seed(5)
    state = types.SimpleNamespace(
        hidden=torch.randn(3, 32, generator=generator), root=torch.tensor([4, 0, 9]), check=torch.zeros(3), text=None
    )
    shape = TreeTensors.from_tree(tree, torch.device("cpu"))
    with torch.no_grad():
        tokens, found = arrange(state, propose(state, heads, model.lm_head, shape), shape)
        whole = heads.double()(state.hidden.double(), model.lm_head)
        term = heads.parent_tokens @ heads.parent_mix[:, None].squeeze(1) @ heads.candidate_tokens.T  # [K, parent, V]
    for row in range(3):
        # Of all 11 tokens, which are fewer than 32: the probabilities are exact.
        def logprob(depth, parent, token, row=row):
            return float((whole[row, depth] + term[depth, parent]).log_softmax(-1)[token])

        candidates = {}
        for path in tree.choices:
            parent, total, texts = int(state.root[row]), 0.0, []
            for depth, rank in enumerate(path):
                order = sorted(range(11), key=lambda t, d=depth, p=parent: -logprob(d, p, t))
                total += logprob(depth, parent, order[rank])
                parent = order[rank]
                texts.append(parent)
            candidates[tuple(path)] = (total, texts)
        kept = sorted(sorted(candidates, key=lambda path: -candidates[path][0])[:11], key=lambda p: (len(p), p))
        assert tokens[row].tolist() == [int(state.root[row]), *(candidates[path][1][-1] for path in kept)]
        assert found.depths[row].tolist() == [0, *map(len, kept)]


@pytest.mark.parametrize("tree", TREES.values(), ids=TREES.keys())
@pytest.mark.parametrize("name", VARIANTS)
def test_greedy_text_is_transformers(name, tree):
    model = tiny()
    rows = prompts(3, [7, 1, 19])
    expected = [transformers_greedy(model, row, NEW) for row in rows]
    ids, mask = padded(rows)
    with MedusaModel(model, variant(model, **VARIANTS[name]), tree) as medusa:
        output = medusa.generate(ids, mask, max_new_tokens=NEW)
    assert new_tokens(output, ids.shape[1]) == expected
    assert_some_accepted(output)


WAYS = {
    "greedy": {},
    "sampled": {"do_sample": True, "temperature": 0.9, "top_p": 0.95, "seed": 11},
    "processed": {"repetition_penalty": 1.3},
    "sampled on the host": {"do_sample": True, "seed": 3, "logits_processor": [lp.NoRepeatNGramLogitsProcessor(3)]},
    "typical": {"acceptance": "typical"},
    "typical, warmer": {"acceptance": "typical", "temperature": 1.5, "posterior_threshold": 0.2},
    "no early end": {"min_new_tokens": 9, "eos_token_id": [3, 5]},
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())
def test_a_dynamic_tree_that_keeps_all_candidates_equals_the_static_tree(way):
    """Same text and acceptance lengths under every token selection: only the source of the shape differs."""
    model = tiny()
    choices = [[2], [0], [1], [2, 3], [0, 1], [2, 0], [2, 3, 0], [0, 1, 4], [5], [2, 3, 1], [2, 3, 0, 1]]
    ids, mask = padded(prompts(3, [7, 1, 19]))
    with MedusaModel(model, heads_for(model)) as medusa:
        static = medusa.generate(ids, mask, max_new_tokens=NEW, tree=Tree(choices), **way)
        whole = medusa.generate(ids, mask, max_new_tokens=NEW, tree=Tree(choices, keep=12), **way)
    assert whole.sequences.tolist() == static.sequences.tolist()
    assert whole.accept_lengths == static.accept_lengths
    assert_some_accepted(whole)


@pytest.mark.parametrize("way", ["sampled", "processed", "sampled on the host"])
def test_other_token_selections_write_what_plain_decoding_writes(way):
    model = tiny("qwen3")
    ids, mask = padded(prompts(3, [7, 1, 19]))
    with MedusaModel(model, heads_for(model)) as medusa:
        plain = medusa.generate(ids, mask, max_new_tokens=NEW, tree=Tree([]), **WAYS[way])
        output = medusa.generate(ids, mask, max_new_tokens=NEW, tree=TREES["16 nodes"], **WAYS[way])
    assert output.sequences.tolist() == plain.sequences.tolist()
    assert_some_accepted(output)


def test_copied_tokens_are_kept_next_to_the_likeliest_draft_tokens():
    """Three draft tokens of probability 1 in any precision, of which one is kept, and three copied tokens."""
    tree = Tree([[0], [0, 0], [0, 0, 0]], lookup=3, keep=2)
    state = types.SimpleNamespace(root=torch.tensor([5]), check=torch.zeros(1), text=Text.allocate(1, 8, 4, "cpu"))
    state.text.begin([torch.tensor([5, 6, 7, 8])])
    state.output, state.count = torch.tensor([[5, 0, 0, 0]]), torch.tensor([1], dtype=torch.int32)
    drafts = DraftTokens(torch.zeros(1, 3, 1), torch.tensor([[[1], [2], [3]]]))
    tokens, shape = arrange(state, drafts, TreeTensors.from_tree(tree, torch.device("cpu")))
    assert tokens.tolist() == [[5, 1, 6, 7, 8]]
    assert shape.parents.tolist() == [[-1, 0, 0, 2, 3]]


def test_a_compiled_step_writes_transformers_text(monkeypatch):
    monkeypatch.setattr("torch.compile", functools.partial(torch.compile, backend="eager"))
    model = tiny()
    [row] = prompts(1, [6])
    expected = transformers_greedy(model, row, 12)
    with MedusaModel(model, heads_for(model), TREES["16 nodes"], backend="compiled") as medusa:
        assert new_tokens(medusa.generate(row[None], max_new_tokens=12), 6) == [expected]


def test_the_root_alone_is_plain_decoding():
    model = tiny()
    [row] = prompts(1, [6])
    expected = transformers_greedy(model, row, 12)
    for tree in (Tree.dynamic(1, depth=0), Tree([[0], [1]], keep=1)):
        with MedusaModel(model, heads_for(model), tree) as medusa:
            output = medusa.generate(row[None], max_new_tokens=12)
        assert new_tokens(output, 6) == [expected]
        assert output.accept_lengths == [[0] * 11]


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["eager", "graph", pytest.param("compiled", marks=pytest.mark.compiled)])
@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("tree", TREES.values(), ids=TREES.keys())
def test_on_a_gpu(tree, name, backend):
    model = tiny()
    heads = variant(model, **VARIANTS[name]).cuda()
    model = model.cuda()
    rows = [row.cuda() for row in prompts(3, [7, 1, 19])]
    expected = [transformers_greedy(model, row, NEW) for row in rows]
    ids, mask = (tensor.cuda() for tensor in padded([row.cpu() for row in rows]))
    with MedusaModel(model, heads, tree, backend=backend) as medusa:
        output = medusa.generate(ids, mask, max_new_tokens=NEW)
        assert new_tokens(output, ids.shape[1]) == expected
        plain = medusa.generate(ids, mask, max_new_tokens=NEW, tree=Tree([]), **WAYS["sampled"])
        assert medusa.generate(ids, mask, max_new_tokens=NEW, **WAYS["sampled"]).sequences.equal(plain.sequences)
        processed = medusa.generate(ids, mask, max_new_tokens=NEW, tree=Tree([]), **WAYS["processed"])
        assert medusa.generate(ids, mask, max_new_tokens=NEW, **WAYS["processed"]).sequences.equal(processed.sequences)
        # Typical acceptance has no reference text, so compare with the same steps run eagerly.
        typical = medusa.generate(ids, mask, max_new_tokens=NEW, **WAYS["typical"])
    if backend != "eager":
        with MedusaModel(model, heads, tree, backend="eager") as medusa:
            assert medusa.generate(ids, mask, max_new_tokens=NEW, **WAYS["typical"]).sequences.equal(typical.sequences)
    assert_some_accepted(output)
