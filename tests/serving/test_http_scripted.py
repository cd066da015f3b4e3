"""Answers that a test has written down: stop strings, parts of characters, tool calls, failures, clients that leave."""

from __future__ import annotations

import copy
import json
import re
import threading

import httpx
import openai
import pytest
from http_server import ScriptedEngine, live, wait_for
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from medusa_decoding.chat.template import ChatTemplate, PromptEncoder
from medusa_decoding.serving.http import responses
from medusa_decoding.serving.http.token_text import TokenBytes

END = 0
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "hello"}]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add two numbers.",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
        },
    }
]
TEMPLATE = """\
{%- if tools %}{{- '<|user|>Tools: ' + tools | tojson + '<|end|>' }}{%- endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}{{- '<|user|>Result of ' + message.tool_call_id + ': ' + message.content + '<|end|>' }}
{%- elif message.tool_calls %}
{%- for call in message.tool_calls %}{{- '<|assistant|>' + call.function.name }}
{%- for name, value in call.function.arguments.items() %}{{- ' ' + name + '=' + value | string }}{%- endfor %}
{%- endfor %}{{- '<|end|>' }}
{%- else %}{{- '<|' + message.role + '|>' + message.content + '<|end|>' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}"""


@pytest.fixture
def scripted(demo, tokenizer):
    """Make an engine that writes a text in steps of a few tokens."""

    def make(text, size=3, **settings):
        tokens = [*tokenizer(text)["input_ids"], *([] if settings.get("finish") == "length" else [END])]
        steps = [tokens[:1], *(tokens[i : i + size] for i in range(1, len(tokens), size))]
        return ScriptedEngine(demo, steps, **settings)

    return make


@pytest.fixture
def tool_template(tokenizer, tmp_path):
    (tmp_path / "tools.jinja").write_text(TEMPLATE)
    return ChatTemplate(tokenizer, str(tmp_path / "tools.jinja"))


def ask(server, **fields):
    return server.client.chat.completions.create(model="demo", messages=MESSAGES, **fields)


def streamed(server, **fields):
    return [chunk.choices[0] for chunk in ask(server, stream=True, **fields)]


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize(
    ("stop", "kept"),
    [
        ("STOP", "one ST two STO "),
        (["never", "OP th"], "one ST two STO ST"),
        ("four", "one ST two STO STOP three "),
    ],
)
def test_stop_strings_are_found_across_tokens_and_steps(scripted, encoder, stop, kept, size):
    text = "one ST two STO STOP three four"
    engine = scripted(text, size)
    with live(engine, encoder) as server:
        whole = ask(server, stop=stop)
        chunks = streamed(server, stop=stop)
    done = whole.choices[0]
    assert whole.usage.medusa["steps"] == len(chunks) - 1  # the engine may be ahead
    assert done.message.content == "".join(chunk.delta.content for chunk in chunks) == kept
    assert done.finish_reason == chunks[-1].finish_reason == "stop"
    shown = ""
    for chunk in chunks:  # nothing has to be taken back
        shown += chunk.delta.content
        assert kept.startswith(shown)


