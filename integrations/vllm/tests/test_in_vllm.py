"""The plugin in vLLM itself, float32 on a CPU: `make test-vllm`. Engines run in this process, one after the other."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1",
}  # fmt: skip

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from vllm import LLM, SamplingParams
from vllm.v1.sample import rejection_sampler
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from medusa_decoding import MedusaModel
from medusa_decoding.checkpoints import read_heads, write_heads
from medusa_decoding.cli import main
from medusa_decoding.demo import CHECKPOINT, HEADS
from medusa_decoding.trees.tree import Tree
from medusa_vllm import register


def expand(x: torch.Tensor, ends: torch.Tensor, total: int, replace_from: int = 0, replace_to: int = 0) -> torch.Tensor:
    """Repeat each request's value for its draft tokens: what vLLM's CPU build leaves undone (its issue 55005)."""
    x = torch.where(x == replace_from, replace_to, x).to(x.dtype)
    return x.repeat_interleave(ends.diff(prepend=ends.new_zeros(1)).long(), output_size=total)


rejection_sampler.expand_batch_to_tokens = expand  # everything else of the sampler is vLLM's

BASE = CHECKPOINT / "base"
TOKENIZER = AutoTokenizer.from_pretrained(BASE)
ASKED = [json.loads(line)["request"] for line in (CHECKPOINT / "answers.jsonl").read_text().splitlines()]
REPLIES = SamplingParams(temperature=0, max_tokens=48)
LENGTH = 4


def tokens(texts: list[str]) -> list[int]:
    """Return the prompt of a conversation that begins with a question."""
    turns = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]
    return TOKENIZER(TOKENIZER.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)).input_ids


# A long beginning that all requests share, longer than a block of the cache, and an end of their own.
PROMPTS = [tokens([ASKED[0], "Yes.", ASKED[1], "No.", ASKED[2], "Yes.", text]) for text in ASKED[3:43]]


@contextlib.contextmanager
def engine(heads: Path | None, length: int = LENGTH, **settings: Any) -> Iterator[LLM]:
    """Start vLLM, with heads if some are named; prompts are read in pieces, and requests wait for one another."""
    speculation = {
        "speculative_config": {
            "method": "custom_class", "model": "medusa_vllm.MedusaProposer", "num_speculative_tokens": length,
        },
        "additional_config": {"medusa_heads": str(heads)},
    }  # fmt: skip
    settings = {"max_num_seqs": 32, "max_num_batched_tokens": 512, "max_model_len": 512, "seed": 0} | settings
    llm = LLM(
        str(BASE), dtype="float32", enforce_eager=True, disable_log_stats=False, enable_prefix_caching=True,
        **settings, **(speculation if heads else {}),
    )  # fmt: skip
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()


def answers(llm: LLM, prompts: list[list[int]], sampling: SamplingParams) -> list[list[list[int]]]:
    """Return the token ids of each prompt's answers."""
    asked = [{"prompt_token_ids": prompt} for prompt in prompts]
    found = llm.generate(asked, sampling, use_tqdm=False)  # type: ignore[arg-type]
    return [[list(answer.token_ids) for answer in one.outputs] for one in found]


def counted(llm: LLM) -> dict[str, int]:
    """Return vLLM's counts so far by their names."""
    return {metric.name.removeprefix("vllm:"): metric.value for metric in llm.get_metrics() if hasattr(metric, "value")}


@pytest.fixture(scope="module")
def plain() -> list[list[list[int]]]:
    with engine(None) as llm:
        return answers(llm, PROMPTS, REPLIES)


@pytest.fixture(scope="module")
def demo() -> Iterator[LLM]:
    with engine(CHECKPOINT / "heads") as llm:
        yield llm


def test_vllms_runner_has_what_the_plugin_reads() -> None:
    register()
    assert GPUModelRunner.propose_draft_token_ids.notes_states_for_medusa


def test_texts_are_vllms_own_and_drafts_are_the_librarys(plain: list[list[list[int]]], demo: LLM) -> None:
    before = counted(demo)
    assert answers(demo, PROMPTS, REPLIES) == plain
    after = counted(demo)
    assert after["prefix_cache_hits"] > before["prefix_cache_hits"]
    # One request at a time, as the library decodes with the same heads and a chain.
    model = MedusaModel.from_pretrained(CHECKPOINT / "heads", dtype=torch.float32)
    prompt, before = PROMPTS[0], after
    (ours,) = [model.generate(torch.tensor([prompt]), max_new_tokens=48, tree=Tree.chain(LENGTH))]
    assert answers(demo, [prompt], REPLIES) == plain[:1]
    assert counted(demo)["spec_decode_num_drafts"] - before["spec_decode_num_drafts"] == ours.steps


def exact(model: Any, prompt: list[int], temperature: float, number: int) -> dict[tuple[int, ...], float]:
    """Return the model's probabilities of those continuations of 3 tokens that `number` draws show at least 5 times."""
    found: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(3):
        paths = list(found)
        with torch.inference_mode():
            logits = model(torch.tensor([[*prompt, *path] for path in paths])).logits[:, -1]
        shares = (logits.double() / temperature).softmax(-1) * torch.tensor([*found.values()]).double()[:, None]
        found = {(*paths[i], t): float(shares[i, t]) for i, t in (shares * number >= 5).nonzero().tolist()}
    return found


