"""benchmarks.bench_trees: what is expected of a tree, and what decoding makes of it."""

import pytest

from benchmarks import bench_trees
from medusa_decoding.checkpoints import pretrained
from medusa_decoding.demo import CHECKPOINT
from medusa_decoding.evaluation.prompts import Prompt
from medusa_decoding.model import MedusaModel
from recipes.demo.requests import draw


@pytest.mark.slow
def test_trees_walked_along_the_judging_texts_make_the_steps_of_decoding(monkeypatch):
    monkeypatch.setattr(bench_trees, "SIZES", (2, 4))
    prompts = [Prompt((one.text,)) for one in draw(4, 13, held_out=True)]
    tokenizer = pretrained.load_tokenizer(CHECKPOINT / "base")
    with MedusaModel.from_pretrained(CHECKPOINT / "heads", dtype="float32") as model:
        settings = {"max_new_tokens": 40, "temperatures": [0.7]}
        found = bench_trees.measure(model, tokenizer, prompts[:2], prompts[2:], settings)
    assert found["prompts"] == [2, 2]
    for nodes, figures in found["sizes"].items():
        # Two computations of one number: texts walked by a tree, and steps that decoding made with it.
        walked = figures["searched_by"]["walk"]["held_out"]["walked"]["value"]
        assert walked == pytest.approx(figures["measured"]["value"])
        assert 1 < walked <= int(nodes)
    assert found["sampled"]["0.7"].keys() == found["sizes"].keys()
