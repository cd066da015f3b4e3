"""What requests may say: JSON answers, penalties, and an error in OpenAI's form for all that is not supported."""

from __future__ import annotations

import json
import threading

import httpx
import openai
import pytest
import torch
from http_server import live, wait_for
from openai.types.chat.completion_create_params import CompletionCreateParamsBase
from prometheus_client.parser import text_string_to_metric_families

from medusa_decoding.chat.template import ChatTemplate
from medusa_decoding.serving.engine import Engine

jsonschema_rs = pytest.importorskip("jsonschema_rs")

QUESTION = "Write a class Job with name: str and priority: int that is sorted by priority."
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": QUESTION}]
BASE = {
    CHAT: {"model": "demo", "messages": MESSAGES, "max_tokens": 4},
    TEXT: {"model": "demo", "prompt": "a", "max_tokens": 4},
}
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["ada", "bob"]}, "sure": {"type": "boolean"}},
    "required": ["name", "sure"],
    "additionalProperties": False,
}


def tool(name, parameters=None, **fields):
    """The definition of a function."""
    given = {} if parameters is None else {"parameters": parameters}
    return {"type": "function", "function": {"name": name, **given, **fields}}


def post(server, path, **fields):
    content = json.dumps({**BASE.get(path, {}), **fields})  # escapes what UTF-8 cannot write
    return httpx.post(server.url + path, content=content, headers={"Content-Type": "application/json"}, timeout=60)


