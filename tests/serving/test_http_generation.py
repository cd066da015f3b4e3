"""The real OpenAI client against a live server: every text is the one that `generate` writes."""

from __future__ import annotations

from unittest.mock import ANY

import openai
import pytest
import torch

QUESTION = "Write a class Job with name: str and priority: int that is sorted by priority."
OTHER = "Write a command line parser with path and --verbose."
UNKNOWN = "Tell me about numbers."  # the model has not learnt this: its distribution is flat


@pytest.fixture(scope="module")
def written(demo, tokenizer, encoder):
    """What the model writes after a user's message (or, with `text`, after a text)."""

    def write(content=None, text=None, **settings):
        prompt = (
            encoder.encode([{"role": "user", "content": content}]) if text is None else tokenizer(text)["input_ids"]
        )
        settings = {"max_new_tokens": 48, **settings}
        settings = {"eos_token_id": 0, **settings}
        output = demo.generate(torch.tensor([prompt]), **settings).sequences
        new = [row[len(prompt) :].tolist() for row in output]
        tokens = [row[: row.index(0)] if 0 in row and settings["eos_token_id"] == 0 else row for row in new]
        texts = [tokenizer.decode(row, skip_special_tokens=True) for row in tokens]
        return prompt, tokens, texts

    return write


def ask(server, content=QUESTION, **fields):
    fields = {"max_tokens": 48, **fields}
    return server.client.chat.completions.create(
        model="demo", messages=[{"role": "user", "content": content}], **fields
    )


def test_a_chat_answer_is_the_models_own(server, written):
    prompt, [tokens], [text] = written(QUESTION)
    done = ask(server)
    [choice] = done.choices
    assert choice.message.content == text
    assert choice.message.role == "assistant"
    assert choice.finish_reason == "length"
    assert done.object == "chat.completion"
    assert done.usage.prompt_tokens == len(prompt)
    assert done.usage.completion_tokens == len(tokens) == 48
    assert done.usage.total_tokens == len(prompt) + 48
    medusa = done.usage.medusa
    assert medusa["accepted_draft_tokens"] == 47 - medusa["steps"] > 0
    assert sum(medusa["accept_lengths"].values()) == medusa["steps"]
    assert medusa["tokens_per_step"] == pytest.approx(47 / medusa["steps"], abs=1e-3)


