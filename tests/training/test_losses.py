"""The training losses against cross-entropy on full logits in float64, and by hand."""

import math

import pytest
import torch
import torch.nn.functional as F
from formulas import (
    CASES,
    HEADS,
    HIDDEN,
    MAP,
    SEGMENTS,
    VOCAB,
    assert_equal_gradients,
    gradients,
    inputs_of,
    plain_loss,
    plain_targets,
    random_heads,
    random_text,
    random_weight,
)
from torch import nn

from medusa_decoding import MedusaHeads
from medusa_decoding.training.data.targets import IGNORE, number_segments, shifted_labels
from medusa_decoding.training.loss.language import distillation_loss, language_loss
from medusa_decoding.training.loss.medusa import head_weights, medusa_loss


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("targets", ["hard", "kl"])
@pytest.mark.parametrize("chunk", [1, 4, 100])
def test_loss_and_gradients_equal_the_formula_on_full_logits(case, targets, chunk):
    heads = random_heads(**CASES[case])
    hidden, labels = random_text(hidden=heads.input_size)
    hidden.requires_grad_()
    weight = random_weight().requires_grad_()
    teacher = weight if targets == "kl" else None
    given = inputs_of(heads, labels) | ({"lm_head": weight} if heads.shared_projection else {})
    found = medusa_loss(
        hidden, heads, labels, **given, segments=SEGMENTS, teacher_lm_head=teacher, chunk=chunk, through_backbone=True,
        top=0,
    )  # fmt: skip
    expected = plain_loss(hidden, heads, labels, **given, segments=SEGMENTS, teacher=teacher)
    torch.testing.assert_close(found.loss, expected, rtol=1e-12, atol=1e-12)
    assert found.hits.shape == (HEADS, 0)
    inputs = [hidden, *heads.parameters(), *([weight] if heads.shared_projection else [])]
    least = 1e-5 if targets == "kl" else 1e-4
    assert_equal_gradients(found.loss, expected, inputs, least=least, rtol=1e-9, atol=1e-12)


def test_the_loss_by_hand():
    # Two candidates, one head with W1 = 0 (its state is the hidden state) and W2 = identity: logits are the states.
    heads = MedusaHeads(2, 2, 2, dtype=torch.float64)
    with torch.no_grad():
        heads.w2.copy_(torch.eye(2, dtype=torch.float64).expand(2, -1, -1))
    log3, log7 = math.log(3), math.log(7)
    hidden = torch.tensor([[log3, 0.0], [0.0, log7], [5.0, 5.0], [1.0, 2.0]], dtype=torch.float64)
    labels = torch.tensor([0, 1, 0, 1])
    # Head 0 at position 0 drafts label 2 (= 0): p = 3/4. At position 1, label 3 (= 1): p = 7/8.
    # Head 1 at position 0 drafts label 3 (= 1): p = 1/4. Positions 2 and 3 have no targets.
    first = (-math.log(3 / 4) - math.log(7 / 8)) / 2
    second = -math.log(1 / 4)
    found = medusa_loss(hidden, heads, labels, top=2)
    assert found.loss.item() == pytest.approx(0.8 * first + 0.64 * second, rel=1e-14)
    assert (found.sums / found.counts).tolist() == pytest.approx([first, second], rel=1e-14)
    assert found.counts.tolist() == [2, 1]
    assert found.hits.tolist() == [[2, 2], [0, 1]]
    assert (found.hits / (found.counts + found.outside)[:, None]).tolist() == [[1, 1], [0, 1]]


def test_the_loss_of_soft_labels_by_hand():
    # One head with W1 = 0 and W2 = identity: its logits are the state. The teacher's are those of the state after it.
    heads = MedusaHeads(2, 2, 1, dtype=torch.float64)
    with torch.no_grad():
        heads.w2.copy_(torch.eye(2, dtype=torch.float64)[None])
    hidden = torch.tensor([[math.log(3), 0.0], [0.0, math.log(7)], [9.0, 9.0]], dtype=torch.float64)
    labels = torch.tensor([0, 1, 1])
    # Only position 0 has a target (label 2). There q = (3/4, 1/4) and p = (1/8, 7/8), that of position 1.
    kl = 1 / 8 * math.log((1 / 8) / (3 / 4)) + 7 / 8 * math.log((7 / 8) / (1 / 4))
    found = medusa_loss(hidden, heads, labels, teacher_lm_head=torch.eye(2).double(), weights=torch.ones(1))
    assert found.loss.item() == pytest.approx(kl, rel=1e-14)
    assert found.sums.tolist() == pytest.approx([kl], rel=1e-14)
    # The gradient of W2 is the outer product of that of the logits, q - p, and the state, (log 3, 0).
    (gradient,) = gradients(found.loss, heads.w2)
    slope = (3 / 4 - 1 / 8) * math.log(3)
    wanted = torch.tensor([[[slope, 0.0], [-slope, 0.0]]], dtype=torch.float64)
    torch.testing.assert_close(gradient, wanted, rtol=1e-13, atol=1e-15)


