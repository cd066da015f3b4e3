"""Every option of every command with hostile values: exit code 2 and a line that says why, and never a traceback."""

import argparse
import contextlib

import pytest
from hostile import DEEP
from limits import MIB, bounded

from medusa_decoding.cli import _arguments, argument_parser, demo, main, simulate
from medusa_decoding.roofline.shapes import SHAPES, find_shape

REFUSED = "the model is not loaded in this test"


def commands(parser, names=()):
    """(names, parser) of each command that has no further ones below it."""
    below = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    if not below:
        yield names, parser
    for action in below:
        for name, subparser in action.choices.items():
            yield from commands(subparser, (*names, name))


PARSER = argument_parser()
COMMANDS = {" ".join(names): parser for names, parser in commands(PARSER)}


@pytest.fixture
def values(tmp_path, monkeypatch):
    """Hostile values, in a folder of the test's own in which nothing else can be written or found."""
    monkeypatch.chdir(tmp_path)

    def refuse(*args, **kwargs):
        raise ValueError(REFUSED)

    def only_hostile(name):
        if name not in SHAPES:
            find_shape(name)
        refuse()

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr(_arguments, "load_model", refuse)
    monkeypatch.setattr(_arguments, "load_tokenizer", refuse)
    monkeypatch.setattr(demo.MedusaModel, "from_pretrained", refuse)
    monkeypatch.setattr("medusa_decoding.cli.argument_parser", lambda: PARSER)  # making it takes longer than the rest
    monkeypatch.setattr(simulate, "find_shape", only_hostile)
    (tmp_path / "folder").mkdir()
    for name, content in {
        "deep.json": b"[" * DEEP,
        "deep.jsonl": b'{"prompt": ' * DEEP,
        "binary.json": bytes(range(256)),
        "binary.yaml": bytes(range(256)),
        "empty.jsonl": b"",
        "five.json": b"5",
        "digits.json": b"9" * 5000,
    }.items():
        (tmp_path / name).write_bytes(content)
    files = [
        "folder",
        "folder/missing/file.json",
        "missing.json",
        "/dev/zero",
        *sorted(p.name for p in tmp_path.glob("*.*")),
    ]
    numbers = ["-1", "0", "nan", "1e999", "1_0", "0x10", "10" * 15, "9" * 5000, "1,2,999999999999", "\u0663"]
    trees = [
        "chain:20000",
        "chain:" + "9" * 5000,
        "cartesian:1000,1000,1000",
        "dynamic:1000000000,4",
        "root+lookup:99999",
    ]
    return ["", " ", "\udcff", "x" * 5000, "a\0b", "a\nb", "=", "a=[", *files, *numbers, *trees]


@pytest.mark.parametrize("name", COMMANDS)
def test_hostile_values_of_every_option_are_refused(name, values, capsys):
    actions = [action for action in COMMANDS[name]._actions if action.nargs != 0]
    needed = {action: (next(iter(action.choices)) if action.choices else "missing.json") for action in actions
              if action.required}  # fmt: skip
    with contextlib.suppress(SystemExit):  # imports what the command needs, which is not the values' time
        options = [f"{one.option_strings[-1]}={given}" for one, given in needed.items() if one.option_strings]
        main([*name.split(), *options])
    for action in actions:
        for value in values:
            argv = name.split()
            for one, given in (needed | {action: value}).items():
                argv += [f"{one.option_strings[-1]}={given}"] if one.option_strings else ["--", given]
            refused(argv, capsys)


def refused(argv, capsys):
    shown = [arg[:60] for arg in argv]
    with bounded(SystemExit, seconds=3, memory=160 * MIB) as said:
        try:
            code = main(argv)
        except SystemExit as end:
            code = end.code
    err = capsys.readouterr().err
    assert not said
    assert code in (0, 2), f"{shown} ended with {code}"
    assert code == 0 or any("medusa" in line for line in err.splitlines()), f"{shown} said nothing"
    assert "Traceback" not in err