@pytest.mark.parametrize(
    ("stop", "kept"),
    [
        ("<|user|>", "one STOP two"),
        (["absent<|user|>", "wo<|user|>"], "one STOP t"),
        ("T<|assistant|>O", "one S"),
        ("<|user|><|user|>thr", "one STOP two"),
        ("ree<|end|>", "one STOP twoth"),  # the token that ends every answer
        (["<|end|>", "two<|user|>th"], "one STOP twothree"),
        ("STOP", "one "),  # special tokens do not hide the text around them
        ("|", "one STOP twothree"),
    ],
)
def test_stop_strings_with_special_tokens_are_found_and_not_shown(scripted, encoder, stop, kept):
    for size in (1, 3):
        with live(scripted("one ST<|assistant|>OP two<|user|><|user|>three", size), encoder) as server:
            chat = ask(server, stop=stop, logprobs=True).choices[0]
            chunks = streamed(server, stop=stop)
            done = server.client.completions.create(model="demo", prompt="x", stop=stop).choices[0]
        assert chat.message.content == done.text == "".join(chunk.delta.content for chunk in chunks) == kept
        assert {chat.finish_reason, done.finish_reason, chunks[-1].finish_reason} == {"stop"}
        tokens = "".join(entry.token for entry in chat.logprobs.content)
        assert tokens.replace("<|assistant|>", "").replace("<|user|>", "").startswith(kept)


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {"messages": MESSAGES, "return_token_ids": True}),
        (CHAT, {"messages": MESSAGES, "tools": TOOLS, "logprobs": True, "top_logprobs": 2}),
        (TEXT, {"prompt": "x", "return_token_ids": True}),
        (TEXT, {"prompt": "x", "echo": True, "logprobs": 2}),
        ("/tokenize", {"prompt": "x", "return_token_strs": True}),
        ("/detokenize", {"tokens": [5]}),
        ("/v1/models", None),
        ("/v1/models/{model}", None),
    ],
)
def test_responses_have_the_fields_of_the_schema(scripted, tool_template, path, fields):
    def check(body, kind="application/json"):
        model = getattr(responses, described[kind]["schema"]["$ref"].rpartition("/")[2])
        assert model.model_validate(body, strict=True).model_dump(exclude_unset=True) == body

    with live(scripted(HERMES), tool_template) as server:
        operation = httpx.get(f"{server.url}/openapi.json").json()["paths"][path]["post" if fields else "get"]
        described, where = operation["responses"]["200"]["content"], server.url + path.format(model="demo")
        answer = httpx.get(where) if fields is None else httpx.post(where, json={"model": "demo", **fields}, timeout=60)
        check(answer.json())
        if path in (CHAT, TEXT):
            streamed = {"model": "demo", "stream": True, "stream_options": {"include_usage": True}, **fields}
            *events, done = httpx.post(where, json=streamed, timeout=60).text.split("\n\n")[:-1]
            assert done == "data: [DONE]"
            for event in events:
                check(json.loads(event.removeprefix("data: ")), "text/event-stream")


def test_a_chat_template_gets_variables_of_the_request(scripted, tokenizer, tmp_path):
    (tmp_path / "moods.jinja").write_text("<|user|>{{ mood | default('calm') }}{{ template }}<|assistant|>")
    engine = scripted("one")
    with live(engine, ChatTemplate(tokenizer, str(tmp_path / "moods.jinja"))) as server:
        for given in (None, {}, {"mood": "merry", "template": "X", "unused": [1]}):
            ask(server, extra_body={"chat_template_kwargs": given})
        asked = {"messages": MESSAGES, "chat_template_kwargs": {"mood": "merry"}}
        merry = httpx.post(f"{server.url}/tokenize", json=asked).json()["tokens"]
    calm, again, other = (tokenizer.decode(asked["prompt"]) for asked in engine.asked)
    assert calm == again == "<|user|>calm<|assistant|>"
    assert other == "<|user|>merryX<|assistant|>"
    assert tokenizer.decode(merry) == "<|user|>merry<|assistant|>"


def test_the_models_own_stop_strings_end_answers(scripted, encoder, demo, monkeypatch):
    monkeypatch.setattr(demo.backbone.causal_lm.generation_config, "stop_strings", "three")
    with live(scripted("one two three four"), encoder) as server:
        assert ask(server, stop=["four"]).choices[0].message.content == "one two "
        text = server.client.completions.create(model="demo", prompt="x").choices[0].text
    assert text == "one two "


def test_a_stop_string_ends_the_generation_and_what_it_counts(scripted, encoder, tokenizer):
    engine = scripted("one two three four five six", hold=True)
    with live(engine, encoder) as server:
        for _ in range(4):
            engine.release.release()
        done = ask(server, stop="two")
    assert done.choices[0].message.content == "one "
    assert all(ticket.cancelled for ticket in engine.tickets)
    whole = tokenizer("one two")["input_ids"]
    assert done.usage.completion_tokens == len(whole)


@pytest.mark.parametrize("size", [1, 5])
def test_characters_arrive_whole_and_logprobs_have_their_bytes(scripted, encoder, size):
    text = "na\u00efve \u20ac \U0001f600!"
    with live(scripted(text, size), encoder) as server:
        done = ask(server, logprobs=True, top_logprobs=2).choices[0]
        chunks = streamed(server, logprobs=True)
        told = server.client.completions.create(model="demo", prompt="x", logprobs=1).choices[0]
    assert done.message.content == text
    assert bytes(byte for entry in done.logprobs.content for byte in entry.bytes) == text.encode()
    parts = [entry for entry in done.logprobs.content if entry.token.startswith("bytes:\\x")]
    assert len(parts) >= 4
    assert all(entry.top_logprobs[0].bytes == entry.bytes for entry in done.logprobs.content)
    assert not any("\ufffd" in chunk.delta.content for chunk in chunks)
    entries = [entry for chunk in chunks for entry in chunk.logprobs.content]
    assert [entry.bytes for entry in entries] == [entry.bytes for entry in done.logprobs.content]
    assert told.text == text
    assert [text[start:].startswith("\u20ac") for start in told.logprobs.text_offset].count(True) == 3