def refused(response, status=400):
    """Check the form of an error, and return it."""
    assert response.status_code == status, response.text
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert isinstance(body["error"]["message"], str)
    assert "Traceback" not in response.text
    return body["error"]


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (CHAT, {"frobnicate": 1}, "frobnicate"),
        (CHAT, {"functions": [{"name": "f"}]}, "functions"),
        (CHAT, {"modalities": ["audio"]}, "modalities[0]"),
        (CHAT, {"tool_choice": "required"}, "tool_choice"),
        (CHAT, {"tools": [tool("f")], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice"),
        (CHAT, {"tools": [tool("f", {"type": "banana"}, strict=True)]}, "tools"),
        (CHAT, {"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools[0].type"),
        (CHAT, {"messages": []}, "messages"),
        (CHAT, {"messages": [{"role": "user"}]}, "messages[0].content"),
        (
            CHAT,
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///etc"}}]}]},
            "messages[0].content[0].type",
        ),
        (CHAT, {"messages": [{"role": "user", "content": "\ud800"}]}, "messages"),
        (CHAT, {"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        (CHAT, {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        (CHAT, {"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (
            CHAT,
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "nothing"}}}},
            "response_format",
        ),
        (CHAT, {"max_completion_tokens": 5}, "max_tokens"),
        (CHAT, {"min_tokens": 2, "response_format": {"type": "json_object"}}, "min_tokens"),
        (CHAT, {"min_tokens": 2, "acceptance": "typical"}, "min_tokens"),
        (CHAT, {"stop_token_ids": [99999]}, "stop_token_ids"),
        (CHAT, {"skip_special_tokens": False}, "skip_special_tokens"),
        (CHAT, {"temperature": 2.5}, "temperature"),
        (CHAT, {"temperature": "1"}, "temperature"),
        (CHAT, {"n": 17}, "n"),
        (CHAT, {"seed": 2**70}, "seed"),
        (CHAT, {"stop": ["a"] * 65}, "stop"),
        (CHAT, {"logit_bias": {"99999": 1}}, "logit_bias"),
        (CHAT, {"logit_bias": {"1": 101}}, "logit_bias.1"),
        (CHAT, {"stream": True, "stream_options": {"other": 1}}, "stream_options.other"),
        (CHAT, {"tree": [[0], [40]]}, "tree"),
        (CHAT, {"tree": [[0]] * 300}, "tree"),
        (CHAT, {"posterior_alpha": 0.5}, "posterior_alpha"),
        (CHAT, {"acceptance": "typical", "temperature": 0}, "temperature"),
        (TEXT, {"best_of": 2}, "best_of"),
        (TEXT, {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        (TEXT, {"prompt": []}, "prompt"),
        (TEXT, {"prompt": ""}, "prompt"),
        (TEXT, {"prompt": [1, -1]}, "prompt[1]"),
        (TEXT, {"prompt": [1, 5000]}, "prompt"),
        (TEXT, {"prompt": ["a"] * 129}, "prompt"),
        (TEXT, {"prompt": ["a"] * 7, "n": 3}, "n"),  # 4 slots and 16 places in the queue
    ],
)  # fmt: skip
def test_what_is_not_supported_is_an_error_that_names_it(server, path, fields, param):
    error = refused(post(server, path, **fields))
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"
    assert error["message"].startswith(param.split("[")[0].split(".")[0])


def test_more_scores_of_prompts_than_an_answer_can_have_are_refused(server, monkeypatch):
    monkeypatch.setattr("medusa_decoding.serving.http.plan.SCORES", 80)
    error = refused(post(server, TEXT, prompt=[[1] * 10] * 2, n=2, prompt_logprobs=2))
    assert error["message"] == "prompt_logprobs: expected at most 80 numbers for all prompts, got 120"
    assert post(server, TEXT, prompt=[[1] * 10] * 2, n=2, prompt_logprobs=1).status_code == 200


def test_tokens_are_those_that_prompts_run_as(server, encoder, tokenizer):
    found = post(server, "/tokenize", messages=MESSAGES, return_token_strs=True).json()
    assert found["tokens"] == encoder.encode(MESSAGES)
    assert found["count"] == len(found["tokens"]) < found["max_model_len"]
    assert found["token_strs"] == tokenizer.convert_ids_to_tokens(found["tokens"])
    assert post(server, CHAT, max_tokens=1).json()["usage"]["prompt_tokens"] == found["count"]
    closed = post(server, "/tokenize", messages=MESSAGES, add_generation_prompt=False).json()["tokens"]
    assert closed == encoder.tokens([encoder.render_spans(MESSAGES)[0]])[0] != found["tokens"]
    text = post(server, "/detokenize", tokens=found["tokens"]).json()["prompt"]
    assert text == encoder.render(MESSAGES)
    plain = post(server, "/tokenize", prompt="na\u00efve <|end|>").json()
    assert plain["tokens"] == tokenizer("na\u00efve <|end|>")["input_ids"]
    assert plain["token_strs"] is None
    assert post(server, "/tokenize", prompt="", add_generation_prompt=True).json()["tokens"] == []
    assert post(server, "/detokenize", tokens=[]).json()["prompt"] == ""


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": MESSAGES}, "prompt"),
        ("/tokenize", {"messages": MESSAGES, "chat_template_kwargs": {"tools": []}}, "chat_template_kwargs"),
        ("/detokenize", {"tokens": [10**6]}, "tokens"),
    ],
)
def test_bad_requests_for_tokens_are_refused(server, path, body, param):
    assert refused(post(server, path, **body))["param"] == param
    assert refused(post(server, path, **body, model="gpt-5"), 404)["code"] == "model_not_found"


def test_the_model_must_be_the_served_one(server):
    assert refused(post(server, CHAT, model="gpt-5"), 404)["code"] == "model_not_found"
    assert refused(httpx.post(server.url + CHAT, json={"messages": MESSAGES}))["param"] == "model"


@pytest.mark.parametrize(
    ("content", "headers"),
    [
        (b"{", {"Content-Type": "application/json"}),
        (b"[1]", {"Content-Type": "application/json"}),
        (b'{"model": "\xff"}', {"Content-Type": "application/json"}),
        (b'{"a":' * 65 + b"1" + b"}" * 65, {"Content-Type": "application/json"}),
        (b"[" * 100_000, {"Content-Type": "application/json"}),
        (b'{"seed": ' + b"1" * 5000 + b"}", {"Content-Type": "application/json"}),
    ],
)
def test_a_body_that_is_no_request_is_an_error(server, content, headers):
    assert refused(httpx.post(server.url + TEXT, content=content, headers=headers))["code"] == "invalid_json"


