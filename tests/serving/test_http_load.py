"""Many clients at once: each answer is the one that its request gets alone, and memory is bounded."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
import torch
from http_server import live, wait_for

from medusa_decoding.serving.engine import Engine
from recipes.demo.requests import draw

SETTINGS = [
    {},
    {"temperature": 0.7},
    {"temperature": 1.0, "top_p": 0.9},
    {"extra_body": {"tree": "plain"}},
    {"extra_body": {"tree": [[0], [1], [0, 0]]}},
    {"extra_body": {"repetition_penalty": 1.1}},
    {"stop": ["return", "self"]},
]
NEW = 40


def offline(model, encoder, content, seed, settings):
    """The text that a request gets from `generate` alone."""
    given = {"max_new_tokens": NEW, "eos_token_id": 0} | settings.get("extra_body", {})
    given.pop("tree", None)
    if "temperature" in settings:
        given |= {"do_sample": True, "seed": seed} | {k: v for k, v in settings.items() if k != "stop"}
    prompt = encoder.encode([{"role": "user", "content": content}])
    tokens = model.generate(torch.tensor([prompt]), **given).sequences[0, len(prompt) :]
    text = encoder.tokenizer.decode(tokens, skip_special_tokens=True)
    return min((text.split(stop)[0] for stop in settings.get("stop", ())), key=len, default=text)


async def ask(client, content, seed, settings, stream):
    fields = {"model": "demo", "messages": [{"role": "user", "content": content}], "max_tokens": NEW, "seed": seed}
    if not stream:
        answer = await client.chat.completions.create(**fields, **settings)
        return answer.choices[0].message.content
    events = await client.chat.completions.create(**fields, **settings, stream=True)
    return "".join([event.choices[0].delta.content or "" async for event in events])


def resident():
    """Bytes that this process holds in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.slow
def test_forty_concurrent_requests_get_what_they_get_alone(demo, encoder):
    asked = [
        (request.text, number, SETTINGS[number % len(SETTINGS)], number % 2 == 0)
        for number, request in enumerate(draw(40, seed=21))
    ]
    expected = [offline(demo, encoder, content, seed, settings) for content, seed, settings, _ in asked]

    async def all_at_once(server):
        async with server.asynchronous() as client:
            return await asyncio.gather(*(ask(client, *one) for one in asked))

    with Engine(demo, slots=8, queue=100) as engine, live(engine, encoder) as server:
        held = []
        for _ in range(3):
            assert asyncio.run(all_at_once(server)) == expected
            wait_for(lambda: engine.stats().running == 0)
            held.append(resident())
        assert engine.stats().waiting == 0
    assert held[2] - held[1] < 32 * 2**20  # the first round fills caches and allocators


CLIENT = """
import sys, openai
client = openai.OpenAI(base_url=sys.argv[1], api_key="none")
question = {"role": "user", "content": "Write a class Job with name: str."}
for event in client.chat.completions.create(
    model="demo", messages=[question], max_tokens=900, stream=True, logit_bias={"0": -100}
):
    print("x", flush=True)
"""


@pytest.mark.slow
def test_a_client_that_is_killed_frees_its_slot(demo, encoder):
    with Engine(demo, slots=1) as engine, live(engine, encoder) as server:
        client = subprocess.Popen([sys.executable, "-c", CLIENT, f"{server.url}/v1"], stdout=subprocess.PIPE)
        assert client.stdout.readline() == b"x\n"
        client.kill()
        client.communicate()
        answer = asyncio.run(ask(server.asynchronous(), "Write a class Job with name: str.", 0, {}, False))
        assert answer == offline(demo, encoder, "Write a class Job with name: str.", 0, {})
        wait_for(lambda: engine.stats().finished.get("cancelled") == 1)


@pytest.mark.slow
def test_a_server_that_is_killed_while_it_streams_can_be_started_again(tmp_path):
    def start(port):
        command = [sys.executable, "-m", "medusa_decoding", "serve", "--device", "cpu", "--port", str(port)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        line = process.stdout.readline()
        return process, line.split(" at ")[1].split("v1:")[0]

    def stream_and_kill():
        with httpx.stream("POST", f"{url}v1/completions", json=body, timeout=60) as response:
            for number, _ in enumerate(response.iter_lines()):
                if number == 4:
                    process.send_signal(signal.SIGKILL)

    process, url = start(0)
    body = {"model": "demo", "prompt": "Write", "max_tokens": 900, "stream": True, "logit_bias": {"0": -100}}
    with pytest.raises(httpx.RemoteProtocolError):
        stream_and_kill()
    process.communicate()
    again, same = start(url.rstrip("/").rsplit(":", 1)[1])
    try:
        assert same == url
        body |= {"stream": False, "max_tokens": 4}
        assert httpx.post(f"{url}v1/completions", json=body, timeout=60).status_code == 200
    finally:
        again.kill()
        again.communicate()
