"""Top-p without a sort: the tokens that a walk in exact arithmetic keeps, and the texts of transformers' own top-p."""

import math
from fractions import Fraction

import pytest
import torch
from models import heads_for, padded, prompts, tiny
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.generation import logits_process as lp

from medusa_decoding import MedusaModel, Tree
from medusa_decoding.decode.selection import sampling
from medusa_decoding.decode.selection.sampling import Nucleus, at_once, without_sorting
from medusa_kernels import Implementation


def walked(scores, top_p):
    """The tokens kept: from the least probable up, a token is dropped while the sum with it is at most 1 - top_p."""
    shares = [Fraction(float(share)) for share in scores.softmax(-1)]
    gone, total = set(), Fraction(0)
    for token in sorted(range(len(shares)), key=lambda token: (shares[token], token))[:-1]:
        total += shares[token]
        if total > Fraction(1 - top_p):
            break
        gone.add(token)
    return set(range(len(shares))) - gone


def kept(scores, top_p):
    filtered = Nucleus(top_p)(None, scores)
    stays = filtered != -math.inf
    assert torch.equal(filtered[stays], scores[stays])
    return [set(row.nonzero()[:, 0].tolist()) for row in stays]


@pytest.fixture(params=["sorted", "buckets"])
def either_way(request, monkeypatch):
    """Use the path for small vocabularies and the one for large ones."""
    if request.param == "buckets":
        monkeypatch.setattr(sampling, "FEW_TOKENS", 0)


@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize("top_p", [0.0, 0.3, 0.999])
@pytest.mark.parametrize("spread", [0.0, 1.0, 8.0])
def test_the_tokens_of_an_exact_walk_are_kept(top_p, spread):
    """Rows of ties throughout, of few and of many likely tokens; ties at the edge go by their ids."""
    generator = torch.Generator().manual_seed(int(100 * spread))
    scores = torch.randn(3, 700, generator=generator) * spread
    scores[1] = scores[1].bfloat16().float()
    scores[2, ::3] = scores[2, 0]
    assert kept(scores, top_p) == [walked(row, top_p) for row in scores]


@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_scores_that_are_not_finite_stay_so(bad):
    scores = torch.zeros(2, 50)
    scores[0, 7] = bad
    filtered = Nucleus(0.5)(None, scores)
    assert not math.isfinite(float(filtered[0].amax()))
    assert len(kept(scores[1:], 0.5)[0]) == 25


def test_only_transformers_own_top_p_is_replaced():
    class Mine(lp.TopPLogitsWarper):
        pass

    for processor in (
        Mine(0.9), lp.TopPLogitsWarper(0.9, min_tokens_to_keep=2), lp.TopPLogitsWarper(0.9, filter_value=-1e9),
        lp.TopKLogitsWarper(3),
    ):  # fmt: skip
        assert without_sorting(processor) is processor
    assert without_sorting(lp.TopPLogitsWarper(0.7)).top_p == 0.7


CASES = {"alone": {"top_p": 0.9}, "after top-k": {"top_p": 0.8, "top_k": 6}, "hot": {"top_p": 0.95, "temperature": 1.6}}


class Selections(TorchDispatchMode):
    """Records PyTorch's sorts and selections, by the size that they go over."""

    def __init__(self):
        super().__init__()
        self.sizes, self.draws = [], 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if str(function).startswith(("aten.sort", "aten.argsort", "aten.topk", "aten.kthvalue")):
            self.sizes.append(args[0].shape[-1])
        self.draws += str(function).startswith("medusa_kernels.draw_tokens")
        return function(*args, **(kwargs or {}))


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """The op draws at once, by whatever serves it here."""
    monkeypatch.setattr(sampling, "served_by", lambda op, device: Implementation("triton", None, f"{op} {device}"))


AT_ONCE = {
    **CASES,
    "all": {"temperature": 1.3, "top_k": 60, "top_p": 0.93, "min_p": 0.01},
    "late end": {"top_p": 0.93, "min_new_tokens": 9, "eos_token_id": [3, 5]},
}
TREES = {
    "plain": Tree([]),
    "siblings": Tree.cartesian([3, 2]),
    "copied": Tree.chain(2).with_lookup(4),
    "dynamic": Tree.dynamic(5, depth=2, top_k=3),
}


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("tree", TREES.values(), ids=TREES)
@pytest.mark.parametrize("settings", AT_ONCE.values(), ids=AT_ONCE)
def test_a_gpu_draws_at_all_nodes_without_a_sort(settings, tree, monkeypatch):
    """The text is that of the processors at each depth; neither sorts nor top-k run over the vocabulary."""
    model = tiny(vocab_size=211)
    ids, mask = padded(prompts(3, [7, 2, 12], vocab=211))
    kwargs = {"max_new_tokens": 30, "do_sample": True, "seed": 1, "top_k": 0, **settings}
    with MedusaModel(model, heads_for(model), tree) as medusa:
        with Selections() as here:
            ours = medusa.generate(ids, mask, **kwargs)
        monkeypatch.setattr(sampling, "DRAW_AT_ONCE", False)
        monkeypatch.setattr(sampling, "without_sorting", lambda processor: processor)
        with Selections() as there:
            theirs = medusa.generate(ids, mask, **kwargs)
    assert ours.sequences.tolist() == theirs.sequences.tolist()
    assert ours.accept_lengths == theirs.accept_lengths
    steps = max(map(len, ours.accept_lengths))
    assert here.draws == steps + 1, "once per step, and in the prefill"
    assert 211 not in here.sizes
    # There it is counted at every depth, at least once.
    assert there.draws == 0
    assert there.sizes.count(211) >= 1 + steps * (1 + tree.depth)


def test_which_processors_are_one_draw():
    temperature, top_k = lp.TemperatureLogitsWarper(0.7), lp.TopKLogitsWarper(5)
    top_p, min_p = lp.TopPLogitsWarper(0.9), lp.MinPLogitsWarper(0.1)
    every = {"temperature": 0.7, "top_k": 5, "top_p": 0.9, "min_p": 0.1}
    assert at_once([temperature, top_k, top_p, min_p]) == every
    assert at_once([top_k, min_p]) == {"top_k": 5, "min_p": 0.1}
    assert at_once([]) == {}

    class Mine(lp.TopKLogitsWarper):
        pass

    for others in (
        [top_p, top_k], [top_p, temperature], [top_p, top_p], [Mine(5)], [lp.TypicalLogitsWarper(0.9)],
        [top_k, lp.LogitNormalization()], [lp.TopPLogitsWarper(0.9, min_tokens_to_keep=2)],
        [lp.MinPLogitsWarper(0.1, filter_value=-1e9)],
    ):  # fmt: skip
        assert at_once(others) is None
