"""medusa generate --prompts: each line is the model's own text, whatever happens to the run in between."""

import json
import re

import pytest
import torch
from transformers import AutoTokenizer

from medusa_decoding import MedusaModel, Tree
from medusa_decoding.chat.streaming import AnswerText
from medusa_decoding.cli import main
from medusa_decoding.serving import answers
from medusa_decoding.serving.ticket import Delta, Ticket

NEW = 24
TEXTS = [
    "def f(x):\n",
    "class A",
    "import os, sys",
    "x",
    "while True:",
    "for line in file:",
    "a = [1, 2]",
    "print('a')",
]
RECORDS = [
    {"prompt": TEXTS[0]},
    {"text": TEXTS[1]},
    {"messages": [{"role": "user", "content": TEXTS[2]}, {"role": "assistant", "content": "never read"}]},
    {"conversations": [{"from": "human", "value": TEXTS[3]}, {"from": "gpt", "value": "never read"}]},
    {"turns": [TEXTS[4], "never asked"]},
    {"instruction": TEXTS[5], "output": "never read"},
    {"question": TEXTS[6], "answer": "never read"},
    {"prompt": TEXTS[7], "text": "the whole text, whose beginning is the prompt"},
]


@pytest.fixture
def prompts(write_lines):
    return write_lines("prompts.jsonl", *RECORDS)


@pytest.fixture
def run(checkpoint, prompts, tmp_path, capsys):
    """Run the command; return its figures and its lines in the order of the prompts."""

    def call(*argv, out="out.jsonl", heads=None, code=0):
        argv = ["generate", "--model", heads or checkpoint / "heads", "--prompts", prompts, "--out", tmp_path / out,
                "--max-new-tokens", NEW, "--json", *argv]  # fmt: skip
        assert main([str(word) for word in argv]) == code
        captured = capsys.readouterr()
        if code:
            assert captured.out == ""
            (line,) = [line for line in captured.err.splitlines() if line.startswith("medusa: ")]
            return line
        return json.loads(captured.out), lines_of(tmp_path / out)

    return call


def lines_of(file):
    return sorted((json.loads(line) for line in file.read_text().splitlines()), key=lambda line: line["index"])


def alone(checkpoint, seed=None, **settings):
    """Each text's new tokens, and their text, as `MedusaModel.generate` alone writes them."""
    tokenizer = AutoTokenizer.from_pretrained(checkpoint / "base")
    found = []
    with MedusaModel.from_pretrained(checkpoint / "heads", dtype="float32", tree=Tree([])) as model:
        for index, text in enumerate(TEXTS):
            ids = torch.tensor([tokenizer(text)["input_ids"]])
            own = {} if seed is None else {"seed": seed + index}
            output = model.generate(ids, max_new_tokens=NEW, tokenizer=tokenizer, **own, **settings)
            found.append((output.new_tokens[0], tokenizer.decode(output.sequences[0, ids.shape[1] :])))
    return found


def of(lines):
    return [(line["new_tokens"], line["response"]) for line in lines]


@pytest.mark.parametrize(("slots", "tree"), [(1, "auto"), (3, "cartesian:3,2"), (20, "root")])
def test_every_line_is_the_text_of_its_prompt_alone(run, checkpoint, prompts, slots, tree):
    figures, lines = run("--slots", slots, "--tree", tree)
    assert of(lines) == alone(checkpoint)
    assert [line["index"] for line in lines] == list(range(len(TEXTS)))
    assert [line["prompt"] for line in lines] == TEXTS
    assert [line["source"] for line in lines] == [f"{prompts}:{number}" for number in range(1, len(TEXTS) + 1)]
    assert {line["finish"] for line in lines} <= {"stop", "length"}
    assert (figures["prompts"], figures["earlier"]) == (len(TEXTS), 0)
    assert figures["new_tokens"] == sum(line["new_tokens"] for line in lines)
    steps = sum(line["steps"] for line in lines)
    assert figures["tokens_per_step"] == pytest.approx((figures["new_tokens"] - len(lines)) / steps)
    assert figures["tokens_per_second"] == pytest.approx(figures["new_tokens"] / figures["seconds"])


def test_sampling_gives_each_prompt_a_seed_of_its_own(run, checkpoint):
    argv = ["--temperature", 1.2, "--top-k", 40]
    _, lines = run(*argv, "--seed", 7)
    assert of(lines) == alone(checkpoint, seed=7, do_sample=True, temperature=1.2, top_k=40)
    assert of(run(*argv, out="default.jsonl")[1]) == alone(checkpoint, 0, do_sample=True, temperature=1.2, top_k=40)


def test_answers_end_after_a_stop_string_as_alone(run, checkpoint):
    greedy = "\n".join(text for _, text in alone(checkpoint))
    stops = [re.findall(r"[!-~]{2}", greedy)[0], re.findall(r"[A-Z]", greedy)[-1]]
    expected = alone(checkpoint, stop_strings=stops)
    assert expected != alone(checkpoint)
    _, lines = run("--stop", stops[0], "--stop", stops[1], "--tree", "chain:3")
    assert of(lines) == expected
    assert [line["finish"] for line in lines if line["new_tokens"] < NEW] == ["stop"] * sum(
        n < NEW for n, _ in expected
    )