@pytest.mark.parametrize("chat", [True, False])
def test_token_ids_are_those_of_the_prompts_and_the_answers(server, written, tokenizer, chat):
    fields = {"n": 2, "max_tokens": 400, "extra_body": {"return_token_ids": True}}
    prompt, [tokens], _ = written(QUESTION, max_new_tokens=400)
    prompts = [prompt] if chat else [prompt, prompt[:-1]]
    if not chat:
        fields = {"model": "demo", "prompt": prompts, **fields}
    create = server.client.completions.create
    done = ask(server, **fields) if chat else create(**fields)
    chunks = list(ask(server, stream=True, **fields) if chat else create(stream=True, **fields))
    for choice in done.choices:
        where = done if chat else choice
        assert where.prompt_token_ids == prompts[choice.index // 2]
        if choice.index < 2:
            assert choice.token_ids == [*tokens, 0]  # with the end token
        parts = [(chunk, chunk.choices[0]) for chunk in chunks if chunk.choices[0].index == choice.index]
        assert [token for _, part in parts for token in part.token_ids] == choice.token_ids
        assert all(part.medusa["tokens"] == len(part.token_ids) for _, part in parts)
        told = [getattr(chunk if chat else part, "prompt_token_ids", None) for chunk, part in parts]
        assert told == [where.prompt_token_ids, *[None] * (len(parts) - 1)]


def test_a_stream_has_one_chunk_per_step_and_then_the_usage(server, written):
    _, _, [text] = written(QUESTION)
    chunks = list(ask(server, stream=True, stream_options={"include_usage": True}))
    *steps, last = chunks
    assert last.choices == []
    assert "".join(chunk.choices[0].delta.content for chunk in steps) == text
    figures = [chunk.choices[0].medusa for chunk in steps]
    assert [figure["step"] for figure in figures] == list(range(len(steps)))
    assert figures[0]["tokens"] == 1
    assert sum(figure["tokens"] for figure in figures) == last.usage.completion_tokens == 48
    assert last.usage.medusa["steps"] == len(steps) - 1
    assert [chunk.choices[0].finish_reason for chunk in steps] == [None] * (len(steps) - 1) + ["length"]
    assert steps[0].choices[0].delta.role == "assistant"
    assert all(chunk.choices[0].delta.role is None for chunk in steps[1:])
    assert all(chunk.usage is None for chunk in steps)


@pytest.mark.parametrize("fields", [{}, {"top_p": 0.9}, {"extra_body": {"top_k": 5, "min_p": 0.05}}])
def test_a_seed_gives_the_text_that_generate_draws(server, written, fields):
    flat = {**fields, **fields.get("extra_body", {})}
    flat.pop("extra_body", None)
    _, _, texts = written(UNKNOWN, do_sample=True, temperature=1.2, seed=7, num_return_sequences=3, **flat)
    assert len(set(texts)) == 3
    done = ask(server, UNKNOWN, temperature=1.2, seed=7, n=3, **fields)
    assert [choice.message.content for choice in done.choices] == texts
    streamed = ["", "", ""]
    for chunk in ask(server, UNKNOWN, temperature=1.2, seed=7, n=3, stream=True, **fields):
        streamed[chunk.choices[0].index] += chunk.choices[0].delta.content
    assert streamed == texts


def test_top_p_alone_samples_and_temperature_0_does_not(server, written):
    _, _, [sampled] = written(UNKNOWN, do_sample=True, temperature=1.0, top_p=0.95, seed=3)
    _, _, [greedy] = written(UNKNOWN)
    assert sampled != greedy
    assert ask(server, UNKNOWN, top_p=0.95, seed=3).choices[0].message.content == sampled
    assert ask(server, UNKNOWN, top_p=0.95, temperature=0, seed=3).choices[0].message.content == greedy
    assert ask(server, UNKNOWN, top_p=0, temperature=1, seed=3).choices[0].message.content == greedy
    assert ask(server, UNKNOWN, temperature=1e-8, seed=3).choices[0].message.content == greedy  # as ragas sends it


@pytest.mark.parametrize("tree", ["plain", "auto", [[0], [1], [0, 0], [0, 0, 0]]])
def test_trees_change_steps_and_not_the_text(server, written, tree):
    _, _, [text] = written(QUESTION)
    done = ask(server, extra_body={"tree": tree})
    assert done.choices[0].message.content == text
    lengths = done.usage.medusa["accept_lengths"]
    if tree == "plain":
        assert lengths == {"0": 47}
    if isinstance(tree, list):
        assert {"1", "2", "3"} & set(lengths)
        assert max(map(int, lengths)) <= 3


@pytest.mark.parametrize("fields", [{"temperature": 0}, {"temperature": 0.8, "seed": 4}])
def test_end_tokens_are_ignored_delayed_and_added(server, written, fields):
    settings = {"do_sample": True, **fields} if fields["temperature"] else {}

    def text(**extra):
        done = ask(server, OTHER, max_tokens=200, **fields, extra_body=extra)
        return done.usage.completion_tokens, done.choices[0].message.content, done.choices[0].finish_reason

    _, [short], [ended] = written(OTHER, max_new_tokens=200, **settings)
    assert text() == (len(short) + 1, ended, "stop")
    assert text(stop_token_ids=[short[9]]) == (short.index(short[9]) + 1, ANY, "stop")
    _, _, [endless] = written(OTHER, max_new_tokens=200, eos_token_id=[], **settings)
    assert text(ignore_eos=True) == (200, endless, "length")
    least = len(short) + 20
    _, [delayed], [longer] = written(OTHER, max_new_tokens=200, min_new_tokens=least, **settings)
    assert text(min_tokens=least)[1] == longer != ended


def test_text_completions_continue_each_prompt(server, written, tokenizer):
    texts = ["class Job:\n    name: str\n", "import argparse\n\n"]
    wanted = [written(text=text, max_new_tokens=16)[2][0] for text in texts]
    complete = server.client.completions.create
    ids = [tokenizer(text)["input_ids"] for text in texts]
    for prompt, expected in ((texts[0], wanted[:1]), (texts, wanted), (ids[0], wanted[:1]), (ids, wanted)):
        done = complete(model="demo", prompt=prompt, max_tokens=16)
        assert [choice.text for choice in done.choices] == expected
        assert [choice.index for choice in done.choices] == list(range(len(expected)))
        assert done.usage.prompt_tokens == sum(map(len, ids[: len(expected)]))
    streamed = ["", ""]
    for chunk in complete(model="demo", prompt=texts, max_tokens=16, stream=True):
        assert chunk.object == "text_completion"
        streamed[chunk.choices[0].index] += chunk.choices[0].text
    assert streamed == wanted


def test_log_probabilities_are_the_models(server, written, demo):
    prompt, [tokens], [text] = written(OTHER, max_new_tokens=20)
    with torch.no_grad():
        logits = demo.backbone.causal_lm(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    expected = logits.float().log_softmax(-1)
    done = ask(server, OTHER, max_tokens=20, logprobs=True, top_logprobs=3)
    content = done.choices[0].logprobs.content
    assert bytes(byte for entry in content for byte in entry.bytes).decode() == text
    assert "".join(entry.token for entry in content) == text
    own = [expected[place, token].item() for place, token in enumerate(tokens)]
    assert [entry.logprob for entry in content] == pytest.approx(own, abs=1e-4)
    for entry, row in zip(content, expected, strict=True):
        assert [top.logprob for top in entry.top_logprobs] == pytest.approx(row.topk(3).values.tolist(), abs=1e-4)
    chunks = list(ask(server, OTHER, max_tokens=20, logprobs=True, stream=True))
    streamed = [entry for chunk in chunks for entry in chunk.choices[0].logprobs.content]
    assert [entry.logprob for entry in streamed] == pytest.approx(own, abs=1e-4)
    assert all(entry.top_logprobs == [] for entry in streamed)


@pytest.mark.parametrize("count", [0, 1, 3])
def test_the_chosen_token_is_among_the_top_log_probabilities(server, count):
    fields = {"temperature": 2.0, "seed": 1, "max_tokens": 20, "logprobs": count}
    found = server.client.completions.create(model="demo", prompt="Write a", **fields).choices[0].logprobs
    places = list(zip(found.tokens, found.token_logprobs, found.top_logprobs, strict=True))
    assert all(top[token] == logprob and len(top) in (max(count, 1), count + 1) for token, logprob, top in places)
    assert any(len(top) == count + 1 for *_, top in places)  # an unlikely token


def test_an_echo_scores_the_prompt_as_the_model_does(server, written, tokenizer, demo):
    texts = ["class Job:\n    na\u00efve: str\n", "import \U0001f600 argparse"]
    prompts = [tokenizer(text)["input_ids"] for text in texts]
    fields = {"model": "demo", "prompt": prompts, "max_tokens": 1, "logprobs": 1, "temperature": 0, "echo": True}
    done = server.client.completions.create(**fields, seed=1234, extra_body={"prompt_logprobs": 2})
    streamed = ["", ""]
    for chunk in server.client.completions.create(**fields, stream=True):
        streamed[chunk.choices[0].index] += chunk.choices[0].text
    assert [choice.text for choice in done.choices] == streamed
    for choice, text, prompt in zip(done.choices, texts, prompts, strict=True):
        new = demo.generate(torch.tensor([prompt]), max_new_tokens=1).sequences[0].tolist()
        with torch.no_grad():
            expected = demo.backbone.causal_lm(torch.tensor([new])).logits[0, :-1].log_softmax(-1)
        found = choice.logprobs
        assert choice.text == text + tokenizer.decode(new[-1:], skip_special_tokens=True)
        assert found.token_logprobs[0] is found.top_logprobs[0] is choice.prompt_logprobs[0] is None
        own = [float(row[token]) for row, token in zip(expected, new[1:], strict=True)]
        assert found.token_logprobs[1:] == pytest.approx(own, abs=1e-4)
        for token, top, row in zip(found.tokens[1:], found.top_logprobs[1:], expected, strict=True):
            assert max(top.values()) == pytest.approx(float(row.max()), abs=1e-4)
            assert len(top) <= 2
            assert token in top
        for entry, token, row in zip(choice.prompt_logprobs[1:], prompt[1:], expected[:-1], strict=True):
            ranks = row.argsort(descending=True).tolist()
            assert {int(one): told["rank"] for one, told in entry.items()} == {
                one: ranks.index(one) + 1 for one in {token, *ranks[:2]}
            }
            for one, told in entry.items():
                assert told["logprob"] == pytest.approx(float(row[int(one)]), abs=1e-4)
        for token, at in zip(found.tokens, found.text_offset, strict=True):
            assert not choice.text[at].isascii() if token.startswith("bytes:") else choice.text[at:].startswith(token)


@pytest.mark.parametrize("prompt", ["Write a class", [40, 41, 42]])
def test_no_new_tokens_leave_the_prompt_alone(server, tokenizer, prompt):
    create = server.client.completions.create
    done = create(model="demo", prompt=prompt, max_tokens=0, echo=True, logprobs=0, n=2)
    text = prompt if isinstance(prompt, str) else tokenizer.decode(prompt)
    assert [choice.text for choice in done.choices] == [text, text]
    assert all(len(choice.logprobs.tokens) == done.usage.prompt_tokens for choice in done.choices)
    assert {choice.finish_reason for choice in done.choices} == {"length"}
    assert done.usage.completion_tokens == 0
    [empty] = create(model="demo", prompt=prompt, max_tokens=0).choices
    assert (empty.text, empty.finish_reason) == ("", "length")


def test_log_probabilities_end_with_the_text(server, written):
    _, _, [text] = written(QUESTION)
    stop = text[20:26]
    done = ask(server, logprobs=True, stop=stop)
    told = "".join(entry.token for entry in done.choices[0].logprobs.content)
    kept = done.choices[0].message.content
    assert told.startswith(kept)
    assert len(told) - len(kept) < len(done.choices[0].logprobs.content[-1].token)


def test_a_conversation_reuses_its_prefix(server, written):
    first = ask(server, max_tokens=8)
    messages = [
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": first.choices[0].message.content},
        {"role": "user", "content": [{"type": "text", "text": "And "}, {"type": "text", "text": "then?"}]},
    ]
    second = server.client.chat.completions.create(model="demo", messages=messages, max_tokens=4)
    cached = second.usage.prompt_tokens_details.cached_tokens
    assert first.usage.prompt_tokens - 1 <= cached < second.usage.prompt_tokens


def test_models_are_listed(server):
    [model] = server.client.models.list().data
    assert model.id == "demo"
    assert server.client.models.retrieve("demo").id == "demo"
    with pytest.raises(openai.NotFoundError) as failed:
        server.client.models.retrieve("another/model")
    assert failed.value.code == "model_not_found"