def test_names_in_errors_are_safe_text(server):
    error = refused(httpx.post(server.url + TEXT, content=b'{"model": "demo", "prompt": "a", "\\ud800\\u001b": 1}',
                               headers={"Content-Type": "application/json"}))  # fmt: skip
    assert error["param"].isprintable()
    assert "\\ud800\\x1b" in error["message"]


def test_unknown_paths_and_methods_have_openais_form(server):
    assert refused(httpx.get(server.url + "/nothing"), 404)["code"] == "unknown_url"
    assert refused(httpx.get(server.url + CHAT), 405)["code"] == "method_not_allowed"
    with pytest.raises(openai.NotFoundError):
        server.client.responses.create(model="demo", input="hello")


def test_fields_that_change_nothing_are_accepted(server):
    fields = {
        "user": "ada", "metadata": {"a": "b"}, "store": True, "service_tier": "flex", "parallel_tool_calls": True,
        "modalities": ["text"], "response_format": {"type": "text"}, "logit_bias": {}, "n": 1, "presence_penalty": 0,
        "max_completion_tokens": 4, "safety_identifier": "x", "prompt_cache_retention": "24h", "verbosity": "medium",
        "prediction": {"type": "content", "content": "x"}, "stream_options": {"include_usage": True},
        "tool_choice": "auto", "top_logprobs": 0, "stop": ["", *map(str, range(10, 60))],
        # vLLM, SGLang
        "top_k": -1, "top_p": 1, "min_p": 0.0, "repetition_penalty": 1, "min_tokens": 0, "ignore_eos": False,
        "best_of": 1, "use_beam_search": False, "length_penalty": 1.0, "early_stopping": False, "priority": 3,
        "skip_special_tokens": True, "spaces_between_special_tokens": True, "add_generation_prompt": True,
        "add_special_tokens": False, "include_stop_str_in_output": False, "echo": False, "detokenize": True,
        "stop_token_ids": [], "no_stop_trim": False, "rid": "a", "bad_words": [], "chat_template_kwargs": {},
        # llama.cpp
        "n_predict": -1, "cache_prompt": True, "id_slot": 0, "typical_p": 1.0, "mirostat": 0, "mirostat_tau": 5.0,
        "repeat_penalty": 1.0, "xtc_probability": 0, "xtc_threshold": 0.1, "dry_multiplier": 0.0, "dry_base": 1.75,
        "samplers": [], "grammar": "", "timings_per_token": False,
    }  # fmt: skip
    plain, decorated = post(server, CHAT).json(), post(server, CHAT, **fields).json()
    assert decorated.get("choices") == plain["choices"], decorated
    cached = {"role": "user", "content": [{"type": "text", "text": QUESTION, "cache_control": {"type": "ephemeral"}}]}
    assert post(server, CHAT, messages=[cached], tool_choice="none", tools=[]).json()["choices"] == plain["choices"]
    for kind in ("text", "message"):
        typed = [{**message, "type": kind} for message in MESSAGES]
        assert post(server, CHAT, messages=typed).json().get("choices") == plain["choices"]
    fields = {"n": 2, "best_of": 2, "logprobs": False, "add_special_tokens": True, "echo": False}
    assert post(server, TEXT, **fields).json()["choices"] == post(server, TEXT, n=2).json()["choices"]


def test_no_limit_and_limits_beyond_the_context_leave_what_the_context_has(demo, encoder, tokenizer):
    prompts = [tokenizer("total " * 150)["input_ids"][:count] for count in (100, 180)]
    with Engine(demo, slots=2, context=200) as engine, live(engine, encoder, max_new_tokens=90) as server:
        for most in (-1, 4096):
            body = {"model": "demo", "prompt": prompts, "logit_bias": {"0": -100}, "max_tokens": most}
            done = httpx.post(server.url + TEXT, json=body, timeout=60).json()
            assert done["usage"]["completion_tokens"] == 90 + 20  # the operator's limit, and the context's
            assert {choice["finish_reason"] for choice in done["choices"]} == {"length"}


