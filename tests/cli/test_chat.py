"""medusa chat: the answers are those of transformers with the same template, and little is prefilled twice."""

import io
import json
import re
import signal

import pytest

from medusa_decoding import MedusaModel
from medusa_decoding.chat import template
from medusa_decoding.chat.streaming import AnswerStreamer
from medusa_decoding.cli import main
from medusa_decoding.demo.checking import problem
from medusa_decoding.demo.requests import EXAMPLES, parse

QUESTIONS = ["hello", "tell me more, please!", "why?"]


def user(text):
    return {"role": "user", "content": text}


def answers(history):
    return [message["content"] for message in history if message["role"] == "assistant"]


def lines_of(out):
    return [json.loads(line) for line in out.splitlines()]


def notes(err):
    return [line for line in err.splitlines() if line.startswith("medusa: ")]


@pytest.mark.parametrize("tree", ["root", "chain:3", "cartesian:3,2", "chain:2+lookup:4"])
def test_answers_are_the_models_own(chat, talk, tree):
    expected = answers(chat.conversation(QUESTIONS, 20))
    assert len(set(expected)) == 3
    code, out, err = talk(chat, QUESTIONS, "--tree", tree, "--max-new-tokens", 20)
    assert (code, out) == (0, "".join(text + "\n" for text in expected))


def test_only_the_new_turn_is_prefilled(chat, talk):
    history = chat.conversation(QUESTIONS, 20)
    code, out, err = talk(chat, QUESTIONS, "--json", "--max-new-tokens", 20)
    assert code == 0
    held = 0
    for turn, answer in enumerate(lines_of(out)):
        prompt = chat.ids(history[: 2 * turn + 1])
        new = chat.write(prompt, 20)
        assert answer["text"] == chat.text(new)
        assert answer["metrics"]["prompt_tokens"] == len(prompt)
        assert answer["metrics"]["new_tokens"] == len(new)
        assert answer["metrics"]["reused_tokens"] == held
        held = len(prompt) + len(new) - 1  # what the last token predicts was not asked for


def test_the_models_tokens_are_reused_though_the_tokenizer_would_encode_them_differently(make_chat, talk):
    chat = make_chat(39, pairs=True)
    prompt = chat.ids([user("hello")])
    written = chat.write(prompt, 60)
    assert written[-1] == chat.end
    history = [user("hello"), {"role": "assistant", "content": chat.text(written)}, user("tell me more, please!")]
    fresh = chat.ids(history)
    assert fresh[: len(prompt) + len(written)] != prompt + written  # or this would test nothing
    following = chat.tokenizer("\n<|start|>user\ntell me more, please!<|end|>\n<|start|>assistant\n")["input_ids"]
    spliced = prompt + written + following
    assert chat.tokenizer.decode(spliced) == chat.tokenizer.decode(fresh)
    expected = chat.write(spliced, 60)

    code, out, err = talk(chat, ["hello", "tell me more, please!"], "--json", "--max-new-tokens", 60)
    first, second = lines_of(out)
    assert (first["text"], second["text"]) == (chat.text(written), chat.text(expected))
    assert second["metrics"]["prompt_tokens"] == len(spliced)
    assert second["metrics"]["reused_tokens"] == len(prompt) + len(written) - 1


def test_an_answer_ends_with_the_templates_end_of_turn(chat, talk):
    """The model's generation config names no EOS token."""
    assert chat.model.generation_config.eos_token_id is None
    ended, endless = (chat.answer([user("hello")], 60, eos_token_id=eos) for eos in ([chat.end], None))
    assert len(ended) < len(endless)
    code, out, err = talk(chat, ["hello"], "--json", "--max-new-tokens", 60)
    (answer,) = lines_of(out)
    assert (answer["text"], answer["ended"]) == (ended, "eos")


