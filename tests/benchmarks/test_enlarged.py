"""A larger model that writes what a small one writes."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.enlarged import enlarge, enlarge_heads
from benchmarks.simulator.shapes import ModelShape
from medusa_decoding import MedusaModel, Tree
from medusa_decoding.heads import MedusaHeads

SHAPE = ModelShape("larger", hidden=160, intermediate=200, layers=4, heads=9, kv_heads=3, head_dim=16, vocabulary=300)


def small_model():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=90, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, tie_word_embeddings=False, initializer_range=0.3, eos_token_id=None,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval().requires_grad_(False)


def random_heads():
    made = MedusaHeads(64, 90, 3, num_layers=2, shared_projection=True, root_rank=8, parent_rank=4)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in made.parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator) * 0.2)
    return made.eval().requires_grad_(False)


def test_it_writes_and_accepts_what_the_small_one_does():
    small, heads = small_model(), random_heads()
    ids, tree = torch.tensor([[5, 17, 60, 3]]), Tree.cartesian([3, 2, 2])
    outputs = []
    for base, own in ((small, heads), (enlarge(small, SHAPE), enlarge_heads(heads, SHAPE))):
        with MedusaModel(base, own, backend="eager") as model:
            outputs.append(model.generate(ids, max_new_tokens=60, tree=tree))
    assert outputs[0].sequences.tolist() == outputs[1].sequences.tolist()
    assert outputs[0].accept_lengths == outputs[1].accept_lengths
    assert outputs[0].tokens_per_step > 1.05
