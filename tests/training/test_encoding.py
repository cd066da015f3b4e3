"""Chat templates to tokens: exactly the assistant's tokens are learnt, with any template and tokenizer."""

from pathlib import Path

import numpy as np
import pytest
import toy
from toy import CHATML, INST, SPACED, THINKING, chat, marked, unmarked

from medusa_decoding.chat.template import ChatTemplate, prompt_encoder
from medusa_decoding.training.config import GenerationConfig
from medusa_decoding.training.data.encoding import ChatEncoder, encode_records
from medusa_decoding.training.data.records import BadRecordError, Record, Report, parse_record
from medusa_decoding.training.distill.seeds import Seed

SINGLE = chat("How are you?", "I am fine, thank you.")
SEVERAL = chat("Hello", " Hello! 東京\n", "Count to three.", "one two three", "Häuser?", "naïve  </think> Paris.")
WITH_SYSTEM = chat("Hello there", "Hello.", "And?", "Paris", system="You are an assistant.")


def record(messages, where="a:1"):
    return Record(tuple(messages), None, where)


def runs(example):
    """The learnt tokens as lists of consecutive ids."""
    found, previous = [], False
    for token, learnt in zip(example.ids.tolist(), example.learnt.tolist(), strict=True):
        if learnt and not previous:
            found.append([])
        if learnt:
            found[-1].append(token)
        previous = learnt
    return found


@pytest.mark.parametrize("kind", ["bytes", "marks"])
@pytest.mark.parametrize("messages", [SEVERAL, WITH_SYSTEM], ids=["several", "system"])
@pytest.mark.parametrize("way", [marked, unmarked])
def test_only_answers_and_their_end_tokens_are_learnt(kind, messages, way):
    tokenizer = toy.tokenizer(kind, way(CHATML), eos_token="<|im_end|>")
    (example,) = ChatEncoder(tokenizer).encode(record(messages))
    expected = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True)["input_ids"]
    assert example.ids.tolist() == expected
    assert example.ids.dtype == np.int32
    assert example.learnt.dtype == bool
    answers = [message["content"] + "<|im_end|>" for message in messages if message["role"] == "assistant"]
    assert [toy.spelt(tokenizer, run) for run in runs(example)] == answers