def test_an_unfinished_character_is_shown_at_the_end(demo, tokenizer, encoder):
    tokens = tokenizer("a\u20ac")["input_ids"][:-1]
    with live(ScriptedEngine(demo, [[token] for token in tokens], "length"), encoder) as server:
        done = ask(server, logprobs=True).choices[0]
    assert done.message.content == "a\ufffd"
    assert done.finish_reason == "length"
    assert bytes(byte for entry in done.logprobs.content for byte in entry.bytes) == "a\u20ac".encode()[:-1]


@pytest.fixture
def sentencepiece():
    """A tokenizer whose decoder removes the space before a text's first word."""
    pieces = ["<0xE2>", "<0x82>", "<0xAC>", "\u2581b", "a", "<unk>"]
    backend = Tokenizer(models.BPE({piece: n for n, piece in enumerate(pieces)}, [], unk_token="<unk>"))
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")


def test_tokens_of_sentencepiece_have_their_spaces_and_bytes(sentencepiece):
    lookup = TokenBytes(sentencepiece)
    assert b"".join(map(lookup, [3, 0, 1, 2, 4])) == " b\u20aca".encode()
    assert [lookup.text(token) for token in (0, 3)] == ["bytes:\\xe2", " b"]


def test_only_text_that_continues_a_prompt_begins_with_its_space(demo, sentencepiece):
    template = ChatTemplate(sentencepiece, "plain")
    with live(ScriptedEngine(demo, [[3], [4]], "length"), template) as server:
        prompts = [[4], [4, 0]]  # the second one ends inside a character
        done = server.client.completions.create(model="demo", prompt=prompts)
        assert [choice.text for choice in done.choices] == [" ba", "ba"]
        assert ask(server).choices[0].message.content == "ba"


HERMES = 'Let me see. <tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
TWICE = HERMES + '\n<tool_call>{"name": "add", "arguments": {"a": 3}}</tool_call>'
LLAMA = '{"name": "add", "parameters": {"a": 1, "b": 2}}'


@pytest.mark.parametrize("size", [1, 100])
@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (HERMES, "Let me see. ", [{"a": 1, "b": 2}]),
        (TWICE, "Let me see. ", [{"a": 1, "b": 2}, {"a": 3}]),
        (HERMES.removesuffix("</tool_call>"), "Let me see. ", [{"a": 1, "b": 2}]),
        (f"{HERMES}\n And  so on", "Let me see. And  so on", [{"a": 1, "b": 2}]),
        (LLAMA, None, [{"a": 1, "b": 2}]),
        (f"{LLAMA}; {LLAMA}", None, [{"a": 1, "b": 2}] * 2),
        ("{nothing}", "{nothing}", []),
        ("a <tool_cat> b", "a <tool_cat> b", []),
        ("<tool_call>no JSON</tool_call>.", "<tool_call>no JSON</tool_call>.", []),
        ("<tool_call>", "<tool_call>", []),
        (HERMES.replace('"a": 1', '"\\ud83d": 1'), "Let me see. ", [{"\ud83d": 1, "b": 2}]),
        *(
            (text, text, [])
            for call in (LLAMA.replace("1", "1e999"), LLAMA.replace("1", "NaN"), LLAMA.replace("add", "sub"))
            for text in (call, f"Let me see. <tool_call>{call}</tool_call>", f"<tool_call>{call}")
        ),
    ],
)
def test_tool_calls_are_found(scripted, tool_template, text, content, calls, size):
    with live(scripted(text, size), tool_template) as server:
        done = ask(server, tools=TOOLS, tool_choice="auto").choices[0]
        chunks = streamed(server, tools=TOOLS)
    assert done.message.content == content
    found = done.message.tool_calls or []
    assert [json.loads(call.function.arguments) for call in found] == calls
    assert {call.function.name for call in found} <= {"add"}
    assert done.finish_reason == ("tool_calls" if calls else "stop")
    assert chunks[-1].finish_reason == done.finish_reason
    pieces = [call for chunk in chunks for call in chunk.delta.tool_calls or []]
    assert [json.loads(call.function.arguments) for call in pieces] == calls
    assert [call.index for call in pieces] == list(range(len(calls)))
    assert len({call.id for call in pieces}) == len(calls)
    assert all(re.fullmatch("[a-zA-Z0-9]{9}", call.id) for call in [*found, *pieces])  # as Mistral's templates demand
    assert "".join(chunk.delta.content or "" for chunk in chunks) == (content or "")


