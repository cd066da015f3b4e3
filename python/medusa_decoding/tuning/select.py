"""The tree with the most tokens a second: expected tokens of a step over what the step takes on this device.

Expected tokens come from the accuracies of the heads (Medusa paper, section 2.3.3): counted on the user's prompts, or
else by the trainer on held-out data, or else those published for other heads. Where the user's texts were kept, trees
are searched and weighed by walking along them instead, as steps do. This module knows neither models nor how durations
were measured.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from medusa_decoding.decode.adaptive.acceptance import VICUNA_7B
from medusa_decoding.files import parse_json, read_json
from medusa_decoding.roofline.acceleration import read_accuracies
from medusa_decoding.trees.calibration import Calibration
from medusa_decoding.trees.replay import walk
from medusa_decoding.trees.search import walked_tree
from medusa_decoding.trees.tree import Tree

CALIBRATION, MEASURED, PUBLISHED = "calibration.json", "measured.json", "published"
"""Where accuracies are from: `medusa calibrate`, the trainer (both beside the heads), or the paper's own heads."""


@dataclass(frozen=True)
class Accuracies:
    """How often heads are right.

    Attributes:
        source: CALIBRATION, MEASURED or PUBLISHED.
        by_rank: by_rank[k][i] is the share of positions at which head k's i-th best token alone is right.
    """

    source: str
    by_rank: list[list[float]]

    @property
    def most_nodes(self) -> int:
        """Nodes of the largest tree that these ranks can fill."""
        possible, level = 1, 1
        for row in self.by_rank:
            level *= len(row)
            possible += level
        return possible

    def __str__(self) -> str:
        """Say where they are from."""
        return {
            CALIBRATION: f"{CALIBRATION} (counted on prompts)",
            MEASURED: f"{MEASURED} (counted by the trainer on held-out data)",
        }.get(self.source, "published for Vicuna-7B's heads, not counted for these (see medusa calibrate)")


@dataclass(frozen=True)
class Source:
    """The calibration that accuracies and texts are of.

    Attributes:
        path: of the file; from the heads' folder where it stands in it, absolute elsewhere.
        hash: of its content.
        temperature: at which its texts were drawn, 0 for greedy ones; None where it does not say.
        checked: whether it is certain to be of these heads and this base model. In another dtype than it was made in,
            fingerprints tell nothing.
    """

    path: str
    hash: str
    temperature: float | None
    checked: bool

    @classmethod
    def of(cls, file: Path, folder: Path, dtype: str) -> Source:
        """Look at a calibration that `read_of` has accepted.

        Args:
            file: the calibration.
            folder: of the heads.
            dtype: that these are loaded in.
        """
        content = file.read_bytes()
        made = _made(parse_json(content, file))
        of_texts = made.get("settings")
        settings = of_texts if isinstance(of_texts, dict) else {}
        beside = file.resolve().parent == folder.resolve()
        return cls(
            file.name if beside else str(file.resolve()),
            hashlib.blake2b(content, digest_size=8).hexdigest(),
            settings.get("temperature"),
            settings.get("dtype") == dtype and "heads" in made and "base_model" in made,
        )

    @classmethod
    def from_json(cls, values: Any) -> Source:
        """Read what `dataclasses.asdict` made of one.

        Raises:
            ValueError: a temperature that is no number.
            KeyError, TypeError: parts that are missing or something else.
        """
        temperature = values["temperature"]
        if temperature is not None and (isinstance(temperature, bool) or not isinstance(temperature, (int, float))):
            raise ValueError(f"calibration: expected a number or null for temperature, got {temperature!r}")
        return cls(str(values["path"]), str(values["hash"]), temperature, values["checked"] is True)

    def __str__(self) -> str:
        """Say which file it is and how its texts were written."""
        if self.temperature is None:
            how = "which does not say how its texts were written"
        else:
            how = f"texts drawn at temperature {self.temperature}" if self.temperature else "greedy texts"
        return f"{self.path}, {how}"


@dataclass(frozen=True)
class Candidate:
    """One tree, and what a step with it gives and takes.

    Attributes:
        tree: the best tree of its size.
        tokens: expected tokens a step and row, root included.
        seconds: of a step.
    """

    tree: Tree
    tokens: float
    seconds: float

    @property
    def rate(self) -> float:
        """Tokens a second and row."""
        return self.tokens / self.seconds


def published(num_heads: int, num_candidates: int) -> Accuracies:
    """Return what is assumed of heads that nobody has counted, as far as they reach."""
    ranks = min(len(VICUNA_7B[0]), num_candidates)
    return Accuracies(PUBLISHED, [row[:ranks] for row in VICUNA_7B[:num_heads]])


