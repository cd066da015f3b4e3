"""`medusa serve`: what it prints, how it ends, and what it refuses before it loads a model."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from http_server import wait_for

from medusa_decoding.cli import argument_parser, main, serve
from medusa_decoding.demo import CHECKPOINT
from medusa_decoding.serving.engine import Engine
from medusa_decoding.serving.http.app import create_app
from medusa_decoding.serving.http.settings import Settings
from medusa_decoding.serving.launch import KEY_VARIABLE

MESSAGES = [{"role": "user", "content": "Write a class Job with name: str that is sorted by name."}]


def answer_interrupts():
    """Shells start background jobs, such as these tests may be, with SIGINT ignored, and children inherit that."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.fixture
def started():
    """Start the command on a free port; return the process and its ready line."""
    processes = []

    def start(*arguments, **environment):
        command = [sys.executable, "-m", "medusa_decoding", "serve", "--port", "0", "--device", "cpu", *arguments]
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, **environment},
            preexec_fn=answer_interrupts,
        )  # fmt: skip
        processes.append(process)
        assert process.stdout is not None
        return process, process.stdout.readline()

    yield start
    for process in processes:
        process.kill()
        process.communicate()


@contextlib.contextmanager
def served(engine, encoder, *arguments, **settings):
    """Run the command's own server in a thread; yield it, its address and the thread."""
    args = argument_parser().parse_args(["serve", *arguments])
    ready = threading.Event()
    app = create_app(engine, encoder, Settings(model="demo", **settings))
    with serve.listen("127.0.0.1", 0) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        server = serve.server(app, args, engine, ready.set)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        assert ready.wait(20)
        try:
            yield server, url, thread
        finally:
            server.should_exit = True
            engine.close()
            thread.join(20)


def test_a_signal_lets_accepted_requests_finish_and_refuses_others(demo, encoder, monkeypatch):
    body = {"model": "demo", "messages": MESSAGES, "max_tokens": 60, "logit_bias": {"0": -100}}
    with contextlib.ExitStack() as stack:
        engine = stack.enter_context(Engine(demo, slots=1))
        server, url, thread = stack.enter_context(served(engine, encoder))
        pool = stack.enter_context(ThreadPoolExecutor())
        goes_on, scheduler_round = threading.Event(), engine._scheduler.round
        goes_on.set()
        monkeypatch.setattr(engine._scheduler, "round", lambda: goes_on.wait(20) and scheduler_round())
        chat = f"{url}/v1/chat/completions"
        with httpx.stream("POST", chat, json=body | {"stream": True}, timeout=20) as response:
            lines = response.iter_lines()
            next(lines)
            goes_on.clear()
            waiting = pool.submit(httpx.post, chat, json=body, timeout=20)
            wait_for(lambda: engine.stats().waiting == 1)
            server.handle_exit(signal.SIGTERM, None)
            wait_for(lambda: not engine.running)
            for refused in (httpx.get(f"{url}/health"), httpx.get(f"{url}/ready"), httpx.post(chat, json=body)):
                assert refused.status_code == 503
                assert refused.json()["error"]["code"] == "shutting_down"
                assert int(refused.headers["retry-after"]) > 0
                assert refused.headers["connection"] == "close"
            assert httpx.get(f"{url}/live").status_code == 200
            goes_on.set()
            *_, last, done = [line.removeprefix("data: ") for line in lines if line]
        assert json.loads(last)["choices"][0]["finish_reason"] == "length"
        assert done == "[DONE]"
        assert waiting.result().json()["usage"]["completion_tokens"] == 60
        thread.join(20)
        assert not thread.is_alive()


@pytest.mark.slow
def test_a_second_ctrl_c_ends_running_answers_and_the_server(started):
    process, line = started("--dtype", "float32", "--slots", "2", "--context", "1000", MEDUSA_API_KEY="from-outside")
    found = re.fullmatch(
        r"serving demo \(float32 on cpu\) at (http://127\.0\.0\.1:\d+/)v1: 2 slots of 1,000 tokens, \d+ MiB for their "
        r"cache; page at \1\n",
        line,
    )
    assert found, line
    url = f"{found[1]}v1/chat/completions"
    headers = {"Authorization": "Bearer from-outside"}
    body = {"model": "demo", "messages": MESSAGES, "max_tokens": 4}
    assert httpx.post(url, json=body).status_code == 401
    assert httpx.post(url, json=body, headers=headers).status_code == 200
    assert httpx.post(url, json=body, headers={**headers, "Host": "evil.example"}).status_code == 403
    body |= {"stream": True, "max_tokens": 900, "logit_bias": {"0": -100}}
    with httpx.stream("POST", url, json=body, headers=headers, timeout=20) as response:
        lines = response.iter_lines()
        next(lines)
        process.send_signal(signal.SIGINT)
        wait_for(lambda: httpx.get(f"{found[1]}health").status_code == 503)
        process.send_signal(signal.SIGINT)
        rest = [line for line in lines if line]
    assert "shutting down" in rest[-2]
    assert rest[-1] == "data: [DONE]"
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert errors.splitlines()[-1] == "medusa: interrupted"
    assert "Traceback" not in errors


