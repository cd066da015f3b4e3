"""Heads with 8-bit projections, trimmed vocabularies, more inputs and drafts that depend on their parent: lossless."""

import copy
import functools
import io
import math
import types

import numpy as np
import pytest
import torch
from models import heads_for, padded, prompts, tiny, transformers_greedy
from oracles import assert_some_accepted, new_tokens
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from medusa_decoding import MedusaHeads, MedusaModel, Tree
from medusa_decoding.decode.arrange import arrange
from medusa_decoding.decode.propose import propose
from medusa_decoding.decode.tree_tensors import TreeTensors

MAP = torch.tensor([9, 0, 4, 2, 7, 10, 1, 5])
TREES = {
    "cartesian": Tree.cartesian([4, 3, 2]),
    "uneven": Tree([[2], [0], [1], [2, 3], [0, 1], [2, 0], [2, 3, 0], [0, 1, 4], [5], [2, 3, 1], [2, 3, 0, 1]]),
}
VARIANTS = {
    "parents": {"parent_rank": 3},
    "fp8": {"storage": "fp8"},
    "shared, trimmed, parents": {"shared": True, "token_map": MAP, "parent_rank": 3},
    "int8, trimmed, parents": {"storage": "int8", "token_map": MAP, "parent_rank": 3},
    "fp8, parents, two layers": {"storage": "fp8", "parent_rank": 2, "num_layers": 2},
    "shared, trimmed, root": {"shared": True, "token_map": MAP, "root_rank": 5},
    "int8, parents, root, two layers": {"storage": "int8", "parent_rank": 3, "num_layers": 2, "root_rank": 5},
    "shared, parents, features": {"shared": True, "parent_rank": 3, "feature_layers": (1,)},
}
NEW = 24


def variant(
    model, *, storage="float", token_map=None, parent_rank=0, shared=False, num_layers=1, strength=1.0, root_rank=0,
    feature_layers=(),
):  # fmt: skip
    """The heads of `heads_for` as a variant; the parents' scores are as large as the logits' differences."""
    plain = heads_for(model, num_layers=num_layers, shared=shared).float()
    heads = MedusaHeads(
        plain.hidden_size, plain.vocab_size, plain.num_heads, num_layers, shared_projection=shared,
        token_map=token_map, parent_rank=parent_rank, root_rank=root_rank, feature_layers=feature_layers,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        heads.w1.copy_(plain.w1)
        heads.b1.copy_(plain.b1)
        if not shared:
            heads.w2.copy_(plain.w2 if token_map is None else plain.w2[:, token_map])
        for name in ("parent_tokens", "candidate_tokens", "parent_mix") if parent_rank else ():
            parameter = getattr(heads, name)
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * strength)
        if root_rank:
            heads.root_down.copy_(torch.randn(heads.root_down.shape, generator=generator) * heads.hidden_size**-0.5)
            heads.root_up.copy_(torch.randn(heads.root_up.shape, generator=generator) * strength * root_rank**-0.5)
        if feature_layers:
            heads.feature_map.copy_(torch.randn(heads.feature_map.shape, generator=generator) * strength * 0.4)
    heads = heads.to(next(model.parameters()).dtype)
    return heads.eval() if storage == "float" else heads.quantized(storage)


@pytest.mark.parametrize("tree", TREES.values(), ids=TREES.keys())
@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("batch", [1, 3])
def test_greedy_text_is_transformers(name, batch, tree):
    model = tiny()
    rows = prompts(batch, [7, 1, 19])
    expected = [transformers_greedy(model, row, NEW) for row in rows]
    ids, mask = padded(rows)
    with MedusaModel(model, variant(model, **VARIANTS[name]), tree) as medusa:
        output = medusa.generate(ids, mask, max_new_tokens=NEW)
    assert new_tokens(output, ids.shape[1]) == expected
    assert_some_accepted(output)