def test_chat_applies_the_template_to_the_first_user_turn(chat, write_lines, run):
    messages = [[{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}],
                [{"role": "user", "content": "more"}, {"role": "assistant", "content": "never read"}]]  # fmt: skip
    write_lines("prompts.jsonl", *({"messages": turns} for turns in messages))
    _, lines = run("--chat", heads=chat.heads)
    assert [line["response"] for line in lines] == [
        chat.answer(messages[0], NEW), chat.answer(messages[1][:1], NEW)
    ]  # fmt: skip
    assert "--chat with a system message" in run(heads=chat.heads, out="b.jsonl", code=2)


# --- resuming


@pytest.mark.parametrize("settings", [[], ["--temperature", "0.8", "--seed", "5"]], ids=["greedy", "sampled"])
def test_a_half_written_line_is_made_again(run, tmp_path, settings):
    _, whole = run(*settings)
    out = tmp_path / "out.jsonl"
    kept = out.read_bytes().splitlines(keepends=True)
    out.write_bytes(b"".join(kept[:3]) + kept[3][:20])
    figures, lines = run("--resume", "--slots", 2, "--tree", "chain:2", *settings)
    assert [without_steps(line) for line in lines] == [without_steps(line) for line in whole]
    assert figures["earlier"] == 3
    assert figures["new_tokens"] == sum(json.loads(line)["new_tokens"] for line in kept[3:])


def without_steps(line):
    return {name: value for name, value in line.items() if name != "steps"}


@pytest.mark.parametrize(
    ("argv", "name"),
    [
        (["--temperature", "0.5"], "sampling|seed"),
        (["--stop", "x"], "stop"),
        (["--dtype", "bfloat16"], "model"),
    ],
)
def test_other_settings_are_refused(run, tmp_path, argv, name):
    run()
    before = (tmp_path / "out.jsonl").read_bytes()
    line = run("--resume", *argv, code=2)
    assert re.match(rf"medusa: ({name}): expected .* like the records that are there .*, got ", line)
    assert (tmp_path / "out.jsonl").read_bytes() == before


def test_a_file_that_something_else_wrote_is_not_continued(run, tmp_path):
    (tmp_path / "out.jsonl").write_text("precious\n")
    assert "out.jsonl.settings, which says what" in run("--resume", code=2)
    (tmp_path / "out.jsonl").unlink()
    run()
    whole = (tmp_path / "out.jsonl").read_bytes()
    for damage in (b"precious\n", b'{"index": -1}\n'):
        (tmp_path / "out.jsonl").write_bytes(whole + damage)
        assert f"out.jsonl:{len(TEXTS) + 1}: expected a record of this run" in run("--resume", code=2)
        assert (tmp_path / "out.jsonl").read_bytes() == whole + damage


# --- refusals


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "prompts: no prompt found"),
        ('{"prompt": "a"}\nnot JSON\n', "prompts.jsonl:2, got: not JSON"),
        ('{"prompt": "a"}\n{"prompt": "' + "a" * 105 + '"}\n', r"expected 1 to 104 tokens \(the context of 128 less "),
    ],
)
def test_bad_prompts_are_named_before_any_work(run, prompts, tmp_path, content, words):
    prompts.write_text(content)
    assert re.search(words, run(code=2))
    assert not (tmp_path / "out.jsonl").exists()


def test_options_of_many_prompts_need_prompts(capsys, checkpoint):
    assert main(["generate", "--model", str(checkpoint / "heads"), "--prompt", "a", "--out", "a.jsonl"]) == 2
    assert "medusa: --out needs --prompts" in capsys.readouterr().err


def test_a_generation_that_fails_names_its_prompt_and_keeps_the_rest(run, prompts, tmp_path, monkeypatch):
    taken = answers.Answer.take

    def failing(job, delta):
        if job.asked == 3 and delta.finish is not None:
            delta = Delta([], "error", error=FloatingPointError("model: expected finite logits, got nan"))
        return taken(job, delta)

    with monkeypatch.context() as patch:
        patch.setattr(answers.Answer, "take", failing)
        line = run("--slots", 1, code=2)
    assert line == f"medusa: {prompts}:4: model: expected finite logits, got nan"
    assert len(lines_of(tmp_path / "out.jsonl")) == 3
    assert run("--resume")[0]["earlier"] == 3


class Letters:
    """Decodes token n to the n-th letter."""

    def decode(self, tokens, **settings):
        return "".join("abc"[token] for token in tokens)


def test_steps_after_a_stop_string_do_not_count():
    """The engine may be steps ahead of the thread that looks for stop strings."""
    ticket = Ticket([1], lambda delta: None, accepted=[2, 1, 3, 3])
    job = answers.Answer(0, "a:1", AnswerText(Letters(), "c"), ticket=ticket)
    for tokens in ([0], [0, 1, 0], [1, 2], [0, 0, 0, 0]):
        ended = job.take(Delta(tokens))
        assert ended == (tokens == [1, 2])
    assert (job.tokens, job.accepted, job.finish) == ([0, 0, 1, 0, 1, 2], [2, 1], "stop")