def test_hits_and_counts_of_soft_labels_are_those_of_cross_entropy():
    heads = random_heads(token_map=MAP)
    hidden, labels = random_text(60)
    hard = medusa_loss(hidden, heads, labels, top=3, chunk=7)
    soft = medusa_loss(hidden, heads, labels, top=3, chunk=7, teacher_lm_head=random_weight())
    assert soft.hits.tolist() == hard.hits.tolist()
    assert 0 < hard.hits[0, 0] < hard.counts[0]
    assert (soft.counts.tolist(), soft.outside.tolist()) == (hard.counts.tolist(), hard.outside.tolist())


def test_the_teacher_gets_no_gradient():
    backbone, lm_head = nn.Linear(HIDDEN, HIDDEN).double(), nn.Linear(HIDDEN, VOCAB, bias=False).double()
    heads = random_heads()
    states, labels = random_text()
    medusa_loss(backbone(states), heads, labels, teacher_lm_head=lm_head).loss.backward()
    assert [p.grad for p in [*backbone.parameters(), *lm_head.parameters()]] == [None, None, None]
    medusa_loss(backbone(states), heads, labels, teacher_lm_head=lm_head, through_backbone=True).loss.backward()
    assert all(p.grad.abs().max() > 0 for p in backbone.parameters())
    assert lm_head.weight.grad is None


def test_medusa_1_gives_the_backbone_no_gradient():
    backbone, lm_head = nn.Linear(HIDDEN, HIDDEN).double(), nn.Linear(HIDDEN, VOCAB, bias=False).double()
    heads = random_heads(shared_projection=True)
    states, labels = random_text()
    medusa_loss(backbone(states), heads, labels, lm_head=lm_head).loss.backward()
    assert [p.grad for p in [*backbone.parameters(), *lm_head.parameters()]] == [None, None, None]
    assert all(p.grad.abs().max() > 0 for p in heads.parameters())
    medusa_loss(backbone(states), heads, labels, lm_head=lm_head, through_backbone=True).loss.backward()
    assert all(p.grad.abs().max() > 0 for p in [*backbone.parameters(), *lm_head.parameters()])


def test_language_loss_equals_cross_entropy():
    hidden, labels = random_text()
    hidden.requires_grad_()
    weight = torch.randn(VOCAB, HIDDEN, dtype=torch.float64, requires_grad=True)
    segments = torch.tensor([0] * 10 + [1] * 13)
    target, _ = plain_targets(labels, segments, 1)
    found = language_loss(hidden, weight, labels, segments=segments, chunk=4)
    expected = F.cross_entropy(hidden @ weight.T, target)
    torch.testing.assert_close(found.loss, expected)
    assert_equal_gradients(found.loss, expected, [hidden, weight])
    assert found.hits[0, 0] == ((hidden @ weight.T).argmax(-1) == target).sum()
    assert found.counts.tolist() == [(target != IGNORE).sum()]


def test_distillation_loss_equals_the_divergence_on_full_logits():
    hidden, labels = random_text()
    teacher_hidden, _ = random_text(seed=5)
    hidden.requires_grad_(), teacher_hidden.requires_grad_()
    weight = torch.randn(VOCAB, HIDDEN, dtype=torch.float64, requires_grad=True)
    original = torch.randn(VOCAB, HIDDEN, dtype=torch.float64, requires_grad=True)
    target, _ = plain_targets(labels, None, 1)
    kept = target != IGNORE
    student = (hidden @ weight.T)[kept].log_softmax(-1)
    teacher = (teacher_hidden @ original.T)[kept].log_softmax(-1).detach()
    expected = F.kl_div(student, teacher, log_target=True, reduction="batchmean")
    found = distillation_loss(hidden, weight, teacher_hidden, original, labels, chunk=3)
    torch.testing.assert_close(found.loss, expected)
    assert_equal_gradients(found.loss, expected, [hidden, weight])
    again = distillation_loss(hidden, weight, teacher_hidden, original, labels)
    assert gradients(again.loss, teacher_hidden, original) == (None, None)
    same = distillation_loss(hidden, weight, hidden, weight, labels)
    assert same.loss == 0