def test_the_generation_configs_eos_tokens_end_an_answer_too(chat, talk, monkeypatch):
    written = chat.write(chat.ids([user("hello")]), 60)
    place = next(i for i in range(4, len(written)) if written[i] not in written[:i])
    eos = written[place]
    assert eos != chat.end
    load = MedusaModel.from_pretrained

    def with_eos(*args, **kwargs):
        model = load(*args, **kwargs)
        model.backbone.causal_lm.generation_config.eos_token_id = [eos, 0]
        return model

    monkeypatch.setattr(MedusaModel, "from_pretrained", with_eos)
    code, out, err = talk(chat, ["hello"], "--json", "--max-new-tokens", 60)
    (answer,) = lines_of(out)
    assert answer["text"] == chat.answer([user("hello")], 60, eos_token_id=[eos, 0, chat.end])
    assert answer["metrics"]["new_tokens"] == place + 1


def test_a_system_message_comes_first(chat, talk):
    system = [{"role": "system", "content": "be brief."}]
    expected = answers(chat.conversation(QUESTIONS, 12, system))
    assert expected != answers(chat.conversation(QUESTIONS, 12))
    code, out, err = talk(chat, QUESTIONS, "--system", "be brief.", "--max-new-tokens", 12)
    assert (code, out.splitlines()) == (0, "\n".join(expected).splitlines())


# --- commands


def test_undo_clear_and_system_change_the_prompt(chat, talk):
    hello = chat.conversation(["hello"], 12)
    system = [{"role": "system", "content": "no, really."}]
    expected = [
        hello[1]["content"],
        chat.answer([*hello, user("more")], 12),
        chat.answer([*hello, user("less")], 12),
        chat.answer([user("anew")], 12),
        chat.answer([*system, *chat.conversation(["anew"], 12), user("and?")], 12),
        chat.answer([*system, user("once again")], 12),
        chat.answer([user("hello")], 12),
    ]
    lines = ["hello", "more", "/undo", "less", "/clear", "anew", "/system no, really.", "and?"]
    lines += ["/clear", "once again", "/undo", "/system", "hello"]
    code, out, err = talk(chat, lines, "--json", "--max-new-tokens", 12)
    assert code == 0
    assert [answer["text"] for answer in lines_of(out)] == expected


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("/nothing", "/nothing: expected a command, see /help"),
        ("/undo", "/undo: expected an exchange"),
        ("/save no/such/folder/file.json", "No such file or directory"),
        ("/set", "/set: expected a name and a value, .* max_new_tokens 512"),
        ("/set temperature -1", "/set temperature: expected a number from 0, got -1"),
    ],
)
def test_a_bad_command_is_one_line_and_the_chat_continues(chat, talk, line, words):
    expected = chat.answer([user("hello")], 512)
    code, out, err = talk(chat, [line, "hello"])
    assert (code, out) == (2, expected + "\n")
    assert len(notes(err)) == 1
    assert re.search(words, notes(err)[0])


# --- settings


def test_settings_change_the_next_answer(chat, talk):
    """Only the likeliest token is left to sample, at any temperature."""
    short, long = (chat.answer([user("hello")], length) for length in (5, 12))
    lines = ["/set max_new_tokens 5", "/set temperature 3", "/set top_k 1", "hello", "/undo"]
    lines += [
        "/set top_k 0",
        "/set top_p 0.001",
        "/set max_new_tokens 12",
        "hello",
        "/undo",
        "/set temperature 0",
        "hello",
    ]
    code, out, err = talk(chat, lines, "--json")
    assert code == 0
    assert [answer["text"] for answer in lines_of(out)] == [short, long, long]


def test_each_answer_is_sampled_with_a_different_seed(chat, talk, monkeypatch):
    seeds = []
    generate = MedusaModel.generate

    def recording(self, *args, **kwargs):
        seeds.append(kwargs["seed"])
        return generate(self, *args, **kwargs)

    monkeypatch.setattr(MedusaModel, "generate", recording)
    talk(chat, ["a", "b", "/undo", "c"], "--temperature", 1, "--seed", 7, "--max-new-tokens", 3)
    assert seeds == [7, 8, 8]