def test_tools_and_their_results_reach_the_template(scripted, tool_template, tokenizer):
    call = {"id": "call_7", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'}}
    messages = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_7", "content": "3"},
    ]
    engine = scripted("three")
    with live(engine, tool_template) as server:
        server.client.chat.completions.create(model="demo", messages=messages, tools=TOOLS)
        server.client.chat.completions.create(model="demo", messages=messages, tools=TOOLS, tool_choice="none")
        broken = [{**messages[1], "tool_calls": [{**call, "function": {"name": "add", "arguments": "{"}}]}]
        with pytest.raises(openai.BadRequestError) as failed:
            server.client.chat.completions.create(model="demo", messages=[*MESSAGES, *broken])
    prompt, without = (tokenizer.decode(asked["prompt"]) for asked in engine.asked)
    assert "Add two numbers." in prompt
    assert "add a=1 b=2<|end|>" in prompt
    assert "Result of call_7: 3" in prompt
    assert "Tools:" not in without
    assert failed.value.param == "messages[1].tool_calls[0].function.arguments"


CALLED = {"id": "7", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
USED = [
    {"role": "assistant", "content": "", "tool_calls": [CALLED]},
    {"role": "tool", "tool_call_id": "7", "content": "3"},
]
GENERIC = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}<|assistant|>"


@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize("messages", [MESSAGES, MESSAGES + USED], ids=["question", "result"])
def test_prompts_are_those_of_transformers_with_several_templates(scripted, tokenizer, messages, tools):
    own, engine = copy.deepcopy(tokenizer), scripted("three")
    own.chat_template = {"default": GENERIC, "tool_use": TEMPLATE}
    with live(engine, ChatTemplate(own)) as server:
        server.client.chat.completions.create(model="demo", messages=messages, **({"tools": tools} if tools else {}))
    parsed = [
        {**m, "tool_calls": [{**CALLED, "function": {"name": "add", "arguments": {"a": 1}}}]}
        if "tool_calls" in m
        else m
        for m in messages
    ]
    wanted = own.apply_chat_template(parsed, tools=tools, add_generation_prompt=True, tokenize=False)
    assert engine.asked[0]["prompt"] == tokenizer(wanted, add_special_tokens=False)["input_ids"]


def test_several_calls_are_told_one_by_one_if_the_template_takes_one_at_a_time(scripted, tokenizer, tmp_path):
    once = "{%- for m in messages if m.tool_calls and m.tool_calls[1] %}{{ raise_exception('one') }}{%- endfor %}"
    (tmp_path / "once.jinja").write_text(once + TEMPLATE)
    engine = scripted(f"{LLAMA}; {LLAMA}")
    with live(engine, ChatTemplate(tokenizer, str(tmp_path / "once.jinja"))) as server:
        answer = ask(server, tools=TOOLS).choices[0].message
        first, second = (call.id for call in answer.tool_calls)
        results = [{"role": "tool", "tool_call_id": call, "content": call[::-1]} for call in (second, first)]
        history = [*MESSAGES, answer.model_dump(), *results]
        server.client.chat.completions.create(model="demo", messages=history, tools=TOOLS)
    told = tokenizer.decode(engine.asked[-1]["prompt"]).partition("<|user|>hello<|end|>")[2]
    call = "<|assistant|>add a=1 b=2<|end|><|user|>Result of "
    assert told == "".join(f"{call}{one}: {one[::-1]}<|end|>" for one in (first, second)) + "<|assistant|>"