@pytest.mark.parametrize("way", ["native", "fused", "modules", "compiled"])
def test_heads_read_the_states_that_transformers_computes(way, monkeypatch):
    model, rows, seen = tiny(num_hidden_layers=3), prompts(3, [7, 1, 19]), []
    ids, mask = padded(rows)

    def noting(step):
        def run(state, *given):
            seen.append((state.cache.lengths.tolist(), state.finished.tolist(), state.hidden.clone()))
            return step(state, *given)

        return run

    backend = "compiled" if way == "compiled" else "eager"
    with MedusaModel(model, variant(model, feature_layers=(1, 2)), TREES["cartesian"], backend) as medusa:
        if way in ("fused", "modules"):
            medusa.backbone.choose_layers = lambda *_, **__: setattr(medusa.backbone, "fuse", way == "fused")
        prepare = medusa._steps.prepare

        def prepared(backend):
            get = prepare(backend)
            return lambda tree: noting(get(tree))

        monkeypatch.setattr(medusa._steps, "prepare", prepared)
        output = medusa.generate(ids, mask, max_new_tokens=NEW)
        assert (medusa.backbone.native is None) == (way in ("fused", "modules"))
    for number, (row, new) in enumerate(zip(rows, new_tokens(output, ids.shape[1]), strict=True)):
        states = model.model(torch.tensor([[*row.tolist(), *new]]), output_hidden_states=True).hidden_states
        expected = torch.cat([states[-1], states[1], states[2]], -1)[0]
        found = [(lengths[number] - 1, read[number]) for lengths, ended, read in seen if not ended[number]]
        assert len(found) > 3
        for place, read in found:
            torch.testing.assert_close(read, expected[place], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", VARIANTS)
def test_sampled_text_equals_plain_decoding(name):
    model = tiny("qwen3")
    ids, mask = padded(prompts(3, [7, 1, 19]))
    kwargs = {"max_new_tokens": NEW, "do_sample": True, "temperature": 0.9, "seed": 11}
    with MedusaModel(model, variant(model, **VARIANTS[name])) as medusa:
        plain = medusa.generate(ids, mask, tree=Tree([]), **kwargs)
        for tree in (TREES["cartesian"], Tree.cartesian([3, 2]).with_lookup(4)):
            output = medusa.generate(ids, mask, tree=tree, **kwargs)
            assert output.sequences.tolist() == plain.sequences.tolist()
            assert output.steps < plain.steps
    assert len(set(new_tokens(plain, ids.shape[1])[0])) > 2


def wide_heads(parent_rank, *, token_map=None, shared=False, seed=0, root_rank=0):
    """Random heads over 70 tokens, of which 32 are reranked."""
    heads = MedusaHeads(
        8, 70, 3, 2, shared_projection=shared, token_map=token_map, parent_rank=parent_rank, root_rank=root_rank
    )
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.6)
        if parent_rank:
            heads.candidate_tokens *= 4  # as large as the logits' differences
    lm_head = torch.nn.Linear(8, 70, bias=False)
    with torch.no_grad():
        lm_head.weight.copy_(torch.randn(lm_head.weight.shape, generator=generator))
    return heads, lm_head


def walked(heads, lm_head, hidden, root, tree, table=None):
    """The tokens of a tree's nodes in float64, node by node, from the definition."""
    vocabulary = heads.token_map.tolist() if heads.token_map is not None else range(heads.vocab_size)
    place = {token: row for row, token in enumerate(vocabulary)}
    value = {name: p.detach().double().numpy() for name, p in heads.named_parameters()}
    best = []
    for head in range(heads.num_heads):
        state = hidden.double().numpy()
        if table is not None:
            row = table[int(root)].double().numpy()
            scaled = row / math.sqrt((row**2).mean() + 1e-6)
            state = state + value["root_up"][head] @ (value["root_down"] @ scaled)
        for layer in range(heads.num_layers):
            inner = value["w1"][head, layer] @ state + value["b1"][head, layer]
            state = state + inner / (1 + np.exp(-inner))
        rows = value["w2"][head] if "w2" in value else lm_head.weight.detach().double().numpy()[list(vocabulary)]
        logits = rows @ state
        logprobs = logits - math.log(np.exp(logits).sum())
        best.append(sorted(zip(logprobs, range(len(logprobs)), strict=True), reverse=True)[:32])
    token = {(): int(root)}
    for path in map(tuple, tree.choices):
        head = len(path) - 1
        parent = value["parent_tokens"][place.get(token[path[:-1]], -1)] @ value["parent_mix"][head]
        scored = sorted(((lp + parent @ value["candidate_tokens"][row], row) for lp, row in best[head]), reverse=True)
        token[path] = vocabulary[scored[path[-1]][1]]
    return [token[()], *(token[tuple(path)] for path in tree.choices)]