def find_accuracies(
    folder: Path,
    num_heads: int,
    num_candidates: int,
    heads: str | None = None,
    dtype: str | None = None,
    base_model: str | None = None,
) -> Accuracies | None:
    """Read the accuracies that stand beside a checkpoint of heads; None where there are none.

    Args:
        folder: of the heads.
        num_heads: K.
        num_candidates: tokens that a head may be asked for: further ranks are left out.
        heads: fingerprint of the heads as they are loaded. A calibration that was made of others is refused.
        dtype: that they are loaded in. In another one a calibration's fingerprints tell nothing.
        base_model: fingerprint of the base model as it is loaded. A calibration on the texts of another is refused.

    Raises:
        ValueError: a file that is damaged, or of other heads or another base model; it names the file.
    """
    for source in (CALIBRATION, MEASURED):
        if (folder / source).is_file():
            return read_of(folder / source, source, num_heads, num_candidates, heads, dtype, base_model)
    return None


def read_of(
    file: Path,
    source: str,
    num_heads: int,
    num_candidates: int,
    heads: str | None = None,
    dtype: str | None = None,
    base_model: str | None = None,
) -> Accuracies:
    """Read the accuracies of one file, as `find_accuracies` does; `source` says what kind it is.

    Raises:
        ValueError: a file that is damaged, or of other heads or another base model; it names the file.
    """
    rows = read_accuracies(file)
    if len(rows) != num_heads:
        raise ValueError(f"{file}: expected accuracies of {num_heads} heads, got {len(rows)}")
    made = _made(read_json(file))
    settings = made.get("settings")
    if isinstance(settings, dict) and settings.get("dtype") == dtype:
        if heads is not None and made.get("heads", heads) != heads:
            raise ValueError(f"{file}: expected a calibration of these heads, got one of others")
        if base_model is not None and made.get("base_model", base_model) != base_model:
            raise ValueError(f"{file}: expected texts of this base model, got those of another")
    return Accuracies(source, [row[:num_candidates] for row in rows])


def read_texts(file: Path, num_candidates: int) -> Calibration | None:
    """Read a calibration whose accuracies `read_of` has taken; None where its texts were not kept.

    Raises:
        ValueError: a damaged file, or one with ranks that the heads cannot be asked for; it names the file.
    """
    if "texts" not in read_json(file):
        return None
    found = Calibration.load(file)
    if found.ranks > num_candidates:
        raise ValueError(f"{file}: expected at most {num_candidates} ranks, as these heads have, got {found.ranks}")
    return found if found.texts is not None else None


def _made(values: Any) -> dict[str, Any]:
    """Return what a file says of how it was made, as far as it does."""
    made = values.get("made") if isinstance(values, dict) else None
    return made if isinstance(made, dict) else {}


def trees_of(
    accuracies: Sequence[Sequence[float]], sizes: Sequence[int], texts: Calibration | None = None
) -> list[Tree]:
    """Return the best tree of each size, when walked along texts if there are any; of size 1, plain decoding.

    Raises:
        ValueError: a size that the heads cannot fill.
    """
    if texts is not None:
        return [Tree([]) if size == 1 else walked_tree(texts, size) for size in sizes]
    return [Tree([]) if size == 1 else Tree.optimal(accuracies, size) for size in sizes]


def tokens_of(
    trees: Sequence[Tree], accuracies: Sequence[Sequence[float]], texts: Calibration | None = None
) -> list[float]:
    """Return the expected tokens a step of trees: walked along texts if there are any, else heads taken as independent.

    Raises:
        ValueError: a tree that the heads cannot fill.
    """
    if texts is not None:
        return [walk(texts, tree).tokens_per_step for tree in trees]
    return [tree.expected_tokens(accuracies) for tree in trees]


def weigh(trees: Sequence[Tree], tokens: Sequence[float], seconds: Mapping[int, float]) -> list[Candidate]:
    """Put together what trees of different sizes give and take.

    Args:
        trees: the best one of each size.
        tokens: expected tokens a step of each (see `tokens_of`).
        seconds: of a step, by nodes.

    Raises:
        ValueError: a duration that is not above 0.
    """
    for nodes, value in seconds.items():
        if not value > 0:
            raise ValueError(f"seconds: expected above 0 for {nodes} nodes, got {value}")
    return [Candidate(tree, gain, seconds[tree.num_nodes]) for tree, gain in zip(trees, tokens, strict=True)]


def candidates(
    accuracies: Sequence[Sequence[float]], seconds: Mapping[int, float], texts: Calibration | None = None
) -> list[Candidate]:
    """Search the best tree of each size and weigh it.

    Args:
        accuracies: of the heads, a list a head, each rank alone.
        seconds: of a step, by nodes; 1 is plain decoding.
        texts: a calibration with its texts, to walk along; without, heads are taken as independent.

    Raises:
        ValueError: a size that the heads cannot fill, a duration that is not above 0.
    """
    trees = trees_of(accuracies, sorted(seconds), texts)
    return weigh(trees, tokens_of(trees, accuracies, texts), seconds)


def best(found: Sequence[Candidate]) -> Candidate:
    """Return the candidate with the most tokens a second; of equal ones the smallest tree.

    Raises:
        ValueError: no candidate.
    """
    if not found:
        raise ValueError("candidates: expected at least one, got none")
    return max(found, key=lambda one: (one.rate, -one.tree.num_nodes))
