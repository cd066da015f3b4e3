"""guidellm, a load generator, against a running server: needs torch, so it is not in CI."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

TOKENIZER = Path(__file__).resolve().parents[2] / "python/medusa_decoding/demo/checkpoint/base"
REQUESTS, TOKENS = 6, 24


class TestGuidellm:
    @pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
    def test_load(self, url, tmp_path, path):
        report = tmp_path / "report.json"
        target = url.removesuffix("/v1")
        options = {
            "backend": {"kind": "openai_http", "target": target, "model": "demo", "request_format": path},
            "tokenizer": {"kind": "hf_auto", "model": str(TOKENIZER)},
            "data": {"kind": "synthetic_text", "prompt_tokens": 32, "output_tokens": TOKENS},
            "profile": {"kind": "concurrent", "streams": 2},
            "constraint": {"kind": "max_requests", "count": REQUESTS},
            "output": {"kind": "json", "path": str(report)},
        }
        command = [sys.executable, "-m", "guidellm", "run", "--disable-console"]
        command += [word for name, value in options.items() for word in (f"--{name}", json.dumps(value))]
        done = subprocess.run(command, capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, done.stderr[-2000:]
        (found,) = json.loads(report.read_text())["benchmarks"]
        answers = found["requests"]["successful"]
        errors = [request["info"]["error"] for request in found["requests"]["errored"]]
        assert len(answers) == REQUESTS, errors
        # Each answer is as long as it was asked to be: ignore_eos was obeyed.
        assert {answer["output_tokens"] for answer in answers} == {TOKENS}