@pytest.mark.parametrize("template", [CHATML, INST, SPACED])
def test_generation_markers_prefixes_and_transformers_agree(template):
    messages = [{**message, "content": message["content"].strip()} for message in SEVERAL]
    with_markers = toy.tokenizer("bytes", marked(template))
    (one,) = ChatEncoder(with_markers).encode(record(messages))
    (two,) = ChatEncoder(toy.tokenizer("bytes", unmarked(template))).encode(record(messages))
    theirs = with_markers.apply_chat_template(
        messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    assert one.ids.tolist() == two.ids.tolist() == theirs["input_ids"]
    assert one.learnt.tolist() == two.learnt.tolist() == [bool(x) for x in theirs["assistant_masks"]]
    assert 0 < one.learnt.sum() < len(one.ids)


@pytest.mark.parametrize("way", [marked, unmarked])
@pytest.mark.parametrize("turns", ["joint", "each"])
def test_answers_of_weight_0_are_in_the_text_and_not_learnt(way, turns):
    tokenizer = toy.tokenizer("bytes", way(CHATML))
    messages = chat("Hello", "Hello!", "And?", "Paris", "Why?", "thank you.")
    plain = ChatEncoder(tokenizer).encode(record(messages))[0].ids.tolist()
    weighted = [turn | {"weight": 0} if turn["content"] in ("Paris", "thank you.") else turn for turn in messages]
    encoder = ChatEncoder(tokenizer, turns=turns)
    (example,) = encoder.encode(record(weighted))
    assert [tokenizer.decode(run) for run in runs(example)] == ["Hello!<|im_end|>"]
    assert example.ids.tolist() == (plain if turns == "joint" else plain[: len(example.ids)])
    (nothing,) = encoder.encode(record([turn | {"weight": 0} for turn in messages]))
    assert not nothing.learnt.any()
    kept = [turn | {"weight": 0} if turn["content"] in ("Hello!", "Paris") else turn for turn in messages]
    (last,) = encoder.encode(record(kept))
    assert [tokenizer.decode(run) for run in runs(last)] == ["thank you.<|im_end|>"]
    assert last.ids.tolist() == plain


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning"])
def test_the_reasoning_of_an_answer_is_learnt(key):
    template = CHATML.replace("GENERATION{{- ", "GENERATION{{- '<think>' + message.reasoning_content + '</think>' + ")
    tokenizer = toy.tokenizer("bytes", marked(template), eos_token="<|im_end|>")
    (question, answer) = SINGLE
    given = parse_record({"messages": [question, answer | {key: "How am I?"}]}, "a:1")
    (example,) = ChatEncoder(tokenizer).encode(given)
    (learnt,) = runs(example)
    assert toy.spelt(tokenizer, learnt) == "<think>How am I?</think>I am fine, thank you.<|im_end|>"


def test_tools_and_calls_are_in_the_text_or_it_is_said(caplog):
    tool = {"type": "function", "function": {"name": "count", "parameters": {}}}
    calls = [{"function": {"name": "count", "arguments": {"to": 3}}}]
    call = {"role": "assistant", "content": None, "tool_calls": calls}
    messages = [*chat("Count to three."), call, {"role": "tool", "content": "one two three"}, *chat("And?", "Hello")]
    asked = Record(tuple(messages), None, "a:1", tools=(tool,))
    with_tools = "{%- if tools -%}{{- tools[0].function.name + '\\n' -}}{%- endif -%}" + CHATML.replace(
        "message.content", "(message.content or message.tool_calls | tojson)"
    )
    tokenizer = toy.tokenizer("bytes", unmarked(with_tools))
    (example,) = ChatEncoder(tokenizer).encode(asked)
    rendered = tokenizer.apply_chat_template(messages, tools=[tool], tokenize=False)
    assert example.ids.tolist() == tokenizer(rendered, add_special_tokens=False)["input_ids"]
    said = [tokenizer.decode(run) for run in runs(example)]
    assert said == ['[{"function": {"name": "count", "arguments": {"to": 3}}}]<|im_end|>', "Hello<|im_end|>"]
    assert not caplog.text
    # Templates without a place for them.
    silent = ChatEncoder(toy.tokenizer("bytes", unmarked(CHATML.replace("message.content", "(message.content or '')"))))
    with pytest.raises(BadRecordError, match="the chat template leaves out tool calls"):
        silent.encode(asked)
    for _ in range(2):
        silent.encode(Record(tuple(SINGLE), None, "a:2", tools=(tool,)))
    assert caplog.text.count("prompts leave out their tools") == 1


def test_a_token_across_prompt_and_answer_belongs_to_the_answer():
    tokenizer = toy.tokenizer("bytes", unmarked(SPACED))
    messages = chat("Count to three.", "one two")
    (example,) = ChatEncoder(tokenizer).encode(record(messages))
    before = tokenizer.encode("Question: Count to three. Answer: ")
    first = int(example.learnt.argmax())
    # The case is not trivial: the prompt's last space is a separate token only if nothing follows it.
    assert example.ids[: len(before)].tolist() != before
    assert first == len(before) - 1
    assert tokenizer.decode(example.ids[first:]) == " one two</s>"


def test_white_space_after_the_end_of_a_turn_is_not_learnt_but_text_is():
    tokenizer = toy.tokenizer("bytes", unmarked(CHATML))
    (example,) = ChatEncoder(tokenizer).encode(record(SINGLE))
    assert tokenizer.decode(example.ids[-2:]) == "<|im_end|>\n"
    assert example.learnt[-2:].tolist() == [True, False]
    # A template without an end token: the answer's line break ends it.
    lines = "{%- for m in messages -%}{{- m.role + ': ' + m.content + '\\n' -}}{%- endfor -%}"
    lines += "{%- if add_generation_prompt -%}{{- 'assistant:' -}}{%- endif -%}"
    tokenizer.chat_template = lines
    (example,) = ChatEncoder(tokenizer).encode(record(SINGLE))
    assert tokenizer.decode(example.ids[example.learnt]) == " I am fine, thank you.\n"


VICUNA = (
    "A chat between a curious user and an artificial intelligence assistant. The assistant gives helpful, detailed, "
    "and polite answers to the user's questions."
)


@pytest.mark.parametrize(("system", "written"), [(None, VICUNA), ("A chat.", "A chat.")], ids=["default", "own"])
@pytest.mark.parametrize("kind", ["bytes", "marks"])
def test_vicuna_template(kind, system, written):
    tokenizer = toy.tokenizer(kind)
    messages = chat("How are you?", "I am fine.", "Hello", "Hello!", system=system)
    (example,) = ChatEncoder(tokenizer, "vicuna").encode(record(messages))
    text = f"{written} USER: How are you? ASSISTANT: I am fine.</s>USER: Hello ASSISTANT: Hello!</s>"
    assert example.ids.tolist() == tokenizer(text)["input_ids"]
    assert (example.ids[0] == tokenizer.bos_token_id) == (kind == "marks")
    assert [toy.spelt(tokenizer, run) for run in runs(example)] == [" I am fine.</s>", " Hello!</s>"]
    prompt = tokenizer(f"{written} USER: How are you? ASSISTANT:")["input_ids"]
    assert int(example.learnt.argmax()) == len(prompt)
    assert example.ids[: len(prompt)].tolist() == prompt


@pytest.mark.parametrize("system", [None, "You are an assistant."])
@pytest.mark.parametrize(
    ("kind", "name"), [("bytes", "vicuna"), ("marks", "vicuna"), ("bytes", "auto"), ("bytes", "file")]
)
def test_training_distillation_and_decoding_make_the_same_prompts(kind, name, system, tmp_path):
    """The heads learn from the same prompts that `chat`, `eval`, `calibrate` and `distill` make."""
    tokenizer = toy.tokenizer(kind, unmarked(CHATML) if name == "auto" else None)
    if name == "file":
        name = str(tmp_path / "own.jinja")
        Path(name).write_text(marked(CHATML))
    asked = None if name == "auto" else name
    messages = chat("How are you?", "I am fine.", "Hello", "Hello!", system=system)
    encoder = ChatEncoder(tokenizer, name)
    (example,) = encoder.encode(record(messages))
    for end in (len(messages) - 3, len(messages) - 1):
        prompt = ChatTemplate(tokenizer, asked).encode(messages[:end])
        assert prompt == prompt_encoder(tokenizer, asked, []).encode(messages[:end])
        assert prompt == encoder.prompt(messages[:end])[1]
        assert prompt == example.ids[: len(prompt)].tolist()
        assert example.learnt[len(prompt)]
        assert not example.learnt[len(prompt) - 1]
    seed = Seed(0, record(messages), encoder, GenerationConfig(), 512)
    assert seed.prompt == ChatTemplate(tokenizer, asked).encode(messages[:-3])


def test_a_template_that_changes_earlier_turns_is_refused_with_the_remedy():
    tokenizer = toy.tokenizer("bytes", THINKING)
    # One turn is consistent; of several, the first is rendered differently once it is not the last.
    (example,) = ChatEncoder(tokenizer).encode(record(SINGLE))
    assert tokenizer.decode(example.ids[example.learnt]) == "<think>\n\n</think>\n\nI am fine, thank you.<|im_end|>"
    with pytest.raises(ValueError, match=r"turn 2 of chat.jsonl:7 .*instead of '<think>.*; use turns='each'"):
        ChatEncoder(tokenizer).encode(record(SEVERAL, "chat.jsonl:7"))
    examples = ChatEncoder(tokenizer, turns="each").encode(record(SEVERAL))
    assert len(examples) == 3
    for number, example in enumerate(examples):
        messages = SEVERAL[: 2 * number + 2]
        expected = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True)["input_ids"]
        assert example.ids.tolist() == expected
        answer = f"<think>\n\n</think>\n\n{messages[-1]['content']}<|im_end|>"
        assert [tokenizer.decode(run) for run in runs(example)] == [answer]


