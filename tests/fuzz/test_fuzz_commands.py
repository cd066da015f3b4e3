"""Every option of every command with values that make no sense: exit code 2 and a line that says why, no traceback."""

import argparse

import pytest

from medusa_decoding.cli import _arguments, argument_parser, demo, main

VALUES = ["", "\udcff", "a\0b", "a=[", "folder", "missing.json", "binary.json", "-1", "nan", "9" * 5000, "chain:20000",
          "cartesian:1000,1000,1000"]  # fmt: skip


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


@pytest.fixture(autouse=True)
def no_models(tmp_path, monkeypatch):
    """A folder of the test's own; no model is loaded."""

    def refuse(*args, **kwargs):
        raise ValueError("the model is not loaded in this test")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr(_arguments, "load_model", refuse)
    monkeypatch.setattr(_arguments, "load_tokenizer", refuse)
    monkeypatch.setattr(demo.MedusaModel, "from_pretrained", refuse)
    monkeypatch.setattr("medusa_decoding.cli.argument_parser", lambda: PARSER)  # making it takes longer than the rest
    (tmp_path / "folder").mkdir()
    (tmp_path / "binary.json").write_bytes(bytes(range(256)))


@pytest.mark.parametrize("name", COMMANDS)
def test_values_that_make_no_sense_are_refused(name, capsys):
    actions = [action for action in COMMANDS[name]._actions if action.nargs != 0]
    needed = {action: (next(iter(action.choices)) if action.choices else "missing.json") for action in actions
              if action.required}  # fmt: skip
    for action in actions:
        for value in VALUES:
            argv = name.split()
            for one, given in (needed | {action: value}).items():
                argv += [f"{one.option_strings[-1]}={given}"] if one.option_strings else ["--", given]
            try:
                code = main(argv)
            except SystemExit as end:
                code = end.code
            said = capsys.readouterr().err
            refused = code == 1 and name == "data check"  # which reads a file of bytes as a bad record
            assert code == 0 or refused or (code == 2 and "medusa" in said), (
                f"{action.dest} {value[:60]!r} ended with {code}"
            )
            assert "Traceback" not in said