def arranged(heads, lm_head, hidden, root, tree, embed_tokens=None):
    state = types.SimpleNamespace(hidden=hidden, root=root, text=None)
    shape = TreeTensors.from_tree(tree, hidden.device)
    return arrange(state, propose(state, heads, lm_head, shape, embed_tokens=embed_tokens), shape)[0]


@pytest.mark.parametrize("kind", ["own", "own, trimmed", "shared", "shared, trimmed"])
def test_children_are_the_topk_given_their_own_parent(kind):
    tree = Tree([[0], [1], [5], [0, 0], [0, 2], [1, 0], [1, 1], [5, 0], [0, 2, 0], [1, 0, 0], [1, 0, 30], [5, 0, 0]])
    token_map = torch.randperm(70, generator=torch.Generator().manual_seed(1))[:50] if "trimmed" in kind else None
    heads, lm_head = wide_heads(4, token_map=token_map, shared="shared" in kind, seed=1)
    generator = torch.Generator().manual_seed(2)
    hidden, root = torch.randn(5, 8, generator=generator), torch.randint(0, 70, (5,), generator=generator)
    with torch.no_grad():
        found = arranged(heads, lm_head, hidden, root, tree).tolist()
        heads.parent_rank = 0
        without = arranged(heads, lm_head, hidden, root, tree).tolist()
    assert found == [walked(heads, lm_head, hidden[row], root[row], tree) for row in range(5)]
    # Cousins of one rank differ, and so do the root's children: plain heads would fail here.
    first = [tree.choices.index(path) + 1 for path in ([0, 0], [1, 0], [5, 0])]
    assert sum(len({row[node] for node in first}) > 1 for row in found) >= 3
    assert all(row[1:4] != plain[1:4] for row, plain in zip(found, without, strict=True))


@pytest.mark.parametrize("called", [False, True], ids=["op", "module"])
@pytest.mark.parametrize("shared", [False, True], ids=["own", "shared"])
@pytest.mark.parametrize("parent_rank", [0, 256])
def test_every_row_drafts_by_the_embedding_of_its_own_root(parent_rank, shared, called):
    tree = Tree([[0], [1], [5], [0, 0], [0, 2], [1, 0], [1, 1], [0, 2, 0], [1, 0, 0]])
    heads, lm_head = wide_heads(parent_rank, shared=shared, root_rank=5)
    table = torch.nn.Embedding(70, 8)
    generator = torch.Generator().manual_seed(2)
    hidden, root = torch.randn(1, 8, generator=generator).expand(5, -1), torch.tensor([0, 69, 3, 3, 12])
    with torch.no_grad():
        table.weight.copy_(torch.randn(70, 8, generator=generator) * 0.02)
        if called:  # a module that only it can call, as a quantised or an adapted one
            lm_head.register_forward_hook(lambda module, given, result: result.clone())
        if parent_rank:
            heads.candidate_tokens *= 0.05
            expected = [walked(heads, lm_head, hidden[row], root[row], tree, table.weight) for row in range(5)]
        else:
            with_zero, _ = wide_heads(1, shared=shared, root_rank=5)
            with_zero.load_state_dict(heads.state_dict(), strict=False)
            with_zero.candidate_tokens.zero_()
            expected = [walked(with_zero, lm_head, hidden[row], root[row], tree, table.weight) for row in range(5)]
        found = arranged(heads, lm_head if shared else None, hidden, root, tree, table).tolist()
    assert found == expected
    assert found[2] == found[3]
    assert len({tuple(row[1:4]) for row in found}) > 2, "the root makes no difference: the case shows nothing"