def p_value(counts: list[Counter[tuple[int, ...]]], expected: list[dict[tuple[int, ...], float]]) -> float:
    """Return the probability of counts at least this far from those expected: chi-square, rare ones taken together."""
    distance, freedom = 0.0, 0
    for seen, shares in zip(counts, expected, strict=True):
        number, left = seen.total(), 1 - sum(shares.values())
        cells = [(seen[path], number * share) for path, share in shares.items()]
        cells += [(number - sum(count for count, _ in cells), number * left)]
        distance += sum((count - wanted) ** 2 / wanted for count, wanted in cells)
        freedom += len(cells) - 1
    return float(torch.special.gammaincc(torch.tensor(freedom / 2).double(), torch.tensor(distance / 2).double()))


def test_sampled_texts_have_the_models_distribution(demo: LLM) -> None:
    number, temperature = 600, 1.0
    prompts = [TOKENIZER(text).input_ids for text in ("class A:\n    def ", "import ", "def f(a, b):\n    ")]
    sampling = SamplingParams(n=number, temperature=temperature, max_tokens=3, ignore_eos=True, top_k=0)
    before = counted(demo)
    counts = [Counter(map(tuple, drawn)) for drawn in answers(demo, prompts, sampling)]
    drafted, accepted = (
        counted(demo)[name] - before[name] for name in ("spec_decode_num_drafts", "spec_decode_num_accepted_tokens")
    )
    model = AutoModelForCausalLM.from_pretrained(BASE, dtype=torch.float32)
    at = {t: p_value(counts, [exact(model, prompt, t, number) for prompt in prompts]) for t in (temperature, 0.8)}
    print(f"p {at}; {accepted} draft tokens accepted in {drafted} steps")
    assert 0.1 * drafted < accepted < 0.9 * drafted  # draft tokens are accepted and rejected, both often
    assert at[temperature] > 0.001
    assert at[0.8] < 1e-6


@pytest.mark.parametrize("kind", ["trimmed", "own int8, parent"])
def test_other_heads(tmp_path: Path, plain: list[list[list[int]]], kind: str) -> None:
    heads = read_heads(CHECKPOINT / "heads").heads
    if kind == "trimmed":
        heads = heads.remade(root_rank=0, parent_rank=0, token_map=torch.arange(0, heads.vocab_size, 2))
    else:
        lm_head = AutoModelForCausalLM.from_pretrained(BASE).lm_head.weight
        heads = heads.remade(root_rank=0, shared_projection=False)
        heads.get_parameter("w2")[:] = lm_head
        heads = heads.quantized("int8")
    write_heads(heads, tmp_path / "heads", base_model=BASE)
    with engine(tmp_path / "heads", length=3) as llm:
        assert answers(llm, PROMPTS[:16], REPLIES) == plain[:16]
        counts = counted(llm)
    print(kind, counts["spec_decode_num_accepted_tokens"], "of", counts["spec_decode_num_draft_tokens"])
    assert counts["spec_decode_num_accepted_tokens"] > 0.4 * counts["spec_decode_num_drafts"]


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    """Start vLLM's server, and wait until it answers; `vllm serve` of the builds for CPUs does not start."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(BASE), "--port", str(port)]
    command += ["--host", "127.0.0.1", "--dtype", "float32", "--enforce-eager", "--served-model-name", "demo"]
    with (tmp_path / "log").open("wb") as log:
        server = subprocess.Popen(
            command, stdout=log, stderr=log, env=os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
        )
    try:
        for _ in range(600):
            assert server.poll() is None, (tmp_path / "log").read_text()[-4000:]
            with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models"):
                break
            time.sleep(0.5)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        server.terminate()
        server.wait(60)


def test_its_server_writes_the_records_that_we_write_also_after_a_kill(
    tmp_path: Path, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    seeds, config, records = tmp_path / "seeds.jsonl", tmp_path / "config.yaml", "generated/records.jsonl"
    seeds.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ASKED[:16]))
    config.write_text(
        f"model: {{name: {BASE}, dtype: float32}}\ndata: {{train: [{{path: {seeds}}}]}}\n"
        "generation: {max_new_tokens: 48, temperature: 0.0}\noutput: {folder: out}\n"
    )
    distill = ["distill", "--json", "--only-data", "--config", str(config), "--set"]
    assert main([*distill, f"output.folder={tmp_path / 'own'}"]) == 0
    ours = (tmp_path / "own" / records).read_bytes()
    file = tmp_path / "served" / records
    served = [*distill, f"output.folder={tmp_path / 'served'}", "--set", f"generation.endpoint={url}", "--set"]
    killed = subprocess.Popen([sys.executable, "-m", "medusa_decoding", *served, "generation.batch_size=1"])
    while killed.poll() is None and not (file.exists() and file.stat().st_size):
        time.sleep(0.01)
    killed.kill()
    assert killed.wait() == -signal.SIGKILL
    assert 0 < file.read_bytes().count(b"\n") < ours.count(b"\n") == 16
    capsys.readouterr()
    assert main([*served, "generation.batch_size=8", "--resume"]) == 0
    assert file.read_bytes() == ours
    figures = json.loads(capsys.readouterr().out)["generation"]
    assert figures["exact"] == 16 - figures["before"]
    assert figures["encoded"] == 0


@pytest.mark.slow
def test_two_tensor_parallel_ranks(plain: list[list[list[int]]]) -> None:
    with engine(CHECKPOINT / "heads", tensor_parallel_size=2) as llm:
        assert answers(llm, PROMPTS[:4], REPLIES) == plain[:4]
        assert counted(llm)["spec_decode_num_accepted_tokens"] > 0


def test_heads_of_another_model_are_refused_before_the_model_is_loaded() -> None:
    with pytest.raises(RuntimeError, match=r"expected hidden size 256 \(the base model's\), got 576"):
        engine(HEADS["smollm2"]).__enter__()