@pytest.mark.parametrize(("path", "field"), [(CHAT, "messages"), (TEXT, "prompt")])
def test_a_prompt_beyond_the_context_is_refused_in_openais_words(server, path, field):
    text = "a b " * 2000
    error = refused(post(server, path, **{field: text if path == TEXT else [{"role": "user", "content": text}]}))
    assert (error["param"], error["code"]) == (field, "context_length_exceeded")
    assert error["message"].startswith("This model's maximum context length is 1024 tokens. However, ")


@pytest.mark.parametrize("empty", [None, "", [], {}])
def test_null_and_empty_fields_ask_for_nothing(server, empty):
    names = {*CompletionCreateParamsBase.__annotations__, "frobnicate"} - BASE[CHAT].keys()
    if empty is not None:
        names -= {"web_search_options"}  # {} is OpenAI's way to ask for a search with default options
    messages = [{**MESSAGES[0], **dict.fromkeys(("name", "refusal", "tool_calls", "frobnicate"), empty)}]
    fields = {**dict.fromkeys(names, empty), "messages": messages}
    assert post(server, CHAT, **fields).json()["choices"] == post(server, CHAT).json()["choices"]


def test_json_objects_and_schemas_are_obeyed(server):
    done = post(server, CHAT, max_tokens=200, response_format={"type": "json_schema", "json_schema": {
        "name": "person", "schema": SCHEMA, "strict": True}}).json()  # fmt: skip
    [choice] = done["choices"]
    assert choice["finish_reason"] == "stop"
    found = json.loads(choice["message"]["content"])
    assert found["name"] in ("ada", "bob")
    assert isinstance(found["sure"], bool)
    text = post(server, CHAT, max_tokens=12, response_format={"type": "json_object"}).json()["choices"][0]["message"]
    assert text["content"].lstrip().startswith("{")


@pytest.mark.parametrize("offered", [[], [{"type": "function", "function": {"name": "wait", "strict": True}}]])
def test_a_schema_may_have_unknown_keywords_unless_it_is_strict(server, offered):
    words = {"type": "array", "items": {"enum": ["ada", "bob"]}, "minItems": 1, "maxItems": 2, "uniqueItems": True}
    form = {"name": "names", "schema": {"type": "object", "properties": {"names": words}, "required": ["names"]}}

    def ask(**strict):
        form_of_answer = {"type": "json_schema", "json_schema": {**form, **strict}}
        return post(
            server, CHAT, max_tokens=100, response_format=form_of_answer, **({"tools": offered} if offered else {})
        )

    for strict in ({}, {"strict": None}, {"strict": False}):
        message = ask(**strict).json()["choices"][0]["message"]
        assert message.get("tool_calls") or set(json.loads(message["content"])["names"]) <= {"ada", "bob"}
    error = ask(strict=True).json()["error"]
    assert error["param"] == "response_format"
    assert "uniqueItems" in error["message"]


MOVE = {
    "type": "object",
    "properties": {"to": {"$ref": "#/$defs/place"}, "steps": {"type": "integer", "minimum": 1, "maximum": 99}},
    "required": ["to", "steps"],
    "$defs": {"place": {"enum": ["north", "south"]}},
}
STAY = {"type": "object", "properties": {"until": {"type": "string", "maxLength": 6}}, "required": ["until"]}
TOOLS = [tool("move", MOVE), tool("stay.here", STAY), tool("jump")]