def test_a_template_whose_answer_does_not_follow_its_prompt_is_refused():
    template = CHATML.replace("'<|im_start|>assistant\\n' -}}{%- endif", "'<|im_start|>bot\\n' -}}{%- endif")
    with pytest.raises(ValueError, match="turn 2 of a:1 to follow the generation prompt, got 'assistant"):
        ChatEncoder(toy.tokenizer("bytes", unmarked(template))).encode(record(SINGLE))


def test_empty_generation_markers_are_refused():
    template = marked(CHATML).replace("message.role == 'assistant'", "message.role == 'nobody'")
    with pytest.raises(ValueError, match=r"no \{% generation %\} block around the answers of a:1"):
        ChatEncoder(toy.tokenizer("bytes", template)).encode(record(SINGLE))


def test_a_conversation_that_the_template_refuses_is_a_bad_record():
    encoder = ChatEncoder(toy.tokenizer("bytes", marked(INST)))
    report = Report(read=2)
    records = [record(WITH_SYSTEM, "a:1"), record(SINGLE, "a:2")]
    assert [example.where for example in encode_records(records, encoder, report)] == ["a:2"]
    assert report.examples == [("a:1", "the chat template refuses it (no system messages here)")]
    with pytest.raises(BadRecordError, match="turns take turns"):
        ChatEncoder(toy.tokenizer(), "vicuna").encode(record([*SINGLE, *chat("a", "b")[1:]]))


