"""Families beside Llama, Mistral, Qwen2 and Qwen3: every kind of layer that they have writes transformers' text."""

import logging

import pytest
import torch
from models import MORE_FAMILIES, heads_for, padded, prompts, tiny, transformers_greedy

from medusa_decoding import MedusaModel, Tree

NEW = 20


FUSED = {"ministral": "C++", "smollm3": "fused", "phi3": "C++", "phi4": "fused"}
"""How layers run on a CPU: in one call of the C++ library, by an op for each stage, or (others) module by module."""


def wandering(family, **overrides):
    """A tiny model whose norms and biases are random too."""
    model = tiny(family, **overrides)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 1:
                weight.add_(torch.randn(weight.shape, generator=generator) * 0.3)
    return model


@pytest.mark.parametrize("family", MORE_FAMILIES)
def test_greedy_text_is_that_of_transformers(family):
    model = wandering(family)
    rows = prompts(3, [7, 1, 12])
    expected = [transformers_greedy(model, row, NEW) for row in rows]
    ids, mask = padded(rows)
    with MedusaModel(model, heads_for(model), Tree.cartesian([4, 3])) as medusa:
        output = medusa.generate(ids, mask, max_new_tokens=NEW)
        backbone = medusa.backbone
        how = "C++" if backbone.native is not None else "fused" if backbone.fuse else "modules"
        assert how == FUSED.get(family, "modules"), backbone.said
    assert len({token for row in expected for token in row}) > 2
    assert output.sequences[:, ids.shape[1] :].tolist() == expected
    assert [transformers_greedy(model, row, NEW) for row in rows] == expected


@pytest.mark.parametrize("layers", [0, 1])
def test_layers_for_multi_token_prediction_are_named_once(caplog, layers):
    model = tiny(num_nextn_predict_layers=layers)
    with caplog.at_level(logging.INFO, "medusa_decoding"), MedusaModel(model, heads_for(model)) as medusa:
        medusa.generate(prompts(1, [4])[0][None], max_new_tokens=4)
    assert len([line for line in caplog.messages if "use_mtp=True" in line]) == layers
