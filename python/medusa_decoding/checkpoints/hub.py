"""Folders for model repositories on the Hugging Face hub: their model card, their code for transformers, the upload."""

from __future__ import annotations

import contextlib
import importlib.resources
import re
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, ModelCard
from huggingface_hub.errors import LocalTokenNotFoundError, RepositoryNotFoundError

from medusa_decoding.checkpoints.accuracies import MEASURED, read_accuracies
from medusa_decoding.checkpoints.config_checks import check_revision
from medusa_decoding.checkpoints.tensor_files import own_file
from medusa_decoding.files import read_text, write_text
from medusa_decoding.heads import MedusaHeads

CARD, CODE = "README.md", "custom_generate"
CODE_FILES = ("generate.py", "requirements.txt")
_WEIGHTS = ("medusa_lm_head.safetensors", "medusa_lm_head.pt")
# Not what is measured on one's own prompts and device: calibrations have texts.
_HEADS = (*_WEIGHTS, "medusa_tree.json", "medusa_tree_sampling.json", MEASURED, "accuracy.png")
_UPLOADED = (
    CARD, "config.json", *_HEADS, "LICENSE*", "NOTICE*", "USE_POLICY*", *(f"{CODE}/{name}" for name in CODE_FILES),
)  # fmt: skip
_USE = re.compile("<!-- medusa export -->.*?<!-- end of medusa export -->", re.DOTALL)


def complete(
    folder: Path,
    heads: MedusaHeads,
    base_model: str,
    base_revision: str | None,
    license: str | None = None,
    repo_id: str | None = None,
) -> list[str]:
    """Add a model card and the code for transformers to a folder of heads; return notes for the user.

    A card that is there keeps its text and gets a new section. Figures in a new one are those of `measured.json`.
    """
    check_repository("base_model", base_model)
    check_revision(base_revision)
    file, measured = folder / CARD, folder / MEASURED
    text = read_text(file) if file.is_file() else ""
    try:
        card = ModelCard(text if text.lstrip().startswith("---") else f"---\n{{}}\n---\n{text}")
    except Exception as error:  # of yaml, or of what the hub expects of its keys
        raise ValueError(f"{file.name}: expected a header that the hub can read, got {error}") from error
    data: Any = card.data
    data["license"] = license or data.get("license")
    data["base_model"], data["pipeline_tag"] = base_model, "text-generation"
    data["library_name"] = data.get("library_name") or "medusa-kernels"
    data["tags"] = list(dict.fromkeys([*(data.get("tags") or []), "medusa", "speculative-decoding", CODE]))
    accuracies = read_accuracies(measured) if measured.is_file() else []
    written = ModelCard.from_template(
        data,
        template_str=(importlib.resources.files(__package__) / "hub_card.jinja").read_text(encoding="utf-8"),
        text=_USE.sub("", card.text).strip(),
        heads=heads,
        revision=base_revision,
        argument="" if base_revision is None else f', revision="{base_revision}"',
        accuracies=accuracies,
        ranks=[rank for rank in (1, 2, 3, 5, 10) if rank <= min(map(len, accuracies), default=0)],
        repository=repo_id or "OWNER/NAME",
        version=version("medusa-kernels"),
    )
    write_text(file, f"{written}\n")
    (folder / CODE).mkdir(exist_ok=True)
    code = importlib.resources.files("medusa_decoding.huggingface") / "repository_generate.py"
    for name, content in zip(CODE_FILES, (code.read_text(encoding="utf-8"), "medusa-kernels\n"), strict=True):
        write_text(folder / CODE / name, content)
    return [] if data["license"] else [f"{CARD} names no license (--license)"]


def check_repository(argument: str, name: str) -> None:
    """Raise `ValueError`, which names the argument, unless `name` has the form OWNER/NAME."""
    if not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", name):
        raise ValueError(f"{argument}: expected a repository on the hub, OWNER/NAME, got {name!r}")