# --- the history and the context


def test_a_saved_chat_continues_where_it_ended(chat, talk, tmp_path):
    history = chat.conversation(QUESTIONS, 12, [{"role": "system", "content": "be brief."}])
    where = tmp_path / "talk.json"
    code, out, err = talk(chat, QUESTIONS[:2], "--system", "be brief.", "--save", where, "--max-new-tokens", 12)
    assert json.loads(where.read_text()) == {"messages": history[:5]}
    code, out, err = talk(chat, QUESTIONS[2:], "--load", where, "--save", where, "--json", "--max-new-tokens", 12)
    assert code == 0
    assert [answer["text"] for answer in lines_of(out)] == answers(history)[2:]
    assert json.loads(where.read_text()) == {"messages": history}
    assert [path.name for path in tmp_path.iterdir()] == ["talk.json"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("no JSON", "expected JSON, got"),
        ('{"talk": []}', "expected a list of messages"),
        ('[{"role": "assistant", "content": "a"}, {"role": "user", "content": "a"}]', "user and assistant in turn"),
    ],
)
def test_a_file_that_is_not_a_history_is_refused(chat, talk, tmp_path, text, words):
    (tmp_path / "talk.json").write_text(text)
    code, out, err = talk(chat, ["hello"], "--load", tmp_path / "talk.json")
    assert (code, out) == (2, "")
    assert re.search(words, notes(err)[-1])


def test_a_message_beyond_the_context_is_not_lost(make_chat, talk):
    chat = make_chat(4, context=96)
    kept = chat.conversation(["hello"], 20)
    long = "so much to say, " * 3
    needed = len(chat.ids([*kept, user(long)]))
    assert needed >= 96
    assert len(chat.ids([user(long)])) < 76
    lines = ["hello", long, "/history", "/undo", "/retry", "/history"]
    code, out, err = talk(chat, lines, "--max-new-tokens", 20)
    expected = chat.answer([user(long)], 20)
    said = [f"user: hello\nassistant: {kept[1]['content']}\n", f"user: {long}\nassistant: {expected}\n"]
    assert out == kept[1]["content"] + "\n" + said[0] + expected + "\n" + said[1]
    (note,) = (line for line in notes(err) if "context" in line)
    assert f"expected fewer than 96 tokens, got {needed} with this message" in note
    assert "/undo" in note
    assert "/clear" in note
    assert code == 2


# --- templates


def test_the_plain_template(make_chat, talk):
    chat = make_chat(template=None)
    first = chat.tokenizer("System: be brief.\n\nUser: hello\n\nAssistant:")["input_ids"]
    one = chat.text(chat.write(first, 20, eos_token_id=None))
    text = f"System: be brief.\n\nUser: hello\n\nAssistant: {one.strip()}\n\nUser: more\n\nAssistant:"
    two = chat.text(chat.write(chat.tokenizer(text)["input_ids"], 20, eos_token_id=None))
    argv = ["--template", "plain", "--system", "be brief.", "--json", "--max-new-tokens", 20]
    code, out, err = talk(chat, ["hello", "more"], *argv)
    assert [answer["text"] for answer in lines_of(out)] == [one, two]


def test_a_plain_answer_ends_before_the_next_turn(make_chat, talk, monkeypatch):
    """The text that begins the next turn here is something that the model does write."""
    chat = make_chat(template=None)
    ids = chat.tokenizer("User: hello\n\nAssistant:")["input_ids"]
    text = chat.text(chat.write(ids, 40, eos_token_id=None))
    stop = text[11:14]
    monkeypatch.setattr(template, "PLAIN_STOP", stop)
    code, out, err = talk(chat, ["hello", "/history"], "--template", "plain", "--max-new-tokens", 40)
    kept = text[: text.index(stop)]
    assert 0 < len(kept) < len(text)
    assert out == f"{kept}\nuser: hello\nassistant: {kept}\n"
    assert notes(err) == []


