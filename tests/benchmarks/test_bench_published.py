"""benchmarks.bench_published: every way that runs in this interpreter, on the demo model; figures of made-up lines."""

import gzip
import json
import sys

import pytest
import torch

from benchmarks import bench_published, llama_cpp_server
from benchmarks.bench_published import COMPARED, WAYS, summary
from medusa_decoding.demo import CHECKPOINT
from recipes.demo.requests import draw

gguf = pytest.importorskip("gguf")
OTHERS = (", other", COMPARED)


def one(tokens, seconds, same=True, committed=0, steps=0):
    return {
        "tokens": tokens, "seconds": seconds, "cpu_seconds": 2 * seconds, "committed": committed, "steps": steps,
        "same": same,
    }  # fmt: skip


def line(number, turn, category, ways, **surprise):
    name = "mt_bench" if category == "writing" else category
    return {"set": name, "number": number, "turn": turn, "category": category, "ways": ways, "surprise": surprise}


def test_figures_are_sums_over_prompts_and_their_turns():
    lines = [
        line(0, 1, "writing", {"fp32/plain": one(10, 2.0), "fp32/typical": one(12, 1.0, False, 8, 4)}),
        line(0, 2, "writing", {"fp32/plain": one(20, 2.0), "fp32/typical": one(18, 1.0, True, 16, 4)}),
        line(0, 1, "dev", {"fp32/plain": one(10, 1.0), "fp32/typical": one(10, 2.0, True, 6, 2)}),
    ]
    for text in lines:
        text["surprise"] = {"fp32/plain": 1.0 * text["ways"]["fp32/plain"]["tokens"], "fp32/typical": 50.0}
    found = summary(lines)
    assert found.keys() == {"all", "mt_bench", "writing", "dev"}
    assert found["mt_bench"] == found["writing"]
    assert (found["all"]["prompts"], found["all"]["texts"]) == (2, 3)
    assert (found["mt_bench"]["prompts"], found["mt_bench"]["texts"]) == (1, 2)
    plain, typical = (found["all"]["ways"][f"fp32/{name}"] for name in ("plain", "typical"))
    assert plain["tokens_per_second"] == 40 / 5
    assert plain["cpu_seconds_per_second"] == 2
    assert typical["tokens_per_step"] == 30 / 10
    assert typical["same_text_as_transformers"] is None  # it did not run
    over = typical["over"]["fp32/plain"]
    assert over == {"value": 1.25, "low": 0.5, "high": 2.0}  # resamples have one prompt, the other or both
    assert typical["log_likelihood_per_token_over_plain"]["value"] == 1 - 150 / 40
    assert "| fp32/typical | 10.0 | 3.00 |  | 1.25 (0.50 to 2.00) | 2.00 | 2.00 | 0.50 |" in bench_published.table(
        found, "plain"
    )


@pytest.mark.slow
def test_a_run_is_continued_and_its_texts_are_transformers(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bench_published, "compiled", dict)  # compiling takes a minute
    monkeypatch.setattr(bench_published.transformers.logging, "set_verbosity_error", lambda: None)  # for other tests
    monkeypatch.setattr(bench_published, "SETS", {"mt_bench": "mt_bench.jsonl", "dev": "dev.jsonl"})
    monkeypatch.setattr(bench_published, "COPIED", (4,))
    monkeypatch.setattr(bench_published, "NODES", {"cpu": (4,)})
    requests = [request.text for request in draw(8, 11, held_out=True)]
    (tmp_path / "dev.jsonl").write_text(json.dumps({"prompt": requests[0]}))
    (tmp_path / "mt_bench.jsonl").write_text(json.dumps({"turns": requests[1:3], "category": "writing"}))
    out, threads = tmp_path / "out", str(torch.get_num_threads())
    heads = CHECKPOINT / "heads"
    command = f"x --model {CHECKPOINT / 'base'} --heads {heads} --other-heads {heads} --data {tmp_path} --out {out}"

    def run(*more):
        monkeypatch.setattr(sys, "argv", [*command.split(), "--threads", threads, "--dtypes", "fp32", "int8", *more])
        bench_published.main()
        return (out / "raw.jsonl").read_text().splitlines()

    with gzip.open(tmp_path / "training.jsonl.gz", "wt") as file:
        file.writelines(json.dumps({"prompt": text}) + "\n" for text in requests[3:])
    *before, last = run("--max-new-tokens", "24")
    found = json.loads((out / "summary.json").read_text())
    figures = found["groups"]["all"]["ways"]
    mine = [name for name in WAYS if not name.startswith("llama.cpp")]
    sides = [(f"{dtype}{suffix}", ways) for dtype in ("fp32", "int8") for suffix, ways in (("", mine), OTHERS)]
    assert list(figures) == [f"{side}/{name}" for side, ways in sides for name in ways]
    exact = [name for name in figures if name.startswith("fp32") and not name.endswith("/typical")]
    assert {figures[name]["same_text_as_transformers"] for name in exact} == {3}
    assert figures["fp32, other/heads"]["over"].keys() >= {"fp32/plain", "fp32/heads"}
    assert figures["fp32/plain"]["tokens_per_step"] == 1 < figures["fp32/heads"]["tokens_per_step"]
    assert figures["fp32/typical"]["log_likelihood_per_token_over_plain"]["value"] < 1
    (out / "raw.jsonl").write_text("\n".join(before) + "\n")
    assert run("--max-new-tokens", "24", "--minutes", "0") == before
    again = run("--max-new-tokens", "24")
    assert again[:-1] == before
    assert json.loads(again[-1])["answer"] == json.loads(last)["answer"]


def test_llama_cpps_file_is_rewritten_in_another_type(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
    writer.add_token_list(["a", "b"])
    writer.add_block_count(3)
    weight = torch.randn(4, 32, generator=torch.Generator().manual_seed(0))
    for name, value in (("output.weight", weight), ("blk.0.attn_q.weight", weight), ("output_norm.weight", weight[0])):
        writer.add_tensor(name, value.numpy())
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        write()
    writer.close()
    llama_cpp_server.rewrite(tmp_path / "a.gguf", tmp_path / "b.gguf", "Q8_0", "BF16")
    found = gguf.GGUFReader(tmp_path / "b.gguf")
    assert found.fields["tokenizer.ggml.tokens"].contents() == ["a", "b"]
    assert found.fields["llama.block_count"].contents() == 3
    kinds = {tensor.name: tensor.tensor_type.name for tensor in found.tensors}
    assert kinds == {"output.weight": "BF16", "blk.0.attn_q.weight": "Q8_0", "output_norm.weight": "F32"}
    values = gguf.quants.dequantize(found.tensors[0].data, found.tensors[0].tensor_type)
    assert torch.equal(torch.from_numpy(values), weight.bfloat16().float())
