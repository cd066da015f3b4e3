"""Repositories for the hub: their card, what an upload shows first, and one commit."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from huggingface_hub import CommitOperationDelete, HfApi, ModelCard
from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError

from medusa_decoding import MedusaHeads
from medusa_decoding.checkpoints import export, read_heads, write_heads
from medusa_decoding.cli import main

CARD = "---\ntags: [medusa, mine]\nlicense: mit\n---\n# Mine\n\n63 % of it.\n"
FILES = ["README.md", "config.json", "custom_generate/generate.py", "custom_generate/requirements.txt"]
FILES += ["measured.json", "medusa_lm_head.safetensors"]


@pytest.fixture
def heads(tmp_path: Path) -> Path:
    write_heads(MedusaHeads(8, 11, 2), tmp_path / "heads", base_model="someone/base", base_revision="v2")
    (tmp_path / "heads" / "measured.json").write_text('{"accuracies": [[0.5, 0.25], [0.125, 0.0]]}')
    return tmp_path / "heads"


def test_a_card_states_what_is_known_and_keeps_what_was_there(heads: Path, tmp_path: Path) -> None:
    done = export(heads, tmp_path / "new", "hub")
    card = ModelCard((done.folder / "README.md").read_text())
    assert (card.data.base_model, card.data.library_name, card.data.license) == ("someone/base", "medusa-kernels", None)
    assert done.notes == ["README.md names no license (--license)"]
    assert "| | top-1 | top-2 |\n|---|---|---|\n| head 1 | 50.0 | 75.0 |\n| head 2 | 12.5 | 12.5 |\n\n<!--" in card.text
    assert 'from_pretrained("someone/base", revision="v2")' in card.text
    (heads / "README.md").write_text(f"{CARD}\n## How to use these heads\n\nLike this.\n\n# Limits\n\nMany.\n")
    export(heads, tmp_path / "once", "hub", repo_id="me/once")
    # An exported folder is exported and overwritten again.
    for _ in range(2):
        done = export(tmp_path / "once", tmp_path / "twice", "hub", repo_id="me/twice", overwrite=True)
    card = ModelCard((done.folder / "README.md").read_text())
    assert card.data.tags == ["medusa", "mine", "speculative-decoding", "custom_generate"]
    assert card.data.license == "mit"
    assert card.text.startswith(
        "# Mine\n\n63 % of it.\n\n## How to use these heads\n\nLike this.\n\n# Limits\n\nMany.\n"
    )
    assert (card.text.count("## How to use"), card.text.count('custom_generate="me/twice"')) == (2, 1)
    assert "me/once" not in card.text
    assert read_heads(done.folder).base_revision == "v2"
    with pytest.raises(ValueError, match=r"^base_model: expected a repository on the hub, OWNER/NAME, got"):
        export(heads, tmp_path / "no", "hub", base_model=str(tmp_path))
    (heads / "README.md").write_text("---\ntags: [\n---\n")
    with pytest.raises(ValueError, match=r"^README.md: expected a header that the hub can read, got"):
        export(heads, tmp_path / "no", "hub")
    assert not (tmp_path / "no").exists()


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What the hub is asked: `private` is of the repository there, None without one; `status` refuses a commit."""
    seen = SimpleNamespace(private=None, status=None, created=[], commits=[], more=[])

    def answer(status: int) -> Any:
        return SimpleNamespace(status_code=status, headers={}, request=None)

    def model_info(api: HfApi, name: str) -> Any:
        if seen.private is None:
            raise RepositoryNotFoundError("none", response=answer(404))
        names = ["medusa_tree_sampling.json", "medusa_notes.md", "medusa_lm_head.pt/a", "README.md", *seen.more]
        return SimpleNamespace(private=seen.private, siblings=[SimpleNamespace(rfilename=name) for name in names])

    def create_commit(api: HfApi, name: str, changes: Any, commit_message: str) -> Any:
        if seen.status is not None:
            raise HfHubHTTPError("no", response=answer(seen.status))
        seen.commits.append([(type(change) is CommitOperationDelete, change.path_in_repo) for change in changes])
        return SimpleNamespace(commit_url=f"https://hub/{name}/commit/1")

    monkeypatch.setattr(HfApi, "model_info", model_info)
    monkeypatch.setattr(HfApi, "create_repo", lambda api, name, **how: seen.created.append((name, how["private"])))
    monkeypatch.setattr(HfApi, "create_commit", create_commit)
    return seen


@pytest.fixture
def argv(heads: Path, tmp_path: Path) -> list[str]:
    return ["export", "--model", str(heads), "--out", str(tmp_path / "out"), "--format", "hub", "--push", "me/heads"]


def test_an_upload_is_shown_first_and_is_one_commit(api: Any, argv: list[str], tmp_path: Path, capsys: Any) -> None:
    assert main(argv) == 0
    shown = capsys.readouterr().out.partition("would upload to me/heads (public if it is new), in one commit:\n")[2]
    lines = shown.splitlines()
    assert [line.split()[1] for line in lines[:-1]] == FILES
    assert lines[-1] == "nothing was uploaded: look at the folder, then add --yes to upload it"
    assert (api.created, api.commits) == ([], [])
    card = tmp_path / "out" / "README.md"
    card.write_text(card.read_text() + "Mine.\n")
    (tmp_path / "out" / "calibration.json").write_text('{"texts": "private"}')
    api.private = True
    assert main([*argv, "--private", "--yes"]) == 0
    assert capsys.readouterr().out.endswith("https://hub/me/heads/commit/1\n")
    assert card.read_text().endswith("Mine.\n")
    assert api.created == [("me/heads", True)]
    # A tree of older heads is deleted; what else is there stays.
    assert api.commits == [[(True, "medusa_tree_sampling.json"), *((False, name) for name in FILES)]]


def test_what_may_not_be_uploaded_is_not(api: Any, argv: list[str], tmp_path: Path, capsys: Any) -> None:
    for more, message in ((["--format", "native"], "need --format hub"), (["--push", "x"], "--push: expected a repo")):
        assert main([*argv, *more]) == 2
        assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    api.private = False
    assert main([*argv, "--private", "--yes"]) == 2
    assert "private: expected a private or new repository, got me/heads, which is public" in capsys.readouterr().err
    api.more = ["model-00001-of-00002.safetensors"]
    assert main([*argv, "--yes"]) == 2
    assert "repo_id: expected a repository of heads alone, or a new one, got me/heads" in capsys.readouterr().err
    api.more = []
    assert main([*argv, "--yes", "--license", "mit"]) == 2  # which the card, looked at before, does not have
    assert "README.md: expected a card for me/heads, and no --license now" in capsys.readouterr().err
    assert api.created == []
    api.status = 401
    assert main([*argv, "--overwrite", "--yes"]) == 2
    assert "me/heads: the upload failed: log in with `hf auth login`, or set HF_TOKEN" in capsys.readouterr().err
    assert api.commits == []
