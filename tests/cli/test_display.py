"""What a terminal shows: the same text as a file gets, with the steps in colours; races of recorded generations."""

import io
import re
from functools import partial

from rich.console import Console
from terminals import plain

from medusa_decoding import MedusaModel, Tree
from medusa_decoding.checkpoints import pretrained
from medusa_decoding.cli import _display, main
from medusa_decoding.cli._display import COLOURS, Race, Run, step_text


def screen(shown, picture):
    """The lines of a picture, without styles."""
    with shown.capture() as captured:
        shown.print(picture)
    return plain(captured.get()).splitlines()


def coloured(text):
    """The parts of a text that have a style."""
    return [(text.plain[span.start : span.end], span.style) for span in text.spans if span.end > span.start]


def test_draft_tokens_have_the_colour_of_their_step():
    steps = [["a"], ["b", "c", "d"], ["e"], ["f", "g"], ["h", "i"]]
    text = step_text(steps, COLOURS)
    assert text.plain == "abcdefghi"
    assert coloured(text) == [("bc", COLOURS[1]), ("f", COLOURS[1]), ("h", COLOURS[0])]
    assert coloured(step_text(steps[1:], COLOURS, first=1)) == coloured(text)


def test_a_models_text_cannot_control_the_terminal():
    steps = [["\x1b]0;title\x07", "\x9b2J\r\n", "\tb\x00"]]
    assert step_text(steps, COLOURS).plain == "\ufffd]0;title\ufffd\ufffd2J\n\tb\ufffd"


def test_generate_on_a_terminal_has_the_same_text(checkpoint, at_terminal, model_text, capsys):
    at_terminal(width=20)
    heads = str(checkpoint / "heads")
    assert main(["generate", "--model", heads, "--prompt", "xyz", "--max-new-tokens", "9", "--tree", "chain:2"]) == 0
    out = capsys.readouterr().out
    # Bytes that end a line or control a terminal are not shown as they are.
    assert plain(out) == model_text("xyz", 9).translate(_display.CONTROLS) + "\n"


RUNS = [
    Run("plain", [[letter] for letter in "abcdefghi"], [n / 10 for n in range(1, 10)]),
    Run("medusa", [["a"], ["b", "c", "d"], ["e", "f", "g"], ["h", "i"]], [0.1, 0.25, 0.4, 0.55]),
]


def test_a_race_shows_what_had_been_written_when():
    shown = Console(file=io.StringIO(), width=100, height=40)
    race = Race(shown, RUNS, "prompt ")
    _, _, time, _, text, *_, figures = screen(shown, race.picture(0.3))
    assert time.startswith("0.30 s, replayed ")
    assert re.search(r"prompt abc +.*prompt abcd +", text)
    assert "3 tokens, 1.00 per step, 10/s" in figures
    assert "4 tokens, 3.00 per step, 13/s" in figures
    _, _, _, title, text, *_, figures = screen(shown, race.picture(race.seconds))
    assert re.search(r"prompt abcdefghi +.*prompt abcdefghi +", text)
    assert "plain: 0.90 s" in title
    assert "medusa: 0.55 s" in title
    assert "9 tokens, 2.67 per step, 16/s" in figures
    assert "prompt" in screen(shown, race.picture(0.0))[4]


def test_a_recorded_run_is_the_generation(checkpoint):
    tokenizer = pretrained.load_tokenizer(checkpoint / "base")
    ids = tokenizer("xyz", return_tensors="pt").input_ids
    with MedusaModel.from_pretrained(checkpoint / "heads", tree=Tree.chain(3)) as model:
        output = model.generate(ids, max_new_tokens=20)
        run = _display.record("Medusa", partial(model.generate, ids, None, 20), tokenizer)
    assert "".join(piece for step in run.steps for piece in step) == tokenizer.decode(
        output.sequences[0, ids.shape[1] :]
    )
    assert [len(step) for step in run.steps] == [1] + [accepted + 1 for accepted in output.accept_lengths[0]]
    assert run.tokens == 20
    assert run.ends[0] > 0
    assert run.ends == sorted(run.ends)
    assert run.seconds == run.ends[-1]