def test_a_template_without_tools_gets_them_as_text(scripted, tokenizer):
    """A system message has the tools, or the first message if there may be no system message."""
    own, engine = copy.deepcopy(tokenizer), scripted(LLAMA)
    for template in (
        GENERIC,
        "{% if messages[0].role == 'system' %}{{ raise_exception('none') }}{% endif %}" + GENERIC,
    ):
        own.chat_template = template
        with live(engine, ChatTemplate(own)) as server:
            for messages in (MESSAGES, MESSAGES + USED):
                done = server.client.chat.completions.create(model="demo", messages=messages, tools=TOOLS)
                assert done.choices[0].message.tool_calls[0].function.name == "add"
    prompts = [tokenizer.decode(asked["prompt"]) for asked in engine.asked]
    assert [prompt.startswith("<|system|>You can call functions.") for prompt in prompts] == [True, True, False, False]
    assert [prompt.startswith("<|user|>You can call functions.") for prompt in prompts] == [False, False, True, True]
    assert all("Add two numbers." in prompt for prompt in prompts)
    assert prompts[1].endswith(
        '<|user|>hello<|assistant|>{"name": "add", "arguments": {"a": 1}}<|user|>add returned: 3<|assistant|>'
    )


@pytest.mark.parametrize(
    ("fields", "rendered"),
    [
        ({"content": "three"}, "three"),
        ({"content": None, "tool_calls": None}, ""),
        ({"tool_calls": [{"id": None, "function": {"name": "add", "arguments": "{}"}}]}, "add"),
        ({"content": "three", "reasoning_content": "1 + 2", "reasoning_details": [{"text": "1 + 2"}]}, "(1 + 2) three"),
    ],
)
def test_answers_of_any_client_are_history(scripted, tokenizer, tmp_path, fields, rendered):
    said = "{% if message.reasoning_content %}({{ message.reasoning_content }}) {% endif %}{{ message.content }}"
    said += "{% for call in message.tool_calls %}{{ call.function.name }}{% endfor %}"
    (tmp_path / "a.jinja").write_text("{% for message in messages %}[" + said + "]{% endfor %}")
    engine = scripted("four")
    with live(engine, ChatTemplate(tokenizer, str(tmp_path / "a.jinja"))) as server:
        sent_back = ask(server).choices[0].message.model_dump()
        history = [*MESSAGES, sent_back, *MESSAGES, {"role": "assistant", **fields}, *MESSAGES]
        server.client.chat.completions.create(model="demo", messages=history)
    assert tokenizer.decode(engine.asked[-1]["prompt"]) == f"[hello][four][hello][{rendered}][hello]"


def test_text_that_looks_like_a_call_is_text_without_tools(scripted, tool_template):
    with live(scripted(HERMES), tool_template) as server:
        for fields in ({}, {"tools": TOOLS, "tool_choice": "none"}):
            done = ask(server, **fields).choices[0]
            assert done.message.content == HERMES
            assert done.message.tool_calls is None
            assert done.finish_reason == "stop"


def test_an_engine_that_fails_says_nothing_of_itself(scripted, encoder):
    with live(scripted("one two three", finish="error"), encoder) as server:
        with pytest.raises(openai.InternalServerError) as failed:
            ask(server)
        assert failed.value.response.json()["error"]["code"] == "internal_error"
        assert "secret" not in failed.value.response.text
        with pytest.raises(openai.APIError) as failed_later:
            streamed(server)
        assert "secret" not in str(failed_later.value)
        body = {"model": "demo", "messages": MESSAGES, "stream": True}
        lines = httpx.post(f"{server.url}/v1/chat/completions", json=body).text.strip().split("\n\n")
        assert json.loads(lines[-2].removeprefix("data: "))["error"]["type"] == "server_error"
        assert lines[-1] == "data: [DONE]"


def test_lines_of_a_stream_are_whole_for_clients_that_divide_text_at_unicodes_line_ends(scripted, encoder):
    text = "one\x85two\u2028three\u2029four"  # where httpx's iter_lines ends lines, too
    with live(scripted(text), encoder) as server:
        body = {"model": "demo", "messages": MESSAGES, "stream": True}
        with httpx.stream("POST", server.url + CHAT, json=body) as response:
            *lines, done = filter(None, response.iter_lines())
    assert done == "data: [DONE]"
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines]
    assert "".join(chunk["choices"][0]["delta"]["content"] for chunk in chunks) == text


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_takes_too_long_fails_and_ends(scripted, encoder, stream):
    engine = scripted("one two three", hold=True)
    engine.release.release()
    body = {"model": "demo", "messages": MESSAGES, "stream": stream}
    with live(engine, encoder, request_timeout=0.2) as server:
        response = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=20)
        wait_for(lambda: engine.tickets[0].cancelled)
    if stream:
        *_, error, done = response.text.strip().split("\n\n")
        assert done == "data: [DONE]"
        found = json.loads(error.removeprefix("data: "))
    else:
        assert response.status_code == 504
        assert response.headers["x-should-retry"] == "false"
        found = response.json()
    assert found["error"]["code"] == "request_timeout"