def test_a_teacher_with_excluded_tokens_gives_a_finite_divergence():
    hidden, labels = torch.eye(3, dtype=torch.float64), torch.zeros(3, dtype=torch.int64)
    teacher = torch.tensor([[0.0, -math.inf, 1.0]] * 3, dtype=torch.float64)
    found = distillation_loss(hidden, torch.eye(3, dtype=torch.float64), torch.eye(3).double(), _Fixed(teacher), labels)
    # Position 0: student softmax of (1, 0, 0); teacher 1 / (1 + e) for candidate 0, e / (1 + e) for candidate 2.
    log_p = torch.tensor([1.0, 0.0, 0.0]).double().log_softmax(0)
    p = 1 / (1 + math.e)
    first = p * (math.log(p) - log_p[0]) + (1 - p) * (math.log(1 - p) - log_p[2])
    log_p = torch.tensor([0.0, 1.0, 0.0]).double().log_softmax(0)
    second = p * (math.log(p) - log_p[0]) + (1 - p) * (math.log(1 - p) - log_p[2])
    assert found.loss.item() == pytest.approx(((first + second) / 2).item(), rel=1e-12)


class _Fixed(nn.Module):
    def __init__(self, rows):
        super().__init__()
        self.rows, self.out_features = rows, rows.shape[1]

    def forward(self, states):
        return self.rows[: len(states)]


def test_head_weights_by_formula():
    heads = random_heads()
    hidden, labels = random_text()
    weights = torch.tensor([0.0, 2.0, 0.5])
    found = medusa_loss(hidden, heads, labels, weights=weights).loss
    torch.testing.assert_close(found, plain_loss(hidden, heads, labels, weights=weights))
    assert head_weights(3).tolist() == pytest.approx([0.8, 0.64, 0.512])


def test_labels_outside_a_trimmed_vocabulary_are_excluded_from_the_loss_and_count_as_misses():
    heads = random_heads(token_map=MAP)
    hidden, labels = random_text(60)
    found = medusa_loss(hidden, heads, labels, top=3)
    expected = [plain_targets(labels, None, k + 2, MAP) for k in range(HEADS)]
    assert found.outside.tolist() == [outside for _, outside in expected]
    assert min(found.outside) > 0
    assert found.counts.tolist() == [(target != IGNORE).sum() for target, _ in expected]
    logits = heads(hidden)
    for k, (target, outside) in enumerate(expected):
        kept = target != IGNORE
        best = logits[kept, k].topk(3).indices == target[kept, None]
        hits = best.cumsum(1).sum(0)
        assert found.hits[k].tolist() == hits.tolist()
        assert found.counts[k] + found.outside[k] == kept.sum() + outside


def test_equal_logits_count_the_lower_row_first_and_nan_is_a_miss():
    heads = MedusaHeads(2, 5, 1, dtype=torch.float64)
    hidden = torch.ones(4, 2, dtype=torch.float64)
    # W2 is zero: all five candidates are equal, and a target is as likely as its row is low.
    found = medusa_loss(hidden, heads, torch.tensor([0, 0, 3, 0]), top=5)
    assert found.hits.tolist() == [[1, 1, 1, 2, 2]]
    assert medusa_loss(hidden, heads, torch.tensor([0, 0, 3, 0]), top=1).hits.tolist() == [[1]]
    found = medusa_loss(hidden * math.nan, heads, torch.tensor([0, 0, 3, 0]), top=5)
    assert found.hits.tolist() == [[0] * 5]
    assert medusa_loss(hidden * math.nan, heads, torch.tensor([0, 0, 3, 0]), top=1).hits.tolist() == [[0]]
    assert found.loss.isnan()


@pytest.mark.parametrize("teacher", [None, random_weight()], ids=["hard", "kl"])
def test_no_target_at_all_gives_zero_and_zero_gradients(teacher):
    heads = random_heads()
    hidden, labels = random_text()
    found = medusa_loss(hidden, heads, torch.full_like(labels, IGNORE), teacher_lm_head=teacher)
    assert found.loss == 0
    found.loss.backward()
    assert all(p.grad is not None and not p.grad.any() for p in heads.parameters())
    assert found.counts.tolist() == [0, 0, 0]


def test_targets_do_not_cross_segments():
    numbers = number_segments(torch.tensor([[0, 1, 2, 0, 1], [0, 1, 0, 1, 2]]))
    assert numbers.tolist() == [1, 1, 1, 2, 2, 3, 3, 4, 4, 4]
    # A row that continues an earlier one (its positions do not start at 0) is still a separate segment.
    assert number_segments(torch.tensor([[0, 1], [2, 3]])).tolist() == [1, 1, 2, 2]
    labels = torch.arange(10)
    found = shifted_labels(labels, [1, 2, 20], segments=numbers)
    x = IGNORE
    assert found.tolist() == [[1, 2, x, 4, x, 6, x, 8, 9, x], [2, x, x, x, x, x, x, 9, x, x], [x] * 10]