@pytest.mark.parametrize(
    ("choice", "names", "most", "tagged"),
    [
        ("required", {"move", "stay.here", "jump"}, 99, True),
        ({"type": "function", "function": {"name": "move"}}, {"move"}, 1, False),
        (
            {
                "type": "allowed_tools",
                "allowed_tools": {
                    "mode": "required",
                    "tools": [{"type": "function", "function": {"name": "stay.here"}}],
                },
            },
            {"stay.here"},
            99,
            True,
        ),
    ],
    ids=["required", "named", "allowed"],
)
def test_a_call_that_must_come_obeys_its_schema(server, demo_engine, tokenizer, tmp_path, choice, names, most, tagged):
    """The demo model has learnt no calls. Its template knows no tools; a copy says how calls are written."""
    (tmp_path / "tagged.jinja").write_text("{# Calls: <tool_call> #}{{ tools | tojson }}" + tokenizer.chat_template)
    template = ChatTemplate(tokenizer, str(tmp_path / "tagged.jinja")) if tagged else ChatTemplate(tokenizer)
    fields = {"tools": TOOLS, "tool_choice": choice, "n": 2, "temperature": 1.0, "seed": 4, "max_tokens": 600}
    with live(demo_engine, template) as served:

        def ask(**more):
            return served.client.chat.completions.create(model="demo", messages=MESSAGES, **fields, **more)

        done = ask()
        plain = ask(extra_body={"tree": "plain"})
        single = ask(parallel_tool_calls=False)
        chunks = [chunk.choices[0] for chunk in ask(stream=True)]
    texts = []
    for choice_ in [*done.choices, *single.choices]:
        assert choice_.finish_reason == "tool_calls"
        assert choice_.message.content is None
        for call in choice_.message.tool_calls:
            assert call.function.name in names
            arguments = json.loads(call.function.arguments)
            schema = {"move": MOVE, "stay.here": STAY, "jump": {"maxProperties": 0}}[call.function.name]
            assert jsonschema_rs.is_valid(schema, arguments)
        texts.append([(call.function.name, call.function.arguments) for call in choice_.message.tool_calls])
    assert all(len(calls) <= most for calls in texts)
    assert all(len(calls) == 1 for calls in texts[2:])
    assert [
        [(c.function.name, c.function.arguments) for c in one.message.tool_calls] for one in plain.choices
    ] == texts[:2]
    streamed = [[], []]
    for chunk in chunks:
        assert not chunk.delta.content
        streamed[chunk.index] += [
            (call.function.name, call.function.arguments) for call in chunk.delta.tool_calls or ()
        ]
    assert streamed == texts[:2]


def test_an_answer_without_calls_is_the_same_with_strict_tools(server):
    def text(**function):
        done = post(server, CHAT, tools=[tool("move", MOVE, strict=True, **function)], max_tokens=60)
        return done.json()["choices"][0]["message"]

    free = post(server, CHAT, tools=[tool("move", MOVE, strict=False)], max_tokens=60).json()["choices"][0]["message"]
    assert free["content"]
    assert text() == free


def test_bias_and_penalties_are_those_of_the_formula(server, demo, tokenizer, encoder):
    class Formula:
        def __init__(self, start):
            self.start = start

        def __call__(self, ids, scores):
            counts = torch.bincount(ids[0, self.start :], minlength=scores.shape[1])
            scores = scores - 1.5 * counts - 0.5 * (counts > 0)
            scores[:, 100:200] += 3
            return scores

    messages = [{"role": "user", "content": "Tell me about numbers."}]
    prompt = encoder.encode(messages)
    plain = demo.generate(torch.tensor([prompt]), max_new_tokens=24).sequences
    wanted = demo.generate(
        torch.tensor([prompt]), max_new_tokens=24, logits_processor=[Formula(len(prompt))]
    ).sequences  # fmt: skip
    assert wanted.tolist() != plain.tolist()
    fields = {"frequency_penalty": 1.5, "presence_penalty": 0.5, "logit_bias": {str(n): 3 for n in range(100, 200)}}
    text = post(server, CHAT, max_tokens=24, messages=messages, **fields).json()["choices"][0]["message"]["content"]
    assert text == tokenizer.decode(wanted[0, len(prompt) :], skip_special_tokens=True)


