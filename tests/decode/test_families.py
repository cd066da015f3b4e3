"""Families beside Llama, Mistral, Qwen2 and Qwen3: every kind of layer that they have writes transformers' text."""

import functools
import logging

import pytest
import torch
from models import FAMILIES, MORE_FAMILIES, VOCAB, heads_for, padded, prompts, tiny, transformers_greedy
from oracles import counted, fits, joint, new_tokens
from peft import LoraConfig, get_peft_model

from medusa_decoding import MedusaModel, Session, Tree
from medusa_decoding.backbone import fused_layers
from medusa_decoding.backbone.fused_layers import NativeLayers
from medusa_decoding.decode.prefill import prefill

NEW = 20


EXPERTS = ("mixtral", "qwen2_moe", "qwen3_moe")
"""Their layers run by an op for each stage on a CPU, those of all others in one call of the C++ library."""


def wandering(family, **overrides):
    """A tiny model whose norms and biases are random too."""
    model = tiny(family, **overrides)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 1:
                weight.add_(torch.randn(weight.shape, generator=generator) * 0.3)
    return model


@pytest.mark.parametrize("family", [*FAMILIES, *MORE_FAMILIES])
def test_greedy_text_is_that_of_transformers(family, monkeypatch):
    """As layers run on a CPU, and by an op for each stage as on a GPU, with whole and with divided projections."""
    monkeypatch.setattr("medusa_decoding.decode.selection.greedy.allowed_logits", None)  # no step makes all logits
    model = wandering(family)
    rows = prompts(3, [7, 1, 12])
    expected = [transformers_greedy(model, row, NEW) for row in rows]
    ids, mask = padded(rows)
    with MedusaModel(model, heads_for(model), Tree.cartesian([4, 3])) as medusa:
        backbone, calls, run = medusa.backbone, [], NativeLayers.__call__
        monkeypatch.setattr(NativeLayers, "__call__", lambda *given: calls.append(1) or run(*given))
        output = medusa.generate(ids, mask, max_new_tokens=NEW)
        assert new_tokens(output, ids.shape[1]) == expected
        assert (0 < len(calls) <= output.steps) == (family not in EXPERTS)
        assert (backbone.native is None) == backbone.fuse == (family in EXPERTS)
        how = "fused, experts as modules" if family in EXPERTS else "one call of the C++ library"
        assert backbone.said == f"layers: {how} (plain modules)"
        assert medusa.backend == ("eager" if family in EXPERTS else "auto"), "experts cannot be captured in float32"
        backbone.native, backbone.fuse, backbone.choose_layers = None, True, lambda **_: False
        for parts in (1, 3):
            monkeypatch.setattr(fused_layers, "linear_parts", lambda *_, parts=parts: parts)
            assert new_tokens(medusa.generate(ids, mask, max_new_tokens=NEW), ids.shape[1]) == expected
    assert len({token for row in expected for token in row}) > 2
    assert [transformers_greedy(model, row, NEW) for row in rows] == expected


def test_of_logits_that_reach_the_cap_the_first_is_taken():
    """As in transformers' argmax."""
    model = wandering("gemma2", final_logit_softcapping=0.1)
    expected = [transformers_greedy(model, row, NEW) for row in prompts(3, [7, 1, 12])]
    with MedusaModel(model, heads_for(model), Tree.cartesian([4, 3])) as medusa:
        ids, mask = padded(prompts(3, [7, 1, 12]))
        assert new_tokens(medusa.generate(ids, mask, max_new_tokens=NEW), ids.shape[1]) == expected
    model.config.final_logit_softcapping = None
    assert [transformers_greedy(model, row, NEW) for row in prompts(3, [7, 1, 12])] != expected


