"""benchmarks.bench_models: one small case, all ways."""

import pytest
import torch

from benchmarks import bench_models
from medusa_decoding.roofline.shapes import ModelShape

SHAPE = ModelShape("small", 320, 800, 5, 6, 2, 64, 1100)


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "rows"), [("float32", 1), ("float32", 2), ("int8", 1)])
def test_all_ways_write_the_demo_models_answers(dtype, rows, monkeypatch):
    monkeypatch.setattr(bench_models, "compiled", dict)  # compiling takes a minute
    found = bench_models.measure(SHAPE, dtype, rows, 0, 2, None, (4, 16))
    names = {"transformers", "transformers, static cache, compiled", "plain", "Medusa, 4 nodes", "Medusa, 16 nodes"}
    assert found["tokens_per_second"].keys() == names | ({"transformers, prompt lookup"} if rows == 1 else set())
    assert 1.5 < found["tokens_per_step"]["Medusa, 4 nodes"] < found["tokens_per_step"]["Medusa, 16 nodes"]
    assert found["tokens_per_step"]["plain"] == 1
    if dtype == "float32":
        assert set(found["same_text_as_transformers"].values()) == {2}
    assert found["over_plain"]["Medusa, 4 nodes"]["ratio"] > 0


def test_a_prefix_is_the_end_of_a_conversation():
    short, long = (next(bench_models.batches(1, 2, prefix)) for prefix in (0, 300))
    assert long.ids.shape == (2, short.ids.shape[1] + 300)
    assert torch.equal(long.mask.sum(1), short.mask.sum(1) + 300)
    assert torch.equal(long.ids[:, 300:][short.mask.bool()], short.ids[short.mask.bool()])