@pytest.mark.slow
def test_a_killed_server_and_a_killed_client_leave_the_records_of_one_process(started, tmp_path, capsys):
    with (CHECKPOINT / "answers.jsonl").open() as answers:
        asked = [json.loads(line)["request"] for line, _ in zip(answers, range(60), strict=False)]
    (tmp_path / "seeds.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in asked))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    (tmp_path / "config.yaml").write_text(
        f"model: {{name: {CHECKPOINT / 'base'}, dtype: float32, quantization: none}}\n"
        f"data: {{train: [{{path: {tmp_path / 'seeds.jsonl'}}}]}}\noutput: {{folder: -}}\n"
        "generation: {max_new_tokens: 100, temperature: 0.0, batch_size: 2}\n"
    )
    distill = ["distill", "--json", "--only-data", "--config", str(tmp_path / "config.yaml"), "--set"]
    assert main([*distill, f"output.folder={tmp_path / 'own'}"]) == 0
    own = (tmp_path / "own/generated/records.jsonl").read_bytes()
    file = tmp_path / "served/generated/records.jsonl"
    command = [
        *distill,
        f"output.folder={tmp_path / 'served'}",
        "--set",
        f"generation.endpoint=http://127.0.0.1:{port}/v1",
    ]

    def written():
        return file.read_bytes().count(b"\n") if file.exists() else 0

    def start_server():
        process, line = started("--port", port, "--dtype", "float32")
        assert line, process.stderr.read()
        return process

    server = start_server()
    client = subprocess.Popen([sys.executable, "-m", "medusa_decoding", *command], stdout=subprocess.DEVNULL)
    try:
        wait_for(written, seconds=60)
        server.kill()
        server.wait()
        before = written()
        start_server()
        wait_for(lambda: written() > before, seconds=60)
    finally:
        client.kill()
    assert client.wait() == -signal.SIGKILL
    assert 0 < before < written() < own.count(b"\n") == 60
    capsys.readouterr()
    assert main([*command, "--resume"]) == 0
    assert file.read_bytes() == own
    figures = json.loads(capsys.readouterr().out)["generation"]
    assert figures["exact"] == 60 - figures["before"] > 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--port", "65536"], "at most 65535"),
        (["--api-key", ""], "(--api-key): expected a key"),
        (["--host", "no.such.host.invalid"], "no.such.host.invalid:8000"),
    ],
)
def test_bad_arguments_are_refused_before_anything_is_loaded(capsys, monkeypatch, arguments, words):
    monkeypatch.setattr("medusa_decoding.serving.launch.load_tokenizer", lambda *_: pytest.fail("loaded"))
    try:
        code = main(["serve", *arguments])
    except SystemExit as end:
        code = end.code
    assert code == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("library", ["fastapi", "llguidance"])
def test_a_missing_library_is_named_with_the_extra(capsys, monkeypatch, library):
    monkeypatch.setitem(sys.modules, library, None)
    assert main(["serve"]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert library in line
    assert "pip install 'medusa-kernels[serve]'" in line


def key(*arguments):
    return serve.arguments_of(argument_parser().parse_args(["serve", *arguments])).key()


def test_only_loopback_addresses_check_the_host(capsys, monkeypatch):
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    assert serve.hosts_of("127.0.0.1") == {"localhost", "127.0.0.1", "[::1]"}
    assert serve.hosts_of("127.0.0.2") == {"localhost", "127.0.0.1", "[::1]", "127.0.0.2"}
    assert serve.hosts_of("::1") == {"localhost", "127.0.0.1", "[::1]"}
    assert serve.hosts_of("0.0.0.0") is None
    assert key() is None
    assert capsys.readouterr().err == ""
    assert key("--host", "0.0.0.0") is None
    assert "--api-key" in capsys.readouterr().err
    assert key("--host", "0.0.0.0", "--api-key", "k") == "k"
    assert capsys.readouterr().err == ""


def test_the_key_of_the_environment_is_used_and_must_not_be_empty(monkeypatch):
    monkeypatch.setenv(KEY_VARIABLE, "outside")
    assert key() == "outside"
    assert key("--api-key", "inside") == "inside"
    monkeypatch.setenv(KEY_VARIABLE, "")
    with pytest.raises(ValueError, match="MEDUSA_API_KEY"):
        key()