@pytest.mark.parametrize("family", ["granite", "gemma2"])
@pytest.mark.parametrize("drawn", [False, True])
def test_heads_that_share_the_projection_draft_by_divided_and_capped_logits(family, drawn):
    """By the op or by calling the module: the same candidates, with the same log-probabilities."""
    model = tiny(family)
    heads, hidden = heads_for(model, shared=True), torch.randn(2, 32, generator=torch.Generator().manual_seed(5))
    noise = torch.randn(2, 4, VOCAB, generator=torch.Generator().manual_seed(6))
    options = {"temperature": 0.7, "noise": noise} if drawn else {}
    with MedusaModel(model, heads) as medusa, torch.inference_mode():
        lm_head = medusa.backbone.lm_head
        found = heads.propose(hidden, 5, lm_head, **options)
        logits = heads(hidden, lm_head) / options.get("temperature", 1.0) + options.get("noise", 0.0)
        plain = heads(hidden, model.lm_head)
        assert not torch.allclose(heads(hidden, lm_head), plain)
    values, tokens = logits.log_softmax(-1).topk(5)
    assert torch.equal(found.tokens, tokens)
    torch.testing.assert_close(found.logprobs, values)


@pytest.mark.parametrize("layers", [0, 1])
def test_layers_for_multi_token_prediction_are_named_once(caplog, layers):
    model = tiny(num_nextn_predict_layers=layers)
    with caplog.at_level(logging.INFO, "medusa_decoding"), MedusaModel(model, heads_for(model)) as medusa:
        medusa.generate(prompts(1, [4])[0][None], max_new_tokens=4)
    assert len([line for line in caplog.messages if "use_mtp=True" in line]) == layers


LONG = [(family, None) for family in ("phi3", "phi4", "olmo3", "gemma2", "gemma3", "smollm3", "mixtral")]


@pytest.mark.parametrize(("family", "cache"), [*LONG, ("gemma2", "int8"), ("phi4", "int8")])
def test_turns_in_chunks_write_the_text_of_plain_decoding(family, cache, monkeypatch):
    """Prompts longer than the window, in chunks, continued in a session; without int8 also transformers' text."""
    model = wandering(family)
    rows = prompts(2, [23, 9])
    ids, mask = padded(rows)
    monkeypatch.setattr("medusa_decoding.decode.loop.prefill", functools.partial(prefill, chunk=8))
    monkeypatch.setattr("medusa_decoding.backbone.backbone.Backbone.prefill_nodes", lambda *_: 0)
    with MedusaModel(model, heads_for(model), Tree.cartesian([4, 3]), cache_dtype=cache) as medusa:
        plain = [new_tokens(medusa.generate(r[None], max_new_tokens=NEW, tree=Tree([])), len(r))[0] for r in rows]
        assert new_tokens(medusa.generate(ids, mask, max_new_tokens=NEW), ids.shape[1]) == plain
        session, text = Session(), rows[0].tolist()
        for turn in ([], [1, 2, 3]):
            text += turn
            row = torch.tensor(text)
            expected = new_tokens(medusa.generate(row[None], max_new_tokens=NEW, tree=Tree([])), len(row))[0]
            assert new_tokens(medusa.generate(row[None], max_new_tokens=NEW, session=session), len(row))[0] == expected
            if cache is None:
                assert expected == transformers_greedy(model, row, NEW)
            text += expected
        assert session.reused > 23


@pytest.mark.parametrize("family", ["phi3", "granite", "gemma2", "qwen3_moe"])
def test_sampled_texts_have_the_probabilities_of_the_model(family, monkeypatch):
    """Logits of Granite and Gemma are divided or capped in the op that draws."""
    monkeypatch.setattr("medusa_decoding.decode.selection.sampling.allowed_logits", None)
    model = wandering(family, vocab_size=5)
    prompt = [1, 3, 2]
    heads = heads_for(model)
    exact = joint(model, prompt, 2, temperature=2.0)
    with MedusaModel(model, heads, Tree.cartesian([3, 2])) as medusa:
        ids = torch.tensor([prompt] * 1000)
        output = medusa.generate(ids, max_new_tokens=2, do_sample=True, temperature=2.0, top_k=0, seed=5)
    assert fits(counted(new_tokens(output, 3), 5), exact)
    assert not fits(counted(new_tokens(output, 3), 5), joint(model, prompt, 2, temperature=1.0))