def test_metrics_count_what_happened(server, demo_engine):
    def read():
        families = text_string_to_metric_families(httpx.get(server.url + "/metrics").text)
        return {
            (sample.name, *sorted(sample.labels.items())): sample.value for one in families for sample in one.samples
        }

    before = read()
    done = post(server, CHAT, max_tokens=24).json()
    refused(post(server, CHAT, n=0))
    after = read()

    def grown(name, **labels):
        key = (name, *sorted(labels.items()))
        return after[key] - before.get(key, 0)

    assert grown("medusa_requests_total", path=CHAT, outcome="completed") == 1
    assert grown("medusa_requests_total", path=CHAT, outcome="invalid") == 1
    assert grown("medusa_prompt_tokens_total") == done["usage"]["prompt_tokens"]
    assert grown("medusa_reused_tokens_total") == done["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert grown("medusa_new_tokens_total") == 24
    assert grown("medusa_steps_total") == done["usage"]["medusa"]["steps"]
    assert grown("medusa_accepted_draft_tokens_count") == done["usage"]["medusa"]["steps"]
    assert grown("medusa_accepted_draft_tokens_sum") == done["usage"]["medusa"]["accepted_draft_tokens"]
    assert grown("medusa_request_latency_seconds_count") == 1
    assert after["medusa_running_rows",] == after["medusa_queue_length",] == 0


def test_metrics_with_vllm_names_mean_what_vllm_means(server, demo_engine):
    def read():
        families = text_string_to_metric_families(httpx.get(server.url + "/metrics").text)
        samples = [one for family in families for one in family.samples if one.name.startswith("vllm:")]
        assert {one.labels.get("model_name", one.name) for one in samples} == {"demo", "vllm:cache_config_info"}
        extra = ("finished_reason", "position", "le")
        return {(one.name[5:], *(one.labels[key] for key in extra if key in one.labels)): one.value for one in samples}

    def grown(**fields):
        before, usage = read(), post(server, CHAT, **fields).json()["usage"]
        return usage, lambda *key: read()[key] - before.get(key, 0)

    usage, more = grown(max_tokens=24, tree=[[0], [1], [0, 0]])
    steps, lengths = usage["medusa"]["steps"], usage["medusa"]["accept_lengths"]
    assert lengths["2"]  # else the second position shows nothing
    wait_for(lambda: more("spec_decode_num_drafts_total") == steps)  # counted after the last tokens are delivered
    assert more("spec_decode_num_drafts_total") == more("inter_token_latency_seconds_count") == steps
    assert more("spec_decode_num_draft_tokens_total") == 3 * steps
    assert more("spec_decode_num_accepted_tokens_total") == usage["medusa"]["accepted_draft_tokens"]
    assert more("spec_decode_num_accepted_tokens_per_pos_total", "0") == steps - lengths.get("0", 0)
    assert more("spec_decode_num_accepted_tokens_per_pos_total", "1") == lengths["2"]
    assert more("generation_tokens_total") == 24
    assert more("prefix_cache_queries_total") == more("prompt_tokens_total") == usage["prompt_tokens"]
    assert more("request_success_total", "length") == 1
    for name in ("time_to_first_token", "e2e_request_latency", "request_queue_time"):
        assert more(f"{name}_seconds_count") == 1

    usage, more = grown(max_tokens=8, tree="plain")
    assert more("inter_token_latency_seconds_count") == usage["medusa"]["steps"] == 7
    assert more("spec_decode_num_drafts_total") == more("spec_decode_num_draft_tokens_total") == 0

    usage, more = grown(max_tokens=24, stop=["class"])  # the engine counts it as cancelled
    assert more("request_success_total", "stop") == 1
    usage, more = grown(prompt_logprobs=1)  # which looks for nothing in the cache
    assert more("prefix_cache_queries_total") == 0 < more("prompt_tokens_total")

    ended, seen = threading.Event(), []

    def deliver(choice, delta):
        seen.append((len(delta.tokens), demo_engine.stats().cached))
        if delta.finish:
            ended.set()

    demo_engine.submit([5, 6, 7], deliver, max_new_tokens=8, tree="auto")
    assert ended.wait(20)
    (_, prefilled), *steps = seen
    assert [cached for _, cached in steps] == [4 + sum(new for new, _ in steps[: n + 1]) for n in range(len(steps))]
    config = httpx.get(server.url + "/metrics").text.partition("vllm:cache_config_info{")[2]
    assert f'num_gpu_blocks="{demo_engine.context * demo_engine.stats().slots // 16}"' in config
