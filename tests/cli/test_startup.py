"""Help, the version, typing errors, trees and simulations need no torch, and other libraries stay quiet."""

import os
import subprocess
import sys

import pytest
from calibrations import with_counts

from medusa_decoding.cli import COMMANDS, main
from medusa_decoding.tuning.calibration import NONE

SLOW = {"torch", "transformers", "triton", "numpy", "rich", "accelerate"}
RUN = """
import sys
from medusa_decoding.cli import main
try:
    sys.exit(main(sys.argv[1:]))
finally:
    print("imported:", *sorted(name for name in sys.modules if "." not in name))
"""


def run(*argv, **environment):
    command, environment = [sys.executable, "-c", RUN, *argv], {**os.environ, **environment}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
    ("argv", "code", "words"),
    [
        (["--help"], 0, "medusa"),
        (["--version"], 0, "medusa-kernels "),
        (["genrate"], 2, "invalid choice: 'genrate'"),
        (["generate", "--tree", "dynamic:16,4", "--promt", "x"], 2, "unrecognized arguments: --promt"),
        (["train", "--settings"], 0, "generation.seed"),
        (["distill", "--config", "none.yaml"], 2, "none.yaml"),
    ],
)
def test_answers_that_need_no_model_import_no_torch(argv, code, words):
    got, out, err = run(*argv)
    assert got == code
    assert words in out + err
    assert not SLOW & set(out.split("imported:")[1].split())


def test_every_command_has_help_with_an_example(capsys):
    for name in [*COMMANDS, "tree show", "tree search", "data check"]:
        with pytest.raises(SystemExit) as end:
            main([*name.split(), "--help"])
        assert end.value.code == 0
        assert f"    medusa {name}" in capsys.readouterr().out


def test_trees_import_no_torch(tmp_path):
    with_counts({(0, 0): 5, (1, 1): 4, (NONE, NONE): 1}).save(tmp_path / "c.json")
    for argv in (
        ["tree", "show", "chain:2", "--accuracies", tmp_path / "c.json"],
        ["tree", "search", "--calibration", tmp_path / "c.json", "--nodes", "3", "--held-out", tmp_path / "c.json"],
    ):
        code, out, err = run(*map(str, argv))
        assert code == 0, err
        assert not {"torch", "transformers"} & set(out.split("imported:")[1].split())


def test_other_libraries_print_nothing(checkpoint):
    """torchao, PyTorch and transformers have something to say while they are imported and while they load weights."""
    heads = str(checkpoint / "heads")
    code, out, err = run("generate", "--model", heads, "--prompt", "abc", "--max-new-tokens", "4", "--device", "cpu")
    assert code == 0, err
    [line] = err.splitlines()
    assert line.startswith("[4 tokens in ")


def test_names_in_errors_do_not_control_the_terminal(capsys, tmp_path):
    file = tmp_path / "a\x1b]0;owned\x07.txt"
    assert main(["generate", "--file", str(file)]) == 2
    err = capsys.readouterr().err
    assert "\x1b" not in err
    assert r"a\x1b]0;owned\x07.txt" in err
