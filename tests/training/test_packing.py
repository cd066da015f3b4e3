"""Packed rows: each example occurs once, none attends to another, and targets end with their conversation."""

import itertools

import numpy as np
import pytest
import torch
import transformers
import transformers.modeling_flash_attention_utils as flash
from hypothesis import given, settings
from hypothesis import strategies as st

from medusa_decoding import MedusaHeads
from medusa_decoding.training.data.encoding import Example
from medusa_decoding.training.data.packing import PackedDataset, collate, fit, model_inputs
from medusa_decoding.training.data.records import Report
from medusa_decoding.training.data.targets import IGNORE, number_segments
from medusa_decoding.training.loss.language import language_loss
from medusa_decoding.training.loss.medusa import medusa_loss

FAMILIES = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM, {}),
    "mistral, window": (transformers.MistralConfig, transformers.MistralForCausalLM, {"sliding_window": 4}),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM, {}),
}
VOCAB, PAD = 17, 0


def model(family="llama"):
    config_class, model_class, own = FAMILIES[family]
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = config_class(vocab_size=VOCAB, initializer_range=0.4, **sizes, **own)
    torch.manual_seed(0)
    return model_class(config).eval()


def examples(lengths, *, seed=0, learnt=0.7):
    rng = np.random.default_rng(seed)
    return [
        Example(rng.integers(1, VOCAB, n).astype(np.int32), rng.random(n) < learnt, f"a:{i}")
        for i, n in enumerate(lengths)
    ]


LENGTHS = [7, 5, 3, 9, 1, 2, 12]


def batch_of(these, length, attention="sdpa", **options):
    data = PackedDataset(these, length, PAD, **options)
    return data, collate([data[i] for i in range(len(data))], attention)


@torch.no_grad()
def largest_difference(base, these, data, batch, **changes):
    """The largest difference between logits of packed conversations and of each alone."""
    packed = base(**model_inputs(batch) | changes).logits
    difference = 0.0
    for row, numbers in zip(packed, data.rows, strict=True):
        start = 0
        for number in numbers:
            ids = torch.from_numpy(these[number].ids).long()[None]
            alone = base(ids, use_cache=False).logits[0]
            difference = max(difference, (row[start : start + ids.shape[1]] - alone).abs().max().item())
            start += ids.shape[1]
    return difference


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_logits_equal_separate_ones(family, attention):
    base = model(family)
    base.set_attn_implementation(attention)
    these = examples(LENGTHS)
    data, batch = batch_of(these, 14)
    assert max(map(len, data.rows)) > 1
    assert len(data) > 1
    assert largest_difference(base, these, data, batch) < 2e-5
    # With a cache, which models make by default, transformers does not detect that the row is packed.
    assert largest_difference(base, these, data, batch, use_cache=True) > 0.1


@torch.no_grad()
def test_packed_logits_under_flex_attention_equal_those_under_sdpa():
    """Its kernel is compiled. On a CPU it has no gradient: there it runs the frozen backbone only."""
    base = model()
    _, batch = batch_of(examples(LENGTHS), 14)
    expected = base(**model_inputs(batch)).logits
    base.set_attn_implementation("flex_attention")
    assert (base(**model_inputs(batch)).logits - expected).abs().max() < 2e-5
    whole = {name: value for name, value in model_inputs(batch).items() if name != "position_ids"}
    assert (base(**whole).logits - expected).abs().max() > 0.1


