"""Answers from a server: the records of the engine to the byte, and nothing that is silently another model's."""

import asyncio
import json
from dataclasses import replace
from types import SimpleNamespace

import httpx
import pytest
import toy
from test_distill import CHATS, DRAWN, GREEDY, IM_END, StoppedError, language_model, records, write_records
from toy import CHATML, chat, unmarked
from transformers import AutoTokenizer

from medusa_decoding import MedusaModel
from medusa_decoding.chat.template import ChatTemplate
from medusa_decoding.cli import distill as command
from medusa_decoding.cli import main
from medusa_decoding.serving.engine import Engine
from medusa_decoding.serving.http.app import create_app
from medusa_decoding.serving.http.settings import Settings
from medusa_decoding.training.config import Config
from medusa_decoding.training.distill import endpoint
from medusa_decoding.training.distill.endpoint import Endpoint

URL = "http://127.0.0.1:8000/v1"


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """A model in a folder, and its server as an ASGI application."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer = toy.tokenizer("bytes", unmarked(CHATML), eos_token="<|im_end|>")
    model = language_model(tokenizer)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    with MedusaModel(model) as medusa, Engine(medusa, slots=2, queue=2) as engine:
        app = create_app(engine, ChatTemplate(tokenizer), Settings(model="demo"))
        yield SimpleNamespace(folder=folder, tokenizer=tokenizer, model=model, app=app)


@pytest.fixture
def connect(monkeypatch):
    """Have all requests go to a transport, keep their bodies, and note pauses instead of making them."""

    def arrange(transport):
        seen = SimpleNamespace(pauses=[], bodies=[], keys=set())

        class Noted(httpx.AsyncBaseTransport):
            async def handle_async_request(self, request):
                seen.keys.add(request.headers.get("Authorization"))
                seen.bodies.append(json.loads(await request.aread() or b"null"))
                return await transport.handle_async_request(request)

        async def pause(seconds):
            seen.pauses.append(seconds)
            await asyncio.sleep(0)

        make = httpx.AsyncClient
        monkeypatch.setattr(httpx, "AsyncClient", lambda **given: make(**given | {"transport": Noted()}))
        monkeypatch.setattr(endpoint, "_pause", pause)
        return seen

    return arrange


def config(served, **generation):
    return Config.of(
        {
            "model": {"name": str(served.folder), "dtype": "float32"},
            "data": {"train": [{"path": "-"}], "length": 96},
            "generation": {"endpoint": URL, **generation},
            "output": {"folder": "-"},
        }
    )


def answer(text="fine", **choice):
    """A completion of a server that lacks every field of vLLM's."""
    choice = {"index": 0, "text": text, "finish_reason": "stop", **choice}
    return httpx.Response(200, text=json.dumps({"object": "text_completion", "choices": [choice]}))


def scripted(reply):
    """A transport of a server with the model "demo", which gets (request's body, its number)."""
    numbers = iter(range(10**6))

    def handle(request):
        if request.url.path.endswith("/models"):
            return httpx.Response(200, json={"object": "list", "data": [{"id": "demo", "object": "model"}]})
        return reply(json.loads(request.content), next(numbers))

    return httpx.MockTransport(handle)


class Flaky(httpx.ASGITransport):
    """A server that fails now and then."""

    failures = 0

    async def handle_async_request(self, request):
        self.failures += 1
        if self.failures % 3 == 1:
            raise httpx.ReadError("broken", request=request)
        if self.failures % 3 == 2:
            return httpx.Response(503, headers={"Retry-After": "7"}, request=request)
        return await super().handle_async_request(request)


class Ending(httpx.ASGITransport):
    """A server that is told to end and started again: it never answers its first three requests."""

    asked = 0

    async def handle_async_request(self, request):
        self.asked += request.method == "POST"
        if request.method == "POST" and self.asked <= 3:
            await asyncio.sleep(60)
            raise AssertionError("still waited for")
        if request.method == "GET" and 0 < self.asked <= 3:
            raise httpx.ConnectError("refused", request=request)
        return await super().handle_async_request(request)


def write(served, path, model, settings, seeds=None, **options):
    seeds = records() if seeds is None else seeds
    report = write_records(model, served.tokenizer, seeds, settings, path, **options)
    return path.read_bytes(), report


