"""The figures of README and docs, traced to the records that they come from.

    python -m benchmarks.trace                          # what differs in README and docs, and claims without a record
    python -m benchmarks.trace --write README.md        # put the records' figures in

`docs/figures.yaml` has entries for each page, in the page's order. An entry quotes a few words of the page, with `{}`
for each figure, and says where these come from: a record's name, the place in it, and a factor if the page has another
unit. A figure may be divided by another, or be the least, the median, the most or the count of all records of a name:

    - text: "{} times, {} % of the bandwidth"
      from: [demo/best/medusa_over_transformers/ratio, step-7b/fraction*100]
    - text: "{} times in the step, at least {} times alone, with {} tokens"
      from: ["step-own-modules/median_us : step-7b/median_us", min attention-over-sdpa/ratio, {none: a setting}]

`docs/records.yaml` says which records a name means: those of a results file with these fields (`shapes.nodes` is one
within another). With `by: [model, dtype]` the place begins with the values of these: `steps/Llama-254M/bf16/median_us`.
A figure without least or most is that of the last one. It keeps the decimals that the page shows. A claim (a number
with a unit, an interval, a decimal in a table) without an entry is an error, unless one says it for its section, which
ends at the next heading:

    - section: "## What a step costs"
      records: NAME NAME       # every claim is a value of these records, in its unit; here a name means all of them
    - section: "## Limits"
      none: limits of the program, not measurements
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import re
import statistics
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from decimal import ROUND_HALF_EVEN, Decimal
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import yaml

Record = dict[str, Any]
ROOT = Path(__file__).resolve().parents[1]
RECORDS = ROOT / "docs" / "records.yaml"
FIGURES = ROOT / "docs" / "figures.yaml"
RESULTS = ROOT / "benchmarks" / "results"
NUMBER = r"-?\d(?:[\d,]*\d)?(?:\.\d+)?"
PLACE = r"[\w.-]+/[^*:]+?"
OF_ALL: dict[str, Callable[[Sequence[Any]], Any]] = {
    "min": min,
    "median": statistics.median,
    "max": max,
    "count": len,
}
SOURCE = re.compile(
    rf"(?:(?P<of_all>{'|'.join(OF_ALL)})\s+)?(?P<place>{PLACE})(?:\s+:\s+(?P<over>{PLACE}))?(?:\*(?P<factor>[\d.e-]+))?"
)
# Factors from records' units to a page's: shares in per cent, microseconds or seconds, bytes in GB and TB.
UNITS = {
    "%": ("1", "100"), "ms": ("1", "1e-3", "1e3"), "µs": ("1", "1e6"), "us": ("1", "1e6"), "s": ("1", "1e-6"),
    "seconds": ("1", "1e-6"), "GB/s": ("1", "1e-9"), "TB/s": ("1e-3", "1e-12"), "MB": ("1", "1e-6"),
    "GB": ("1", "1e-9"), "times": ("1",), "minutes": ("1",), "TFLOP/s": ("1",), "tokens/s": ("1",),
    "tokens per step": ("1",), "nats": ("1",), None: ("1", "1e-3", "1e-6"),
}  # fmt: skip
UNIT = "|".join(re.escape(unit).replace(r"\ ", r"\s") for unit in UNITS if unit)
CLAIMS = re.compile(
    rf"(?<![\w.,-])(?P<with_unit>(?:{NUMBER}(?:,| to| and| or) )?{NUMBER})\*{{0,2}}\s?(?P<unit>{UNIT})(?![\w/])"
    rf"(?!\s(?:bootstrap |confidence )?interval)|(?<![\w.,])(?P<interval>{NUMBER}\*{{0,2}} \({NUMBER} to {NUMBER})\)"
    rf"|(?<=\|)[ *]*(?P<cell>\d[\d,]*\.\d+)(?=[ *±|(])"
)
SETTINGS = {"seed", "seeds", "threads", "batch", "prompts", "warm_up", "rounds", "shapes", "p10_us", "p90_us"}
"""Fields that no claim is about."""
CODE = re.compile(r"^( *)```.*?^\1```$|`[^`\n]+`|\]\([^)\s]*\)|<!-- setup:.*?-->", re.DOTALL | re.MULTILINE)
SECTION = re.compile(r"(?:^(?P<heading>#{1,6} [^\n]*)|\A).*?(?=^#{1,6} |\Z)", re.DOTALL | re.MULTILINE)


class Figure(NamedTuple):
    """A number in a page, and where it comes from: a place in the records, or None if it has no record."""

    start: int
    end: int
    source: str | None


@cache
def names() -> Mapping[str, Mapping[str, Any]]:
    """Return what the names of records mean."""
    found: dict[str, dict[str, Any]] = yaml.safe_load(RECORDS.read_text(encoding="utf-8"))
    return found


@cache
def records(file: str) -> list[Record]:
    """Return the records of a results file, lines or one object."""
    if (one := RESULTS / f"{file}.json").is_file():
        return [json.loads(one.read_text(encoding="utf-8"))]
    return [json.loads(line) for line in (RESULTS / f"{file}.jsonl").read_text(encoding="utf-8").splitlines()]


def records_of(name: str) -> list[Record]:
    """Return the records that a name means, in the order of their file.

    A name with `over: PEER` means ratios: how many times our median the fastest such peer's is, for each of the shapes.

    Raises:
        ValueError: an unknown name, or no such record.
    """
    if name not in names():
        raise ValueError(f"{name}: expected a name of docs/records.yaml, got another")
    wanted = dict(names()[name])
    file, peer, ratio = wanted.pop("file"), wanted.pop("over", None), wanted.pop("ratio", {})
    wanted.pop("by", None)
    found = [one for one in records(file) if all(holds(one, *field) for field in wanted.items())]
    if peer is not None:
        ours = {str(one["shapes"]): one["median_us"] for one in found if one["implementation"] == "medusa_kernels"}
        peers: dict[str, float] = {}
        for one in found:
            if re.fullmatch(peer, one["implementation"]) and "median_us" in one:
                peers[str(one["shapes"])] = min(one["median_us"], peers.get(str(one["shapes"]), math.inf))
        over = [{"ratio": taken / ours[shapes]} for shapes, taken in peers.items() if shapes in ours]
        found = [one for one in over if holds(one, "ratio", ratio)]
    if not found:
        raise ValueError(f"{name}: expected a record with {wanted} in {file}, got none")
    return found


def holds(record: Record, field: str, wanted: Any) -> bool:
    """Return whether a record has a value in a field, or one of several or of a range: `{in: [1, 2]}`, `{least: 1}`."""
    value: Any = record
    for key in field.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    if not isinstance(wanted, Mapping) or wanted.keys() - {"in", "least", "most"}:
        return bool(value == wanted)
    least, most = wanted.get("least", -math.inf), wanted.get("most", math.inf)
    return value in wanted["in"] if "in" in wanted else value is not None and least <= value <= most


def numbers(value: Any) -> Iterator[Decimal]:
    """Yield all numbers in a record that a page may claim."""
    if isinstance(value, Mapping):
        value = [one for name, one in value.items() if name not in SETTINGS]
    if isinstance(value, list):
        for one in value:
            yield from numbers(one)
    elif isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
        yield Decimal(repr(value))


def in_records(claim: re.Match[str], known: Collection[Decimal]) -> bool:
    """Return whether every number of a claim is one of the values, in its unit and with the decimals shown."""
    unit = claim["unit"] and re.sub(r"\s", " ", claim["unit"])
    factors = [Decimal(factor) for factor in UNITS[unit]]

    def there(shown: str) -> bool:
        number = Decimal(shown.replace(",", ""))
        half = Decimal(1).scaleb(-len(shown.partition(".")[2])) / 2
        return any(abs(value * factor - number) <= half for value in known for factor in factors)

    return all(map(there, re.findall(NUMBER, claim[0])))


def value_of(place: str, of_all: str | None = None, over: str | None = None, factor: str | None = None) -> Decimal:
    """Return a figure of records.

    Args:
        place: the name in `docs/records.yaml`, then keys and places in lists, all separated by slashes. Keys may
            have slashes.
        of_all: what to take of all records of that name, a key of `OF_ALL`; the last one's figure otherwise.
        over: the place of a figure to divide by.
        factor: from the record's unit to the page's.

    Raises:
        ValueError: no such record, or no number in that place.
    """
    name, *keys = re.sub(r"\s+", " ", place).strip().split("/")
    by = names().get(name, {}).get("by", [])
    meant = [one for one in records_of(name) if all(str(one.get(field)) == key for field, key in zip(by, keys))]  # noqa: B905
    if not meant:
        raise ValueError(f"{place}: expected a record with such {', '.join(by)}, got none")
    found = [number_at(record, keys[len(by) :], place) for record in meant[0 if of_all else -1 :]]
    value = Decimal(repr(OF_ALL[of_all](found) if of_all else found[0])) * Decimal(factor or 1)
    return value / value_of(over) if over else value


def number_at(record: Record, keys: Sequence[str], place: str) -> float:
    """Return the number in a place of a record."""
    found: Any = record
    name = ""  # of a field; it may have slashes
    for key in keys:
        name = f"{name}/{key}" if name else key
        inside = range(len(found)) if isinstance(found, list) else found if isinstance(found, Mapping) else ()
        field = int(name) if isinstance(found, list) and name.isdigit() else name
        if field in inside:
            found, name = found[field], ""
    if name:
        raise ValueError(f"{place}: expected a number in the record, got nothing")
    if isinstance(found, bool) or not isinstance(found, (int, float)):
        raise ValueError(f"{place}: expected a number in the record, got {type(found).__name__}")
    return found


def shown_as(value: Decimal, shown: str) -> str:
    """Return a value with the decimals and the separators of another text."""
    decimals = len(shown.partition(".")[2])
    rounded = value.quantize(Decimal(1).scaleb(-decimals), ROUND_HALF_EVEN)
    return f"{rounded:,}" if "," in shown or abs(rounded) >= 10_000 else str(rounded)


def figure_of(source: str, shown: str) -> str:
    """Return the figure of a source, with the decimals and separators of what a page shows.

    Raises:
        ValueError: not a source, no such record, or no number in that place.
    """
    found = SOURCE.fullmatch(source)
    if found is None:
        raise ValueError(f"{source!r}: expected NAME/PLACE, got something else")
    return shown_as(value_of(*found.group("place", "of_all", "over", "factor")), shown)


def figures_of(text: str, entries: Sequence[Record]) -> tuple[list[Figure], list[str]]:
    """Return the figures of a page that its entries quote, in order, and words for entries that are not in the page."""
    figures: list[Figure] = []
    missing: list[str] = []
    last = 0
    for entry in entries:
        if "section" in entry:
            continue
        pattern = r"\s+".join(re.escape(word) for word in entry["text"].split()).replace(r"\{\}", f"({NUMBER})")
        found = re.compile(pattern).search(text, last)
        sources = entry["from"]
        if found is None or len(sources) != entry["text"].count("{}"):
            missing.append(f"expected {entry['text']!r} with {len(sources)} figures after the entry before, got none")
            continue
        for index, source in enumerate(sources, 1):
            figures.append(Figure(*found.span(index), source if isinstance(source, str) else None))
        last = found.end()
    return figures, missing


def written(text: str, entries: Sequence[Record]) -> str:
    """Return a page with its figures as the records have them."""
    for start, end, source in reversed(figures_of(text, entries)[0]):
        if source is not None:
            text = text[:start] + figure_of(source, text[start:end]) + text[end:]
    return text


def blanked(pattern: re.Pattern[str], text: str) -> str:
    """Return a text of the same lines and lengths without what a pattern finds."""
    return pattern.sub(lambda found: re.sub(r"[^\n]", " ", found[0]), text)


def problems(text: str, entries: Sequence[Record]) -> Iterator[tuple[int, str]]:
    """Yield lines and words for figures that differ from their records, and for claims without one."""

    def line(place: int) -> int:
        return text.count("\n", 0, place) + 1

    figures, missing = figures_of(text, entries)
    yield from ((1, words) for words in missing)
    blank = blanked(CODE, text)
    for start, end, source in figures:
        # A traced number keeps its length and its place, but is no claim any more.
        blank = blank[:start] + "x" * (end - start) + blank[end:]
        shown = text[start:end]
        try:
            expected = shown if source is None else figure_of(source, shown)
        except ValueError as error:
            yield line(start), str(error)
            continue
        if expected != shown:
            yield line(start), f"{source}: expected {expected}, got {shown}"
    sections = {entry["section"]: entry for entry in entries if "section" in entry}
    for section in SECTION.finditer(blank):
        heading = text[slice(*section.span("heading"))] if section["heading"] else ""
        said = sections.pop(heading, {})
        if "none" in said:
            continue
        known: set[Decimal] = set()
        try:
            known.update(*(numbers(record) for name in said.get("records", "").split() for record in records_of(name)))
        except ValueError as error:
            yield line(section.start()), str(error)
        for claim in CLAIMS.finditer(section[0]):
            if not in_records(claim, known):
                words = f"a claim that is in none of the {len(known)} values" if known else "a claim without a record"
                yield line(section.start() + claim.start()), f"{words}: {' '.join(claim[0].strip(' |*').split())}"
    yield from ((1, f"expected a section {name!r}, got none") for name in sections)


def pages() -> dict[str, list[Record]]:
    """Return the entries of each page, by its path in the repository."""
    entries: dict[str, list[Record]] = yaml.safe_load(FIGURES.read_text(encoding="utf-8"))
    paths = [ROOT / "README.md", *sorted(RECORDS.parent.glob("*.md"))]
    return {name: entries.get(name, []) for name in (str(path.relative_to(ROOT)) for path in paths)}


def main(argv: list[str] | None = None) -> int:
    """Check or write pages."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", nargs="*", help="default: README.md and docs/*.md")
    parser.add_argument("--write", action="store_true", help="put the records' figures in")
    args = parser.parse_args(argv)
    failed = False
    entries = pages()
    for name in args.pages or entries:
        page = ROOT / name
        text = page.read_text(encoding="utf-8")
        if args.write:
            with contextlib.suppress(ValueError):  # which is named below
                page.write_text(new := written(text, entries[name]), encoding="utf-8")
                text = new
        for place, words in sorted(problems(text, entries[name])):
            failed = True
            print(f"{name}:{place}: {words}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