def test_forward_adds_the_parent_term_if_parents_are_given():
    heads, lm_head = wide_heads(4, token_map=MAP, shared=True)
    hidden, parents = torch.randn(5, 8), torch.randint(0, 70, (5, 3))
    base, whole = heads(hidden, lm_head), heads(hidden, lm_head, parents)
    rows = [MAP.tolist().index(token) if token in MAP else -1 for token in parents.flatten().tolist()]
    of_parents = heads.parent_tokens[rows].view(5, 3, 4)
    for row in range(5):
        for head in range(3):
            term = heads.candidate_tokens @ (heads.parent_mix[head].T @ of_parents[row, head])
            torch.testing.assert_close(whole[row, head], base[row, head] + term)
    with pytest.raises(ValueError, match=r"heads: expected some whose drafts depend on .*, got parent_rank 0"):
        wide_heads(0)[0](hidden, parents=parents)


def test_drafts_do_not_depend_on_the_rows_beside_them():
    """The root's product is `decode_linear`'s, whose rows are the same bits in any batch; PyTorch's are not."""
    torch.manual_seed(3)
    heads = MedusaHeads(192, 70, 2, root_rank=96)
    torch.nn.init.normal_(heads.root_up)
    torch.nn.init.normal_(heads.w2)
    hidden, root = torch.randn(3, 192), torch.randn(3, 192)
    with torch.no_grad():
        together = heads.propose(hidden, 4, root_embedding=root).logprobs
        alone = [heads.propose(hidden[b, None], 4, root_embedding=root[b, None]).logprobs for b in range(3)]
    assert torch.equal(together, torch.cat(alone))


def test_parents_outside_a_trimmed_vocabulary_share_a_row():
    token_map = torch.randperm(70, generator=torch.Generator().manual_seed(1))[:50]
    heads, _ = wide_heads(4, token_map=token_map)
    rows = torch.full((70,), 50)
    rows[token_map] = torch.arange(50)
    whole = MedusaHeads(8, 70, 3, 2, token_map=token_map, parent_rank=4, all_parents=True)
    whole.load_state_dict(heads.state_dict() | {"parent_tokens": heads.parent_tokens[rows]})
    hidden, root = torch.randn(70, 8), torch.arange(70)
    for mine, theirs in zip(
        heads.propose_children(hidden, root, 9), whole.propose_children(hidden, root, 9), strict=True
    ):
        assert torch.equal(mine, theirs)
    assert (len(heads.remade().parent_tokens), len(whole.remade().parent_tokens)) == (51, 70)
    with pytest.raises(ValueError, match="all_parents: expected True or False, got 1"):
        MedusaHeads(8, 70, 3, parent_rank=4, all_parents=1)


@pytest.mark.parametrize("name", VARIANTS)
def test_proposing_draft_tokens_does_not_synchronise_with_the_host(name):
    model = tiny()
    heads = variant(model, **VARIANTS[name])
    shape = TreeTensors.from_tree(TREES["uneven"], model.device)
    # Fake tensors: reading a value, or a size that depends on one, is an error.
    with torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True):
        root = torch.zeros(3, dtype=torch.int64)
        state = types.SimpleNamespace(hidden=torch.zeros(3, heads.input_size), root=root, text=None)
        drafts = propose(state, heads, model.lm_head, shape, embed_tokens=model.model.embed_tokens)
        tokens, _ = arrange(state, drafts, shape)
    assert isinstance(tokens, FakeTensor)
    assert (tokens.dtype, tokens.shape) == (torch.int64, (3, TREES["uneven"].num_nodes))


@pytest.mark.parametrize("name", ["fp8, parents, two layers", "int8, parents, root, two layers"])
def test_a_compiled_step_writes_transformers_text(name, monkeypatch):
    monkeypatch.setattr("torch.compile", functools.partial(torch.compile, backend="eager"))
    model = tiny()
    [row] = prompts(1, [6])
    expected = transformers_greedy(model, row, 12)
    heads = variant(model, **VARIANTS[name])
    with MedusaModel(model, heads, TREES["cartesian"], backend="compiled") as medusa:
        assert new_tokens(medusa.generate(row[None], max_new_tokens=12), 6) == [expected]


