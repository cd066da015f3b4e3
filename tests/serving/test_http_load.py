"""Many clients at once: each answer is the one that its request gets alone, and memory is bounded."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

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