def varlen(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None, causal=False,
    window_size=(-1, -1), softcap=0.0, deterministic=False,
):  # fmt: skip
    """What flash-attn's varlen function computes, in plain PyTorch: [tokens, heads, dim], one sequence at a time."""
    assert causal
    bounds = cu_seqlens_q.tolist()
    assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
    assert (bounds[0], bounds[-1]) == (0, len(q))
    assert int(max_seqlen_q) == int(max_seqlen_k) == int(cu_seqlens_k.diff().max())
    found = torch.empty_like(q)
    for start, end in itertools.pairwise(bounds):
        back = torch.arange(end - start)[:, None] - torch.arange(end - start)
        seen = (back >= 0) & ((back <= window_size[0]) | (window_size[0] < 0))
        part = [x[start:end].transpose(0, 1) for x in (q, k, v)]
        part[1:] = [x.repeat_interleave(q.shape[1] // k.shape[1], 0) for x in part[1:]]
        attended = torch.nn.functional.scaled_dot_product_attention(*part, attn_mask=seen, scale=softmax_scale)
        found[start:end] = attended.transpose(0, 1)
    return found


def dense(
    q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, deterministic=False
):
    """flash-attn's function for whole rows."""
    rows, length = q.shape[:2]
    bounds = torch.arange(rows + 1, dtype=torch.int32) * length
    flat = [x.flatten(0, 1) for x in (q, k, v)]
    found = varlen(*flat, bounds, bounds, length, length, 0.0, softmax_scale, causal, window_size)
    return found.view_as(q)


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_logits_under_flash_attention_s_interface(family, monkeypatch):
    """transformers' own path to flash-attn, with its two functions replaced by what they compute."""
    base = model(family)
    these = examples(LENGTHS)
    data, batch = batch_of(these, 14, "flash_attention_2")
    references = [base(torch.from_numpy(e.ids).long()[None], use_cache=False).logits[0] for e in these]
    monkeypatch.setattr(flash, "_lazy_imports", lambda *args, **kwargs: (dense, varlen, None, None, None))
    monkeypatch.setattr(flash, "_loaded_implementation", None)
    # Bypasses the check that the package is installed.
    base.config._attn_implementation_internal = "flash_attention_2"
    packed = base(**model_inputs(batch)).logits
    for row, numbers in zip(packed, data.rows, strict=True):
        ends = np.cumsum([len(these[number].ids) for number in numbers])
        for number, end in zip(numbers, ends, strict=True):
            alone = references[number]
            torch.testing.assert_close(row[end - len(alone) : end], alone, rtol=0, atol=2e-5)
    # With several rows, positions alone are not passed on: conversations would attend to each other.
    without = {name: value for name, value in model_inputs(batch).items() if "seq" not in name and "max" not in name}
    assert (base(**without).logits - packed).abs().max() > 0.1
    monkeypatch.setattr(flash, "_loaded_implementation", None)


@pytest.mark.gpu
def test_packed_logits_with_flash_attn():
    pytest.importorskip("flash_attn", reason="needs the flash-attn package")
    base = model().to("cuda", torch.bfloat16)
    these = examples(LENGTHS)
    data, batch = batch_of(these, 14, "flash_attention_2")
    exact = base(**{k: v.cuda() if torch.is_tensor(v) else v for k, v in model_inputs(batch_of(these, 14)[1]).items()})
    base.set_attn_implementation("flash_attention_2")
    found = base(**{k: v.cuda() if torch.is_tensor(v) else v for k, v in model_inputs(batch).items()})
    filled = torch.zeros(len(data), 14, dtype=torch.bool)
    for row, numbers in zip(filled, data.rows, strict=True):
        row[: sum(len(these[number].ids) for number in numbers)] = True
    difference = (found.logits - exact.logits).float().abs()[filled.cuda()]
    assert difference.max() < 0.1 * exact.logits.float().std()


def test_gradients_of_packed_and_separate_conversations_are_equal():
    base = model()
    heads = MedusaHeads(32, VOCAB, 3)
    torch.manual_seed(1)
    torch.nn.init.normal_(heads.w2, std=0.3)
    these = examples(LENGTHS)
    _, batch = batch_of(these, 14)
    numbers, labels = number_segments(batch["position_ids"]), batch["labels"].flatten()
    hidden = base.model(**model_inputs(batch)).last_hidden_state.flatten(0, 1)
    found = medusa_loss(hidden, heads, labels, segments=numbers, through_backbone=True)
    weight = base.lm_head.weight
    lm = language_loss(hidden, weight, labels, segments=numbers)
    (found.loss + lm.loss).backward()
    packed = [p.grad.clone() for p in [*base.parameters(), *heads.parameters()]]
    for p in [*base.parameters(), *heads.parameters()]:
        p.grad = None
    for example in these:
        ids = torch.from_numpy(example.ids).long()
        own = torch.where(torch.from_numpy(example.learnt), ids, IGNORE)
        hidden = base.model(ids[None], use_cache=False).last_hidden_state[0]
        loss = medusa_loss(hidden, heads, own, normaliser=found.counts, through_backbone=True).loss
        (loss + language_loss(hidden, weight, own, normaliser=lm.counts).loss).backward()
    for one, p in zip(packed, [*base.parameters(), *heads.parameters()], strict=True):
        assert one.abs().max() > 1e-5
        torch.testing.assert_close(one, p.grad, rtol=1e-3, atol=1e-5)


@given(st.lists(st.integers(1, 20), min_size=1, max_size=40))
@settings(deadline=None, max_examples=60)
def test_every_example_is_in_one_row_and_no_two_rows_fit_in_one(lengths):
    these = examples(lengths)
    data = PackedDataset(these, 20, PAD)
    assert sorted(number for row in data.rows for number in row) == list(range(len(lengths)))
    filled = [sum(lengths[number] for number in row) for row in data.rows]
    assert max(filled) <= 20
    assert len(filled) == 1 or sum(sorted(filled)[:2]) > 20
    assert data.fill == pytest.approx(sum(lengths) / (20 * len(filled)))
    for place, numbers in enumerate(data.rows):
        row = data[place]
        ids = np.concatenate([these[number].ids for number in numbers])
        assert row["input_ids"].tolist() == [*ids.tolist(), *[PAD] * (20 - len(ids))]
        positions = [t for number in numbers for t in range(lengths[number])]
        assert row["position_ids"].tolist() == [*positions, *range(20 - len(ids))]
        assert (row["labels"][len(ids) :] == IGNORE).all()


def test_labels_are_the_learnt_tokens_except_first_ones():
    one = Example(np.array([5, 6, 7], dtype=np.int32), np.array([True, False, True]), "a")
    two = Example(np.array([8, 9], dtype=np.int32), np.array([True, True]), "b")
    (row,) = PackedDataset([one, two], 6, PAD)
    assert row["labels"].tolist() == [IGNORE, IGNORE, 7, IGNORE, 9, IGNORE]
    assert row["input_ids"].tolist() == [5, 6, 7, 8, 9, PAD]


def test_rows_without_packing():
    data, batch = batch_of(examples([3, 5]), 8, "flash_attention_2", pack=False)
    assert data.rows == [[0], [1]]
    assert batch["cu_seq_lens_q"].tolist() == [0, 3, 8, 13, 16]
    assert batch["max_length_k"] == 5
    assert "cu_seq_lens_q" not in batch_of(examples([3]), 8)[1]


def test_conversations_that_are_too_long_are_truncated_dropped_or_split():
    (long,) = examples([23], learnt=1.1)
    text = Example(long.ids, long.learnt, "t", is_text=True)
    expected = {
        "truncate": [long.ids[:10]],
        "drop": [],
        "split": [long.ids[:10], long.ids[10:20], long.ids[20:]],
    }
    for way, pieces in expected.items():
        report = Report()
        assert [p.ids.tolist() for p in fit([long], 10, report, way)] == [p.tolist() for p in pieces]
        assert report.notes[f"longer than 10 tokens: {way}"] == 1
        assert [p.ids.tolist() for p in fit([text], 10, Report(), way)] == [p.tolist() for p in expected["split"]]
    assert [p.ids.tolist() for p in fit([long], 23, Report())] == [long.ids.tolist()]


def test_examples_without_targets_are_skipped_and_reported():
    only_first = Example(np.arange(1, 5, dtype=np.int32), np.array([True, False, False, False]), "a")
    late = Example(np.arange(1, 9, dtype=np.int32), np.arange(8) == 7, "b")
    report = Report()
    assert list(fit([only_first, late], 6, report)) == []
    assert dict(report.notes) == {"nothing to learn": 2, "longer than 6 tokens: truncate": 1}