@pytest.fixture
def floats():
    generator = torch.Generator().manual_seed(4)
    heads = MedusaHeads(16, 30, 3, token_map=torch.arange(29), parent_rank=2)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
        heads.w2 *= torch.logspace(-6, 6, 29)[:, None]
        heads.w2[1, 3] = 0.0
        heads.w2[2, 4] = 1e-42
    return heads


@pytest.mark.parametrize(("storage", "limit"), [("int8", 127), ("fp8", 448)])
def test_quantised_rows_are_the_nearest_multiples_of_their_scale(floats, storage, limit):
    heads = floats.quantized(storage)
    assert heads.storage == storage
    assert heads.w2.dtype == {"int8": torch.int8, "fp8": torch.float8_e4m3fn}[storage]
    assert heads.w2_scale.dtype == torch.float32
    multiples, scale = heads.w2.double(), heads.w2_scale.double()[..., None]
    exact = floats.w2.detach().double()
    usual = torch.ones(3, 29, dtype=torch.bool)
    usual[1, 3] = usual[2, 4] = False
    assert (multiples.abs().amax(-1)[usual] == limit).all()
    assert not multiples[1, 3].any()
    error = (multiples * scale - exact).abs()
    # int8: half a step. fp8: half a step of three bits after the leading one, or of the smallest numbers.
    allowed = scale / 2 if storage == "int8" else torch.maximum(exact.abs() / 16, scale * 2.0**-10)
    assert (error <= allowed * (1 + 1e-5)).all()
    assert error.max() > 0
    for name in ("w1", "b1", "token_map", "parent_tokens", "parent_mix", "candidate_tokens"):
        assert torch.equal(getattr(heads, name), getattr(floats, name))
        assert getattr(heads, name).data_ptr() != getattr(floats, name).data_ptr()
    assert not heads.training
    assert not any(parameter.requires_grad for parameter in heads.parameters())
    assert floats.w2.requires_grad
    # Reference and op agree with the dequantised weights.
    hidden = torch.randn(4, 16)
    inner = torch.einsum("bh,kgh->bkg", hidden.double(), floats.w1[:, 0].double()) + floats.b1[:, 0].double()
    states = hidden[:, None].double() + inner * torch.sigmoid(inner)
    logits = torch.einsum("bkh,kvh->bkv", states, multiples * scale)
    torch.testing.assert_close(heads(hidden).double(), logits, rtol=1e-4, atol=1e-4)
    logprobs, tokens = heads.propose(hidden, 5)
    best = logits.log_softmax(-1).topk(5)
    torch.testing.assert_close(logprobs.double(), best.values, rtol=1e-4, atol=1e-3)
    assert torch.equal(tokens, best.indices)


@pytest.mark.parametrize("storage", ["int8", "fp8"])
@pytest.mark.parametrize(
    "convert",
    [
        lambda heads: heads.to(torch.bfloat16),
        lambda heads: heads.bfloat16().float(),
        lambda heads: heads.type(torch.float16),
    ],
    ids=["to", "there and back", "type"],
)
def test_dtype_conversions_leave_8_bit_weights_unchanged(floats, storage, convert):
    heads = floats.quantized(storage)
    bits, scale = heads.w2.view(torch.uint8).clone(), heads.w2_scale.clone()
    made = convert(heads)
    assert made is heads
    assert made.w2.dtype == {"int8": torch.int8, "fp8": torch.float8_e4m3fn}[storage]
    assert torch.equal(made.w2.view(torch.uint8), bits)
    assert made.w2_scale.dtype == torch.float32
    assert torch.equal(made.w2_scale, scale)
    assert {p.dtype for p in made.parameters()} == {made.w1.dtype}