def files_to_push(folder: str | Path) -> dict[str, int]:
    """Return the files that `push` uploads, by their name in the repository, with their sizes in bytes.

    Raises:
        ValueError: no heads in the folder, or a link out of it.
    """
    folder = Path(folder)
    files = sorted(file for pattern in _UPLOADED for file in folder.glob(pattern) if file.is_file())
    found = {file.relative_to(folder).as_posix(): own_file(file).stat().st_size for file in files}
    if not any(name in found for name in _WEIGHTS):
        raise ValueError(f"folder: expected one with Medusa heads, got {folder}")
    return found


def push(folder: str | Path, repo_id: str, *, private: bool = False, token: str | None = None) -> str:
    """Upload a folder of heads to a model repository in one commit; return the commit's URL.

    The repository is created if there is none. Files of older heads there that the folder does not have (trees,
    figures) are deleted in the same commit; nothing else is touched. `files_to_push` lists what is uploaded.

    Args:
        folder: of heads, as `export` with the hub format or training writes it.
        repo_id: OWNER/NAME.
        private: create a private repository. A public one that exists is refused.
        token: of the hub; None for the one of `hf auth login` or HF_TOKEN.

    Raises:
        ValueError: a folder without heads, another form of `repo_id`, a public repository although `private`, or a
            repository that holds a model, whose config the upload would replace.
        OSError: this token has no access, or the hub cannot be reached. No file has been committed then, but an empty
            repository may have been created.
    """
    check_repository("repo_id", repo_id)
    files = list(files_to_push(folder))
    api = HfApi(token=token)
    with _as_upload(repo_id):
        old = [name for name in _there(api, repo_id, private) if name in _HEADS and name not in files]
        api.create_repo(repo_id, private=private, exist_ok=True)
        # `upload_folder` makes several commits of a large folder.
        changes: list[Any] = [CommitOperationDelete(name) for name in old]
        changes += [CommitOperationAdd(name, Path(folder) / name) for name in files]
        done = api.create_commit(repo_id, changes, commit_message="Upload Medusa heads")
    return str(done.commit_url)


def check_push(repo_id: str, *, private: bool = False, token: str | None = None) -> None:
    """Refuse an upload by `push` that is known to fail: asks the hub, changes nothing there.

    A fine-grained token may still lack the right to write.
    """
    check_repository("repo_id", repo_id)
    api = HfApi(token=token)
    with _as_upload(repo_id, "an upload would fail"):
        user = api.whoami()
        owners = [user["name"], *(organisation["name"] for organisation in user.get("orgs", []))]
        if user.get("auth", {}).get("accessToken", {}).get("role") == "read":
            raise PermissionError("the token may only read; make one that writes, and log in with `hf auth login`")
        if repo_id.partition("/")[0] not in owners:
            raise PermissionError(f"the token writes to repositories of {', '.join(owners)}")
        _there(api, repo_id, private)


def _there(api: HfApi, repo_id: str, private: bool) -> list[str]:
    """Return the files in a repository that heads may be written to; none if it is not there."""
    try:
        found = api.model_info(repo_id)
    except RepositoryNotFoundError:
        return []
    if private and not found.private:
        raise ValueError(f"private: expected a private or new repository, got {repo_id}, which is public")
    there = [file.rfilename for file in found.siblings or []]
    if models := [name for name in there if name.startswith(("model", "pytorch_model"))]:
        raise ValueError(f"repo_id: expected a repository of heads alone, or a new one, got {repo_id} with {models[0]}")
    return there


@contextlib.contextmanager
def _as_upload(repo_id: str, result: str = "the upload failed") -> Iterator[None]:
    """Raise what goes wrong inside the block as an `OSError` that says what to do; a `ValueError` stays."""
    try:
        yield
    except ValueError:
        raise
    except Exception as error:  # of the hub's client, or of its HTTP library
        status = getattr(getattr(error, "response", None), "status_code", 0)
        status = 401 if isinstance(error, LocalTokenNotFoundError) else status
        remedies = {401: "log in with `hf auth login`, or set HF_TOKEN", 403: "the token may not write there"}
        raise OSError(f"{repo_id}: {result}: {remedies.get(status, error)}") from error
