"""medusa chat at a real terminal."""

import re

import pytest
from terminals import PATIENCE, Terminal

# It has no end of turn, so that an answer goes on until it is interrupted.
TEMPLATE = "{% for message in messages %}{{ message['content'] }}:\n{% endfor %}"


@pytest.fixture
def start(make_chat, tmp_path):
    """Start a chat with a tree and variables in its environment."""
    started = []

    def start(tree, **variables):
        (tmp_path / "template.jinja").write_text(TEMPLATE)
        heads = make_chat(2, context=2**20).heads
        argv = ["--template", tmp_path / "template.jinja", "--max-new-tokens", 10**6, "--tree", tree]
        started.append(Terminal("chat", "--model", heads, *argv, **variables))
        return started[-1]

    yield start
    for terminal in started:
        terminal.end()


@pytest.mark.slow
def test_ctrl_c_ends_the_answer_but_not_the_chat(start):
    terminal = start("root")
    terminal.wait_for("> $")
    terminal.press("hello\n")
    terminal.wait_for(r"hello\n\s*\S+\s")  # words of the answer are there
    terminal.press("\x03")
    terminal.wait_for(r"medusa: interrupted: the answer is kept(.|\n)*> $")

    terminal.press("/history\n")
    said = terminal.wait_for(r"\[interrupted\]\n> $")
    kept = re.search(r"user: hello\nassistant: ((.|\n)*) \[interrupted\]", said).group(1)
    assert len(kept) > 2
    assert kept in terminal.shown()[: -len(said)].replace("^C", "")

    terminal.press("half a line")
    terminal.wait_for(r"half a line$")
    terminal.interrupt_prompt(r"/exit or Ctrl-D leaves\n> $")
    terminal.press("one\\\n")
    terminal.wait_for(r"\.\.\. $")
    terminal.interrupt_prompt(r"leaves\n> $")

    terminal.press("again\n")
    terminal.wait_for(r"again\n\s*\S+\s")
    terminal.press("\x03")
    terminal.wait_for(r"medusa: interrupted: the answer is kept(.|\n)*> $")
    terminal.press("\x04")
    assert terminal.process.wait(PATIENCE) == 0