@pytest.mark.parametrize(("settings", "turns"), [(GREEDY, "joint"), (DRAWN, "joint"), (DRAWN, "each")])
def test_a_server_writes_the_records_of_the_engine_also_after_failures_and_a_stop(
    served, connect, tmp_path, settings, turns
):
    with MedusaModel(served.model) as medusa:
        own, expected = write(served, tmp_path / "own.jsonl", medusa, settings, turns=turns)
    seen = connect(Flaky(served.app))
    model = Endpoint.connect(config(served))
    assert (model.model, model.context_limit, seen.pauses) == ("demo", 160, [1.0, 7.0])

    def stop(report):
        if report.records > 3:
            raise StoppedError

    file = tmp_path / "served.jsonl"
    with pytest.raises(StoppedError):
        write(served, file, model, settings, turns=turns, progress=stop)
    assert 3 < file.read_bytes().count(b"\n") < own.count(b"\n")
    more = replace(settings, batch_size=5)  # requests at once decide nothing
    found, report = write(served, file, model, more, turns=turns, resume=True)
    assert found == own
    assert (report.records, report.answers, report.cut) == (expected.records, expected.answers, expected.cut)
    assert 0 < report.exact < report.answers
    assert (report.encoded, report.left_out.total()) == (0, 0)
    assert json.loads((tmp_path / "served.jsonl.settings").read_text())["model"] == {"served": "demo"}
    other = replace(model, model="other")
    with pytest.raises(ValueError, match=r"model: expected {'served': 'demo'} like the records that are there"):
        write(served, file, other, settings, turns=turns, resume=True)


def test_requests_that_a_server_keeps_after_it_has_ended_are_asked_again(served, connect, tmp_path, monkeypatch):
    monkeypatch.setattr(endpoint, "WATCH", 0.01)
    with MedusaModel(served.model) as medusa:
        own, _ = write(served, tmp_path / "own.jsonl", medusa, GREEDY)
    seen = connect(Ending(served.app))
    found, _ = write(served, tmp_path / "served.jsonl", Endpoint.connect(config(served)), GREEDY)
    assert found == own
    assert seen.pauses[:3] == [1.0] * 3


def test_the_command_asks_a_server_and_keeps_the_key_to_itself(served, connect, tmp_path, monkeypatch, capsys):
    seeds = toy.write_lines(tmp_path / "seeds.jsonl", *({"messages": messages} for messages in CHATS))
    file, out = tmp_path / "config.yaml", tmp_path / "out"
    lines = config(served, max_new_tokens=9, temperature=0.0).to_yaml().replace("path: '-'", f"path: {seeds}")
    file.write_text(lines.replace("folder: '-'", f"folder: {out}"))
    monkeypatch.setattr(command, "load", lambda config: pytest.fail("the model is loaded"))
    monkeypatch.setenv("OPENAI_API_KEY", "sesame")
    seen = connect(httpx.ASGITransport(served.app))
    argv = ["distill", "--config", str(file), "--only-data", "--set", "data.cache_hidden=states"]
    assert main(argv) == 0
    said = capsys.readouterr().err
    assert "data.cache_hidden: answers of a server have no hidden states; training computes them" in said
    assert "7 records of 7 seeds" in said
    assert seen.keys == {"Bearer sesame"}
    assert not [path for path in out.rglob("*") if path.is_file() and b"sesame" in path.read_bytes()]
    assert main([*argv, "--set", "generation.endpoint_model=other", "--set", f"output.folder={tmp_path / 'b'}"]) == 2
    assert "generation.endpoint_model: expected one of ['demo'] (" in capsys.readouterr().err


def test_text_is_encoded_again_and_left_out_if_that_gives_another_text(served, connect, tmp_path):
    texts = {"a": "Häuser, naïve. ", "b": "cut \ufffd", "c": "\ud800", "d": "one<|im_end|>two"}
    seeds = records([chat(f"Say {name}", "x") for name in texts])

    def reply(body, number):
        if "skip_special_tokens" in body:
            return httpx.Response(400, json={"error": {"message": "skip_special_tokens: unknown"}})
        (name,) = [one for one in texts if f"Say {one}<" in served.tokenizer.decode(body["prompt"])]
        end = {"stop_reason": 0} if name == "d" else {}  # which is no end token of the model
        return answer(texts[name], finish_reason="length" if name == "b" else "stop", **end)

    connect(scripted(reply))
    found, report = write(served, tmp_path / "a.jsonl", Endpoint.connect(config(served)), GREEDY, seeds)
    lines = {line["seed"]["number"]: line for line in map(json.loads, found.splitlines())}
    assert sorted(lines) == [0, 3]
    for number, text in ((0, texts["a"]), (3, "one")):
        (start, end), ids = lines[number]["learnt"][0], lines[number]["input_ids"]
        assert served.tokenizer.decode(ids[start : end - 1]) == text
        assert ids[end - 1] == IM_END
    reason = "an answer's text has no tokens that give it again (the server returns no token ids)"
    assert (report.exact, report.encoded, dict(report.left_out)) == (0, 2, {reason: 2})


