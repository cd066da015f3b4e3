"""benchmarks.bench_models: one small case, all ways."""

import pytest

from benchmarks import bench_models
from benchmarks.simulator.shapes import ModelShape

SHAPE = ModelShape("small", 320, 800, 5, 6, 2, 64, 1100)


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "rows"), [("float32", 1), ("int8", 2)])
def test_all_ways_write_the_demo_models_answers(dtype, rows, monkeypatch):
    monkeypatch.setattr(bench_models, "compiled", dict)  # compiling takes a minute
    inputs = list(bench_models.batches(bench_models.encode(bench_models.DEMO, None, 2 * rows), rows))
    found = bench_models.measure(bench_models.Model.make(SHAPE, dtype), inputs, sizes=(4, 16))
    names = {"transformers", "transformers, static cache, compiled", "plain", "Medusa, 4 nodes", "Medusa, 16 nodes"}
    assert found["tokens_per_second"].keys() == names | ({"transformers, prompt lookup"} if rows == 1 else set())
    assert 1.5 < found["tokens_per_step"]["Medusa, 4 nodes"] < found["tokens_per_step"]["Medusa, 16 nodes"]
    assert found["tokens_per_step"]["plain"] == 1
    if dtype == "float32":
        assert set(found["same_text_as_transformers"].values()) == {2}
    assert found["over_plain"]["Medusa, 4 nodes"]["ratio"] > 0
    rates, decoding = found["tokens_per_second"], found["decoding_tokens_per_second"]
    assert decoding.keys() == rates.keys()
    whole, rest = found["new_tokens"] / rates["plain"], (found["new_tokens"] - 2 * rows) / decoding["plain"]
    assert whole - rest == pytest.approx(2 * found["prefill_seconds"]["plain"])
    assert found["cache_bytes_per_token"] == 5 * 2 * 2 * 64 * (4 if dtype == "float32" else 2)
    assert 0 < found["heads_bytes"] < found["weights_bytes"]