def test_copies_and_states_of_8_bit_heads(floats):
    heads = floats.quantized("fp8")
    twin = copy.deepcopy(heads).to("meta")
    assert (twin.w2.dtype, twin.w2.device.type, twin.w2_scale.dtype) == (torch.float8_e4m3fn, "meta", torch.float32)
    file = io.BytesIO()
    torch.save(heads.state_dict(), file)
    file.seek(0)
    other = MedusaHeads(16, 30, 3, token_map=torch.arange(1, 30), parent_rank=2, storage="fp8")
    other.load_state_dict(torch.load(file))
    assert torch.equal(other.w2.view(torch.uint8), heads.w2.view(torch.uint8))
    assert torch.equal(other.w2_scale, heads.w2_scale)
    with pytest.raises(ValueError, match=r"w2: expected torch.int8 \(storage 'int8'\), got torch.float8_e4m3fn"):
        MedusaHeads(16, 30, 3, token_map=torch.arange(29), parent_rank=2, storage="int8").load_state_dict(
            heads.state_dict()
        )
    with pytest.raises(ValueError, match=r"w2: expected a floating type \(storage 'float'\), got torch.float8_e4m3fn"):
        floats.load_state_dict(heads.state_dict())
    with pytest.raises(ValueError, match=r"w2: expected torch.float8_e4m3fn .*, got torch.float32"):
        other.load_state_dict(floats.state_dict())


def test_a_state_brings_its_own_trimmed_vocabulary():
    heads, _ = wide_heads(4, token_map=torch.arange(50))
    other, _ = wide_heads(4, token_map=torch.arange(20, 70))
    other.load_state_dict(heads.state_dict())
    hidden, root = torch.randn(3, 8), torch.tensor([4, 0, 69])
    found, expected = (these.propose_children(hidden, root, 4) for these in (other, heads))
    assert torch.equal(found.tokens, expected.tokens)
    assert torch.equal(found.order, expected.order)


def poisoned(value):
    heads = MedusaHeads(4, 6, 2)
    with torch.no_grad():
        heads.w2[1, 5, 2] = value
    return heads


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: MedusaHeads(4, 6, 2).quantized("int4"), "storage: expected 'int8' or 'fp8', got 'int4'"),
        (lambda: MedusaHeads(4, 6, 2).quantized("int8").quantized("int8"), "heads: expected an .* got one in int8"),
        (lambda: MedusaHeads(4, 6, 2, shared_projection=True).quantized("fp8"), "heads: expected an .* a shared one"),
        (lambda: MedusaHeads(4, 6, 2, shared_projection=True, storage="fp8"), "storage: expected 'float' with a"),
        (lambda: MedusaHeads(4, 6, 2, parent_rank=-1), "parent_rank: expected at least 0, got -1"),
        (lambda: MedusaHeads(4, 6, 2, feature_layers=[2, 1]), r"feature_layers: expected ascending .* got \[2, 1\]"),
        (lambda: MedusaHeads(4, 6, 2, feature_layers=[0]), r"feature_layers: expected ascending .* got \[0\]"),
        (
            lambda: MedusaHeads(4, 6, 2, feature_layers=[1]).residual(torch.zeros(3, 4)),
            r"hidden: expected \[B, 8\], got \[3, 4\]",
        ),
        (lambda: MedusaHeads(4, 6, 2, root_rank=5), r"root_rank: expected at most 4 \(the hidden size\), got 5"),
        (lambda: poisoned(math.nan).quantized("int8"), r"w2\[1\]: expected finite weights, got NaN or Inf"),
    ],
)
def test_invalid_head_settings_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["eager", "graph"])
@pytest.mark.parametrize("name", VARIANTS)
def test_on_a_gpu_greedy_text_is_transformers(name, backend):
    model = tiny()
    heads = variant(model, **VARIANTS[name]).cuda()
    model.cuda()
    rows = [row.cuda() for row in prompts(3, [7, 1, 19])]
    expected = [transformers_greedy(model, row, NEW) for row in rows]
    ids, mask = (tensor.cuda() for tensor in padded(rows))
    with MedusaModel(model, heads, TREES["uneven"], backend=backend) as medusa:
        output = medusa.generate(ids, mask, max_new_tokens=NEW)
    assert new_tokens(output, ids.shape[1]) == expected
    assert_some_accepted(output)