def test_without_a_model_the_demo_model_chats(monkeypatch, capsys):
    request = parse(EXAMPLES[1])
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{request.text}\n"))
    assert main(["chat", "--json"]) == 0
    (answer,) = lines_of(capsys.readouterr().out)
    assert problem(request, answer["text"]) is None


# --- errors and interruptions


@pytest.mark.parametrize("error", [MemoryError, ValueError])
def test_an_error_leaves_the_history_unchanged(chat, talk, monkeypatch, error):
    expected = chat.conversation(["hello", "more"], 12)
    generate, calls = MedusaModel.generate, []

    def failing(self, *args, **kwargs):
        calls.append(1)
        if len(calls) != 2:
            return generate(self, *args, **kwargs)
        kwargs["stopping_criteria"] = [*kwargs["stopping_criteria"], fail]
        return generate(self, *args, **kwargs)

    def fail(ids, scores):
        raise error("out of\nsomething")

    monkeypatch.setattr(MedusaModel, "generate", failing)
    code, out, err = talk(chat, ["hello", "what?", "more"], "--json", "--max-new-tokens", 12)
    assert [answer["text"] for answer in lines_of(out)] == answers(expected)
    assert notes(err)[-1] == "medusa: out of something"
    assert code == 2


@pytest.fixture
def ctrl_c(monkeypatch):
    """Press Ctrl-C when a token has been streamed: `ctrl_c(3)` after the third, `ctrl_c(3, times=2)` twice."""
    before = signal.getsignal(signal.SIGINT)

    def arrange(count, times=1):
        put, seen = AnswerStreamer.put, []

        def pressing(self, value):
            put(self, value)
            seen.append(value)
            if len(seen) == count + 1:  # the prompt came first
                for _ in range(times):
                    signal.raise_signal(signal.SIGINT)

        monkeypatch.setattr(AnswerStreamer, "put", pressing)

    yield arrange
    assert signal.getsignal(signal.SIGINT) is before


def test_ctrl_c_keeps_the_partial_answer(chat, talk, ctrl_c, tmp_path):
    """One more token than was streamed; a step of plain decoding is one token."""
    ctrl_c(3)
    partial = chat.answer([user("hello")], 4)
    assert partial != chat.answer([user("hello")], 5)
    told = [user("hello"), {"role": "assistant", "content": partial}, user("more")]
    where = tmp_path / "talk.json"
    lines = ["hello", "more", "/history"]
    code, out, err = talk(chat, lines, "--tree", "root", "--save", where, "--max-new-tokens", 20)
    answer = chat.answer(told, 20)
    said = f"user: hello\nassistant: {partial} [interrupted]\nuser: more\nassistant: {answer}\n"
    assert (code, out) == (0, f"{partial}\n{answer}\n{said}")
    assert "interrupted" in notes(err)[0]
    history = json.loads(where.read_text())["messages"]
    assert [message.get("interrupted") for message in history] == [None, True, None, None]


def test_an_interrupted_answers_cache_is_reused(chat, talk, ctrl_c):
    ctrl_c(3)
    prompt = chat.ids([user("hello")])
    reused = len(prompt) + 4 - 1
    told = [user("hello"), {"role": "assistant", "content": chat.answer([user("hello")], 4)}, user("more")]
    code, out, err = talk(chat, ["hello", "more", "/stats"], "--tree", "root", "--max-new-tokens", 20)
    assert f"({len(chat.ids(told))} prompt tokens, {reused} of them reused from the cache)" in out


def test_a_second_ctrl_c_interrupts_at_once(chat, talk, ctrl_c):
    ctrl_c(3, times=2)
    code, out, err = talk(chat, ["hello", "more"], "--tree", "root", "--max-new-tokens", 20)
    assert code == 130
    assert notes(err)[-1] == "medusa: interrupted"
    assert out.strip() == chat.answer([user("hello")], 3)