def test_template_arguments_and_files(tmp_path):
    template = CHATML.replace("'assistant\\n'", "'assistant\\n' + mood")
    file = tmp_path / "own.jinja"
    file.write_text(marked("{{- mood -}}" + template))
    (example,) = ChatEncoder(toy.tokenizer(), str(file), arguments={"mood": "fine"}).encode(record(SINGLE))
    assert toy.tokenizer().decode(example.ids).startswith("fine<|im_start|>user")


@pytest.mark.parametrize("kind", ["bytes", "marks"])
def test_a_text_is_learnt_entirely_with_an_end_token(kind):
    tokenizer = toy.tokenizer(kind)
    (example,) = ChatEncoder(tokenizer, "plain").encode(Record((), "Hello there", "a.txt"))
    assert example.ids.tolist() == [*tokenizer("Hello there")["input_ids"], tokenizer.eos_token_id]
    assert example.learnt.all()
    assert example.is_text


def test_an_unknown_template_is_named():
    with pytest.raises(ValueError, match="template: expected vicuna, plain or a Jinja file, got chatml"):
        ChatEncoder(toy.tokenizer(), "chatml")


@pytest.mark.parametrize("kind", ["bytes", "marks"])
@pytest.mark.parametrize("special", [{}, {"eos_token": None}], ids=["end", "no end"])
def test_without_a_template_a_prompt_is_bare_text_as_in_serving(kind, special):
    tokenizer = toy.tokenizer(kind, **special)
    encoder = ChatEncoder(tokenizer)
    (example,) = encoder.encode(record(chat("Hello there", "Paris")))
    asked = prompt_encoder(tokenizer, None, ()).encode([{"role": "user", "content": "Hello there"}])
    learnt = example.ids[example.learnt].tolist()
    assert example.ids[~example.learnt].tolist() == asked
    assert encoder.prompt([{"role": "user", "content": "Hello there"}])[1] == asked
    assert toy.spelt(tokenizer, learnt) == "Paris" + (tokenizer.eos_token or "")
    (text,) = encoder.encode(Record((), "Hello there", "a.txt"))
    assert text.learnt.all()


def test_without_a_template_several_turns_are_refused():
    report = Report(read=1)
    several = record(chat("Hello", "Paris", "And?", "Hello"))
    assert list(encode_records([several], ChatEncoder(toy.tokenizer()), report)) == []
    assert "several turns, and the tokenizer has no chat template: set data.template" in report.examples[0][1]


def test_a_template_that_needs_an_end_token_says_so():
    with pytest.raises(ValueError, match="expected a tokenizer with an end token for 'plain'"):
        ChatEncoder(toy.tokenizer(eos_token=None), "plain")
