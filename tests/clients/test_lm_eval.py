"""lm-evaluation-harness against a running server, with tasks of this file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import lm_eval
import openai
import pytest
from lm_eval.tasks import TaskManager

TOKENIZER = Path(__file__).resolve().parents[2] / "python/medusa_decoding/demo/checkpoint/base"
REQUESTS = ["Write a class Job with name: str.", "Write a command line parser with path."]
PROMPT = "<|user|>{{request}}<|end|><|assistant|>"
LENGTH = 20
STOP = "\n\n\n"


class TestLmEval:
    @pytest.fixture(scope="class")
    def answers(self, url):
        """The model's greedy answers, with the log-probability that it gives each."""
        client = openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=60)
        found = []
        for request in REQUESTS:
            messages: Any = [{"role": "user", "content": request}]
            done = client.chat.completions.create(model="demo", messages=messages, logprobs=True, max_tokens=LENGTH)
            (choice,) = done.choices
            found.append((choice.message.content, sum(token.logprob for token in choice.logprobs.content)))
        return found

    @pytest.fixture
    def evaluate(self, url, tmp_path):
        def evaluate(rows: list[dict[str, Any]], chat: bool = False, **fields: Any) -> Any:
            (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
            task = {"task": "own", "dataset_path": "json", "test_split": "test", **fields}
            task["dataset_kwargs"] = {"data_files": {"test": str(tmp_path / "rows.jsonl")}}
            settings = {"model": "demo", "base_url": f"{url}/{'chat/' * chat}completions", "max_retries": 1}
            settings |= {"tokenizer": str(TOKENIZER), "tokenizer_backend": "huggingface", "num_concurrent": 2}
            done = lm_eval.simple_evaluate(
                "local-chat-completions" if chat else "local-completions",
                settings,
                [task],
                batch_size=1 if chat else 2,
                apply_chat_template=chat,
                task_manager=TaskManager(include_defaults=False),
                bootstrap_iters=0,
            )
            return done["results"]["own"], done["samples"]["own"]

        return evaluate

    def test_loglikelihood(self, evaluate, answers):
        rows = [
            {"request": request, "choices": ["return of the same", answer]}
            for request, (answer, _) in zip(REQUESTS, answers, strict=True)
        ]
        fields = {"doc_to_text": PROMPT, "doc_to_choice": "{{choices}}", "doc_to_target": 1, "target_delimiter": ""}
        results, samples = evaluate(rows, output_type="multiple_choice", metric_list=[{"metric": "acc"}], **fields)
        assert results["acc,none"] == 1
        for sample, (_, expected) in zip(samples, answers, strict=True):
            (other, greedy), (found, whether) = (response[0] for response in sample["resps"])
            assert float(found) == pytest.approx(expected, abs=1e-3)
            assert float(other) < float(found)
            assert [str(greedy), str(whether)] == ["False", "True"]

    def test_perplexity(self, evaluate):
        rows = [{"text": "class Job:\n    def __init__(self, name: str):\n        self.name = name\n"}, {"text": "a b"}]
        metrics = [{"metric": "bits_per_byte"}]
        fields = {"doc_to_text": "", "doc_to_target": "{{text}}", "metric_list": metrics}
        results, _ = evaluate(rows, output_type="loglikelihood_rolling", **fields)
        assert 0 < results["bits_per_byte,none"] < 8

    @pytest.mark.parametrize("chat", [False, True])
    def test_generation(self, evaluate, answers, chat):
        rows = [
            {"request": request, "answer": text.partition(STOP)[0]}
            for request, (text, _) in zip(REQUESTS, answers, strict=True)
        ]
        fields = {"doc_to_text": "{{request}}" if chat else PROMPT, "doc_to_target": "{{answer}}"}
        settings = {"until": [STOP], "max_gen_toks": LENGTH, "do_sample": False}
        metrics = [{"metric": "exact_match"}]
        results, samples = evaluate(
            rows, chat, output_type="generate_until", generation_kwargs=settings, metric_list=metrics, **fields
        )
        assert results["exact_match,none"] == 1, [sample["resps"] for sample in samples]
