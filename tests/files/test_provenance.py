"""Records of figures: which commit and command they are said to be of."""

import os
import shutil
import subprocess

import pytest

from medusa_decoding import provenance


@pytest.fixture(autouse=True)
def asked_anew(monkeypatch):
    monkeypatch.delenv("MEDUSA_COMMIT", raising=False)
    # In a hook, git is told of another repository, which is nobody's to commit to.
    for name in [name for name in os.environ if name.startswith("GIT_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)
    monkeypatch.setenv("GIT_CONFIG_NOSYSTEM", "1")
    provenance.commit.cache_clear()
    yield
    provenance.commit.cache_clear()


@pytest.fixture
def checkout(tmp_path):
    """A repository with one commit of `code.py` and `benchmarks/results/figures.jsonl`."""
    if shutil.which("git") is None:
        pytest.skip("needs git")
    figures = tmp_path / "benchmarks" / "results" / "figures.jsonl"
    figures.parent.mkdir(parents=True)
    for file in (tmp_path / "code.py", figures):
        file.write_text("1\n")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "-c", "user.name=A", "-c", "user.email=a@b.c", "commit", "-qm", "First")
    return tmp_path


def git(folder, *arguments):
    done = subprocess.run(["git", *arguments], cwd=folder, check=True, capture_output=True, text=True)
    return done.stdout.strip()


def test_the_commit_is_the_checkouts(checkout):
    head = git(checkout, "rev-parse", "HEAD")[:12]
    assert provenance.commit(checkout / "code.py") == head
    provenance.commit.cache_clear()
    with open(checkout / "benchmarks" / "results" / "figures.jsonl", "a") as lines:
        lines.write("2\n")
    (checkout / "new.txt").write_text("not tracked")
    assert provenance.commit(checkout / "code.py") == head
    provenance.commit.cache_clear()
    (checkout / "code.py").write_text("2\n")
    assert provenance.commit(checkout / "benchmarks" / "results" / "figures.jsonl") == f"{head}+changes"


def test_a_package_installed_into_another_repository_has_no_commit(checkout):
    (checkout / "installed.py").touch()
    assert provenance.commit(checkout / "installed.py") == "unknown"