@pytest.mark.parametrize(
    ("choice", "words"),
    [
        ({"token_ids": [5, 10**6]}, r"an answer in the vocabulary of model.name, [0-9]+ tokens, got \[5, 1000000\]"),
        ({"token_ids": [-1]}, "an answer in the vocabulary"),
        ({"token_ids": [40], "text": "of another vocabulary"}, "an answer in the vocabulary"),
        (
            {"token_ids": [40], "prompt_token_ids": [1]},
            "seeds:[0-9]: expected a server that reads a prompt's token ids",
        ),
        ({"token_ids": ["40"]}, "expected JSON in OpenAI's form from http://127.0.0.1:8000/v1/completions, got"),
        (httpx.Response(404, text="no \x1b[2J such model"), r"got HTTP 404: 'no \\x1b\[2J such model'"),
        (httpx.Response(503, text="loading"), r"in 10 attempts, got HTTP 503: 'loading'; try --resume"),
        (httpx.Response(429), r"in 10 attempts, got HTTP 429: ''; try --resume"),
    ],
)
def test_what_cannot_be_the_models_answer_ends_the_run(served, connect, tmp_path, choice, words):
    refuses = isinstance(choice, httpx.Response)
    seen = connect(scripted(lambda body, _: choice if refuses else answer(**choice)))
    with pytest.raises(ValueError, match=words):
        write(served, tmp_path / "a.jsonl", Endpoint.connect(config(served)), replace(GREEDY, batch_size=1))
    assert (tmp_path / "a.jsonl").exists() is False
    asked = seen.bodies[1]
    assert (asked["temperature"], asked["max_tokens"], asked["stop_token_ids"]) == (0.0, 12, [IM_END])


def test_answers_that_a_server_ended_otherwise_are_left_out(served, connect, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(served.folder)
    ids = tokenizer("one two three", add_special_tokens=False)["input_ids"]
    kinds = [
        {"token_ids": [*ids, IM_END], "text": "one two three"},
        {"token_ids": ids, "text": "one two three"},  # a stop string of the server's
        {"token_ids": ids[:2], "text": "one two", "finish_reason": "abort"},  # and when it is asked again:
        {"token_ids": ids[:3] * 4, "text": tokenizer.decode(ids[:3] * 4), "finish_reason": "length"},
        {"token_ids": ids * 9, "text": "one two three" * 9, "finish_reason": "length"},
    ]
    connect(scripted(lambda body, number: answer(**kinds[number % 5])))
    settings = replace(GREEDY, batch_size=1, turns=1)
    assert (settings.max_new_tokens, len(ids)) >= (12, 3)
    found, report = write(served, tmp_path / "a.jsonl", Endpoint.connect(config(served)), settings, records()[:4])
    assert [json.loads(line)["seed"]["number"] for line in found.splitlines()] == [0, 2]
    assert (report.cut, report.left_out.total(), len(report.left_out)) == (1, 2, 2)
    kinds[:] = [{"token_ids": ids[:3], "text": tokenizer.decode(ids[:3]), "finish_reason": "length"}] * 5
    with pytest.raises(
        ValueError, match=r"expected an answer of up to 12 tokens .*, got one that a limit of the server cut off"
    ):
        write(served, tmp_path / "b.jsonl", Endpoint.connect(config(served)), settings, records()[:1])


@pytest.mark.parametrize("url", ["http://a:b@host/v1", "host:8000/v1", "ftp://host/v1", "http://host/v1?key=1", ""])
def test_urls_that_are_none_or_hold_secrets_are_refused(served, url):
    with pytest.raises(ValueError, match=r"generation.endpoint: expected URLs such as") as refused:
        Endpoint.connect(config(served, endpoint=url))
    assert "a:b" not in str(refused.value)
