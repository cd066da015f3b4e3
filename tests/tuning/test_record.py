"""Records of figures: which commit and command they are said to be of."""

import subprocess

import pytest

from medusa_decoding import provenance
from medusa_decoding.tuning import record


@pytest.fixture
def git(monkeypatch):
    """Answer git's commands as a checkout would: `git(tracked=True, changed="")`."""
    monkeypatch.delenv("MEDUSA_COMMIT", raising=False)

    def answer(tracked=True, changed=""):
        asked = []

        def run(*arguments):
            asked.append(arguments[0])
            if arguments[0] == "ls-files" and not tracked:
                raise subprocess.CalledProcessError(1, "git")
            return {"ls-files": "provenance.py\n", "rev-parse": "0123456789ab\n", "status": changed}[arguments[0]]

        monkeypatch.setattr(provenance, "_git", run)
        return asked

    return answer


def test_the_commit_is_the_checkouts(git):
    assert git() == []
    assert provenance.commit() == "0123456789ab"
    git(changed=" M python/medusa_decoding/tree.py\n")
    assert provenance.commit() == "0123456789ab+changes"


def test_a_package_installed_into_another_repository_has_no_commit(git):
    asked = git(tracked=False)
    assert provenance.commit() == "unknown"
    assert asked == ["ls-files"]


def test_a_commit_that_is_told_goes_first(git, monkeypatch):
    git(tracked=False)
    monkeypatch.setenv("MEDUSA_COMMIT", "abc")
    assert provenance.commit() == "abc"


def test_another_program_does_not_pass_for_the_command(monkeypatch):
    import torch

    for program in ("pytest", "/somewhere/pytest/__main__.py"):
        monkeypatch.setattr("sys.argv", [program, "-q"])
        assert record.provenance(torch.device("cpu"))["command"] == "unknown"
    monkeypatch.setattr("sys.argv", ["/somewhere/medusa_decoding/__main__.py", "tune", "--prompts", "a b"])
    assert record.provenance(torch.device("cpu"))["command"] == "medusa tune --prompts 'a b'"