@pytest.mark.parametrize("family", ["phi3", "granite", "gemma2", "qwen3_moe"])
def test_adapters(family):
    """On joint projections, where what layers add has a factor or a norm, and beside experts."""
    model = wandering(family)
    plain = transformers_greedy(model, prompts(1, [7])[0], NEW)
    torch.manual_seed(0)
    targets = ["qkv_proj", "gate_up_proj"] if family == "phi3" else ["q_proj", "k_proj", "gate_proj", "up_proj"]
    targets += ["o_proj", "down_proj"]
    adapted = get_peft_model(model, LoraConfig(target_modules=targets, r=4, init_lora_weights=False)).eval()
    [row] = prompts(1, [7])
    expected = transformers_greedy(adapted, row, NEW)
    assert expected != plain
    with MedusaModel(adapted, heads_for(model), Tree.cartesian([4, 3])) as medusa:
        output = medusa.generate(row[None], max_new_tokens=NEW)
        assert medusa.backbone.fuse, medusa.backbone.said
    assert new_tokens(output, len(row))[0] == expected


def test_longrope_within_the_trained_length_and_beyond_it():
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0, 1.5, 2.0, 2.5],
            "long_factor": [3.0, 4.0, 5.0, 6.0], "original_max_position_embeddings": 40}  # fmt: skip
    model = wandering("phi3", rope_parameters=rope, original_max_position_embeddings=40)
    [row] = prompts(1, [15])
    with MedusaModel(model, heads_for(model), Tree.cartesian([4, 3])) as medusa:
        output = medusa.generate(row[None], max_new_tokens=NEW)
        assert new_tokens(output, len(row))[0] == transformers_greedy(model, row, NEW)
        with pytest.raises(ValueError, match="expected at most 40 tokens"):
            medusa.generate(row[None], max_new_tokens=40)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("family", ["phi3", "gemma2", "olmo2", "qwen3_moe"])
def test_quantised_modules_write_the_same_text(family):
    """Joint projections are divided by rows, with their scales; beside experts the attention's are quantised."""
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    model = wandering(family)
    quantize_(model.model.layers, Int8WeightOnlyConfig(version=2))
    rows = prompts(2, [7, 12])
    expected = [transformers_greedy(model, row, NEW) for row in rows]
    ids, mask = padded(rows)
    with MedusaModel(model, heads_for(model), Tree.cartesian([4, 3])) as medusa:
        output = medusa.generate(ids, mask, max_new_tokens=NEW)
        assert "weights in int8" in medusa.backbone.said
        assert ("experts as modules" in medusa.backbone.said) == (family in EXPERTS)
    assert output.sequences[:, ids.shape[1] :].tolist() == expected


@pytest.mark.parametrize(("family", "setting"), [("gemma2", "attn_logit_softcapping"), ("smollm3", "use_rope")])
def test_settings_that_change_while_wrapped_are_refused(family, setting):
    model = tiny(family)
    with MedusaModel(model, heads_for(model)) as medusa:
        setattr(model.model.layers[1].self_attn.original, setting, 1.0)
        with pytest.raises(ValueError, match=r"layer 1: expected the (softcap of scores|rotary table) as swapped"):
            medusa.generate(torch.tensor([[1, 2]]), max_new_tokens=3)


def test_a_window_that_contradicts_the_type_of_its_layer_is_refused():
    """transformers masks by `layer_types`, and SmolLM3's attention has no window with `use_sliding_window=False`."""
    with pytest.raises(ValueError, match=r"layer 0: expected a window where .* got a layer of type sliding_attention"):
        MedusaModel(tiny("smollm3", use_sliding_window=False))