def test_a_schema_that_takes_long_holds_up_nobody(scripted, encoder, monkeypatch):
    compiling, done = threading.Event(), threading.Event()

    def slow(*given):
        compiling.set()
        assert done.wait(20)
        raise ValueError("json_schema: none")

    monkeypatch.setattr("medusa_decoding.serving.grammar.Grammars.json", slow)
    body = {"model": "demo", "messages": MESSAGES}
    formed = body | {"response_format": {"type": "json_object"}}
    with live(scripted("one"), encoder, request_timeout=2.0) as server, httpx.Client() as client:
        with pytest.raises(httpx.ReadTimeout):  # the client leaves
            client.post(server.url + CHAT, json=formed, timeout=httpx.Timeout(20, read=0.3))
        assert compiling.wait(20)
        answer = client.post(server.url + CHAT, json=body | {"tools": TOOLS}, timeout=20)
        assert answer.json()["choices"][0]["message"]["content"] == "one"
        late = client.post(server.url + CHAT, json=formed, timeout=20)
        assert (late.status_code, late.json()["error"]["code"]) == (504, "request_timeout")
        counted = f'outcome="cancelled",path="{CHAT}"}} 1.0'
        wait_for(lambda: counted in client.get(f"{server.url}/metrics").text)
        done.set()


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_ends_its_generations(scripted, encoder, stream):
    engine = scripted("one two three", hold=True)
    engine.release.release()
    with live(engine, encoder) as server:
        body = {"model": "demo", "messages": MESSAGES, "stream": stream, "n": 2}
        with httpx.Client() as client, pytest.raises(httpx.ReadTimeout):
            client.post(f"{server.url}/v1/chat/completions", json=body, timeout=httpx.Timeout(20, read=0.5))
        wait_for(lambda: len(engine.tickets) == 2 and all(ticket.cancelled for ticket in engine.tickets))
        metrics = httpx.get(f"{server.url}/metrics").text
    assert 'medusa_requests_total{outcome="cancelled",path="/v1/chat/completions"} 1.0' in metrics


def test_a_model_without_a_chat_template_completes_texts_only(scripted, tokenizer):
    with live(scripted("one two"), PromptEncoder(tokenizer)) as server:
        for asked in ({}, {"tools": TOOLS, "tool_choice": "required"}):
            with pytest.raises(openai.BadRequestError, match="chat template"):
                ask(server, **asked)
        assert server.client.completions.create(model="demo", prompt="x").choices[0].text == "one two"


def test_the_server_decides_what_requests_leave_open(scripted, encoder):
    engine = scripted("one")
    with live(engine, encoder, temperature=0.5, max_new_tokens=20) as server:
        ask(server)
        ask(server, temperature=0, max_tokens=3)
        ask(server, top_p=0.5)
        ask(server, temperature=0, max_completion_tokens=21)
    asked = [
        {name: one.get(name) for name in ("do_sample", "temperature", "top_p", "max_new_tokens")}
        for one in engine.asked
    ]
    assert asked == [
        {"do_sample": True, "temperature": 0.5, "top_p": None, "max_new_tokens": 20},
        {"do_sample": None, "temperature": None, "top_p": None, "max_new_tokens": 3},
        {"do_sample": True, "temperature": 0.5, "top_p": 0.5, "max_new_tokens": 20},
        {"do_sample": None, "temperature": None, "top_p": None, "max_new_tokens": 20},
    ]


def test_a_seed_of_minus_one_is_drawn(scripted, encoder):
    engine = scripted("one")
    with live(engine, encoder) as server:
        for seed in (-1, -2):
            ask(server, seed=seed, temperature=1)
    assert [one["seed"] for one in engine.asked] == [None, -2]
