"""The requests that the embedded model was trained for, and how an answer to one is checked.

A request is a sentence of a small language. `parse` reads it; `check` of what it returns is a Python program that fails
with a message if the answer is wrong. It is run by `demo.checking`, apart from this process.
"""

# ruff: noqa: D102  (what `Request` says of its methods holds for all kinds)

from __future__ import annotations

import ast
import builtins
import itertools
import keyword
import operator
import random
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

NAME = rf"(?!(?:{'|'.join(keyword.kwlist)})\b)[a-z_][a-z0-9_]*"
_SQL = """
    abort action add after all alter always analyze and any as asc attach autoincrement before begin between by
    cascade case cast check collate column commit conflict constraint create cross current database default deferrable
    deferred delete desc detach distinct do drop each else end escape except exclude exclusive exists explain fail
    filter first following for foreign from full generated glob group groups having if ignore immediate in index
    indexed initially inner insert instead intersect into is isnull join key last left like limit match materialized
    natural no not nothing notnull null nulls of offset on or order others outer over partition plan pragma preceding
    primary query raise range recursive references regexp reindex release rename replace restrict returning right
    rollback row rows savepoint select set table temp temporary then ties to transaction trigger unbounded union
    unique update using vacuum values view virtual when where window with without count max min sum
"""
SQL = frozenset(_SQL.split())
"""Words of SQL; they name nothing."""

TYPES = {"int": (3, 8), "str": ("a", "b"), "float": (0.5, 2.5), "bool": (False, True), "list": ([1], [2, 3])}
"""Types of fields and options, with two different values of each."""


class Request(ABC):
    """One request.

    Attributes:
        kind: its kind in words.
    """

    kind: ClassVar[str]

    @property
    @abstractmethod
    def text(self) -> str:
        """The request as a sentence, which `read` understands."""

    @classmethod
    @abstractmethod
    def read(cls, text: str) -> Request | None:
        """Return the request that a sentence makes, or None if it is of another kind or form."""

    @abstractmethod
    def check(self) -> str:
        """Return a program that fails if the text in its variable `answer` does not do what is asked."""


def joined(parts: Sequence[str]) -> str:
    """Return a list in words: "a, b and c"."""
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


def divided(text: str) -> list[str]:
    """Return the parts of a list in words."""
    *first, last = text.split(", ")
    return [*first, *last.split(" and ", 1)]


@dataclass(frozen=True)
class Field:
    """A field of a class, or an option of a command, with its default value as Python writes it (None: required)."""

    name: str
    type: str
    default: str | None = None

    def __str__(self) -> str:
        return f"{self.name}: {self.type}" + ("" if self.default is None else f" = {self.default}")

    @classmethod
    def read(cls, text: str) -> Field | None:
        """Return the field that a text such as "total: float = 0.5" describes."""
        found = re.fullmatch(rf"({NAME}): ({'|'.join(TYPES)})(?: = ([^,]{{1,99}}))?", text)
        if found is None or not (found[3] is None or is_literal(found[3], found[2])):
            return None
        return cls(*found.groups())


def is_literal(text: str, type: str) -> bool:
    """Return whether Python reads a text as a value of a type that can be a default; a list cannot."""
    try:
        return ast.literal_eval(text).__class__.__name__ == type != "list"
    except (ValueError, SyntaxError):
        return False


@dataclass(frozen=True)
class ClassRequest(Request):
    """A class with its boilerplate.

    Attributes:
        name: of the class.
        fields: its fields.
        converts: with `to_dict` and `from_dict`.
        sorted_by: the field that orders objects, or None.
    """

    kind = "class"
    name: str
    fields: tuple[Field, ...]
    converts: bool = False
    sorted_by: str | None = None

    @property
    def text(self) -> str:
        extra = " that converts to and from a dict" if self.converts else ""
        if self.sorted_by is not None:
            extra += f"{' and is' if extra else ' that is'} sorted by {self.sorted_by}"
        return f"Write a class {self.name} with {joined([str(field) for field in self.fields])}{extra}."

    @classmethod
    def read(cls, text: str) -> ClassRequest | None:
        found = re.fullmatch(
            r"Write a class (?!(?:None|True|False) )([A-Z][A-Za-z0-9]*) with (.+?)"
            rf"( that converts to and from a dict)?(?: (?:that|and) is sorted by ({NAME}))?\.",
            text,
        )
        if found is None:
            return None
        fields = [Field.read(part) for part in divided(found[2])]
        known = tuple(field for field in fields if field is not None)
        names = [field.name for field in known]
        defaults = [field.default is not None for field in known]
        if len(known) < len(fields) or (found[4] and found[4] not in names) or defaults != sorted(defaults):
            return None
        if len(set(names)) < len(names) or "self" in names:
            return None
        return cls(found[1], known, bool(found[3]), found[4])

    def check(self) -> str:
        names = [field.name for field in self.fields]
        firsts, seconds = ([TYPES[field.type][i] for field in self.fields] for i in (0, 1))
        required = [first for field, first in zip(self.fields, firsts, strict=True) if field.default is None]
        lines = [
            "exec(answer, made := {})",
            f"make, names, firsts, seconds = made[{self.name!r}], {names}, {firsts}, {seconds}",
            "one, other = make(*firsts), make(*seconds)",
            "assert [getattr(one, name) for name in names] == firsts, 'a field has another value than was given'",
            "assert make(**dict(zip(names, firsts))) == one, 'equal objects are not equal'",
            "assert one != other and one != 1, 'different objects are equal'",
            "for i in range(len(names)):",
            "    assert make(*firsts[:i], seconds[i], *firsts[i + 1:]) != one, f'{names[i]} is not compared'",
            "assert eval(repr(one), made) == one, f'repr gives {one!r}'",
        ]
        lines += [
            f"assert make(*{required}).{field.name} == {field.default}, 'another default of {field.name}'"
            for field in self.fields
            if field.default is not None
        ]
        if self.converts:
            lines.append("assert one.to_dict() == dict(zip(names, firsts)), f'to_dict gives {one.to_dict()}'")
            lines.append("assert make.from_dict(one.to_dict()) == one, 'from_dict gives another object'")
        if self.sorted_by is not None:
            lines.append("assert sorted([other, one])[0] == one and not other < one, 'sorted in another order'")
        return "\n".join(lines)


@dataclass(frozen=True)
class Part:
    """A part of what a function does: its words, its Python with `{x}` for a value, and its meaning.

    N in words and code is a number of the request.
    """

    words: str
    code: str
    run: Callable[..., Any]


NUMBER_FILTERS = (
    Part("values", "", lambda x, n: True),
    Part("even values", "value % 2 == 0", lambda x, n: x % 2 == 0),
    Part("odd values", "value % 2 == 1", lambda x, n: x % 2 == 1),
    Part("positive values", "value > 0", lambda x, n: x > 0),
    Part("negative values", "value < 0", lambda x, n: x < 0),
    Part("values above N", "value > N", lambda x, n: x > n),
    Part("values below N", "value < N", lambda x, n: x < n),
    Part("multiples of N", "value % N == 0", lambda x, n: x % n == 0),
)
"""Which numbers of a list count."""
WORD_FILTERS = (
    Part("words", "", lambda x, n: True),
    Part("words longer than N", "len(word) > N", lambda x, n: len(x) > n),
    Part("words shorter than N", "len(word) < N", lambda x, n: len(x) < n),
    Part("words in capitals", "word.isupper()", lambda x, n: x.isupper()),
    Part("words without digits", "word.isalpha()", lambda x, n: x.isalpha()),
)
"""Which words of a list count."""
NUMBER_MAPS = (
    Part("the", "value", lambda x: x),
    Part("the squares of the", "value ** 2", lambda x: x**2),
    Part("the cubes of the", "value ** 3", lambda x: x**3),
    Part("the doubles of the", "2 * value", lambda x: 2 * x),
    Part("the absolute values of the", "abs(value)", abs),
    Part("the last digits of the", "abs(value) % 10", lambda x: abs(x) % 10),
)
"""What is taken of each number."""
LENGTHS = Part("the lengths of the", "len(word)", len)
WORD_MAPS = (
    Part("the", "word", lambda x: x),
    LENGTHS,
    Part("the capitals of the", "word.upper()", str.upper),
    Part("the first letters of the", "word[0]", lambda x: x[0]),
    Part("the reversals of the", "word[::-1]", lambda x: x[::-1]),
)
"""What is taken of each word."""
LISTS = (
    Part("a list of", "[{x}]", list),
    Part("a sorted list of", "sorted({x})", sorted),
    Part("the number of", "len([{x}])", len),
)
TOTALS = (
    Part("the sum of", "sum({x})", sum),
    Part("the largest of", "max([{x}], default=None)", lambda xs: max(xs, default=None)),
    Part("the smallest of", "min([{x}], default=None)", lambda xs: min(xs, default=None)),
)
"""What becomes of them all: of anything, and of numbers."""


@dataclass(frozen=True)
class FunctionRequest(Request):
    """A function of a list of numbers or words.

    Attributes:
        name: of the function.
        argument: its argument, a list.
        result, each, which: what it does.
        number: the N of the condition.
    """

    kind = "function"
    name: str
    argument: str
    result: Part
    each: Part
    which: Part
    number: int | None = None

    @property
    def task(self) -> str:
        """What the function returns, in words."""
        which = self.which.words.replace("N", str(self.number))
        return f"{self.result.words} {self.each.words} {which} in {self.argument}"

    @property
    def text(self) -> str:
        return f"Write a function {self.name}({self.argument}) that returns {self.task}."

    @classmethod
    def read(cls, text: str) -> FunctionRequest | None:
        found = re.fullmatch(rf"Write a function ({NAME})\(({NAME})\) that returns (.+) in \2\.", text)
        if found is None or {found[1], found[2]} & {*dir(builtins)}:
            return None
        for parts in combinations():
            digits = 9 if parts[2] in NUMBER_FILTERS else 3
            words = re.escape(" ".join(part.words for part in parts)).replace("N", rf"(\d{{1,{digits}}})")
            if (task := re.fullmatch(words, found[3])) is not None:
                return cls(found[1], found[2], *parts, *map(int, task.groups()))
        return None

    def check(self) -> str:
        chooser = random.Random(0)
        number = self.number or 0
        if self.which in NUMBER_FILTERS:
            drawn = [[chooser.randrange(-99, 100) for _ in range(20)] for _ in range(4)]
            lists: list[list[Any]] = [[], [number - 1, number, number + 1, 2 * number], *drawn]
        else:
            words = ["AB", "abc", "kayak", "X1", "a2b", "ZEBRA", "longer", "considerably"]
            letters = [*words, "b" * (number + 1), "C" * number]
            lists = [[], *([w for w in chooser.sample(letters, len(letters)) if w] for _ in range(4))]
        lines = ["exec(answer, made := {})"]
        for values in lists:
            kept = [self.each.run(x) for x in values if self.which.run(x, number)]
            lines += [
                f"given = {values}",
                f"got, expected = made[{self.name!r}](list(given)), {self.result.run(kept)!r}",
                "assert got == expected, f'of {given} it returns {got!r} instead of {expected!r}'",
            ]
        return "\n".join(lines)


def combinations() -> Iterator[tuple[Part, Part, Part]]:
    """Go through what functions can do: what becomes of which values of which elements of a list."""
    for each, which in itertools.product(NUMBER_MAPS, NUMBER_FILTERS):
        yield from ((result, each, which) for result in (*LISTS, *TOTALS))
    for each, which in itertools.product(WORD_MAPS, WORD_FILTERS):
        yield from ((result, each, which) for result in (*LISTS, *(TOTALS if each is LENGTHS else ())))


@dataclass(frozen=True)
class CommandRequest(Request):
    """The parser of a command line.

    Attributes:
        arguments: names of its positional arguments.
        options: with their types and default values; a type of bool is a flag.
    """

    kind = "command line"
    arguments: tuple[str, ...]
    options: tuple[Field, ...]

    @property
    def text(self) -> str:
        options = [f"--{option.name}" if option.type == "bool" else f"--{option}" for option in self.options]
        return f"Write a command line parser with {joined([*self.arguments, *options])}."

    @classmethod
    def read(cls, text: str) -> CommandRequest | None:
        found = re.fullmatch(r"Write a command line parser with (.+)\.", text)
        if found is None:
            return None
        arguments: list[str] = []
        options: list[Field] = []
        for part in divided(found[1]):
            if re.fullmatch(NAME, part):
                arguments.append(part)
            elif re.fullmatch(rf"--{NAME}", part):
                options.append(Field(part[2:], "bool", "False"))
            elif part.startswith("--") and (option := Field.read(part[2:])) and option.type not in ("bool", "list"):
                options.append(option)
            else:
                return None
        names = [*arguments, *(option.name for option in options)]
        if len(set(names)) < len(names) or "help" in names:
            return None
        return cls(tuple(arguments), tuple(options))

    def check(self) -> str:
        given = [f"word{i}" for i in range(len(self.arguments))]
        parsed = dict(zip(self.arguments, given, strict=True))
        defaults = "".join(f", {option.name!r}: {option.default}" for option in self.options)
        argv = list(given)
        chosen: dict[str, Any] = dict(parsed)
        for option in self.options:
            value = TYPES[option.type][1]
            argv += [f"--{option.name}"] + ([] if option.type == "bool" else [str(value)])
            chosen[option.name] = value
        return "\n".join([
            "exec(answer, made := {})",
            f"got, expected = vars(made['parse']({given})), {{**{parsed}{defaults}}}",
            "assert got == expected, f'without options: {got} instead of {expected}'",
            f"got, expected = vars(made['parse']({argv})), {chosen}",
            "assert got == expected, f'with all options: {got} instead of {expected}'",
        ])  # fmt: skip


COMPARISONS = {"above": (">", operator.gt), "below": ("<", operator.lt), "equal to": ("=", operator.eq)}
"""Words of conditions, with SQL and Python for them."""


@dataclass(frozen=True)
class QueryRequest(Request):
    """A query of one table in SQL.

    Attributes:
        table: its name.
        columns: its columns, which hold numbers.
        wanted: columns to return, or `(function, column, group)` of a total: ("sum", "total", "customer").
        where: conditions `(column, word of COMPARISONS, number)`, all of which must hold.
        by: the column to sort by, or None; not with a total.
        descending: sort from the largest.
        limit: most rows, or None.
    """

    kind = "query"
    table: str
    columns: tuple[str, ...]
    wanted: tuple[str, ...]
    total: str | None = None
    where: tuple[tuple[str, str, int], ...] = ()
    by: str | None = None
    descending: bool = False
    limit: int | None = None

    @property
    def text(self) -> str:
        what = joined(self.wanted) if self.total is None else f"{self.total} of {self.wanted[0]} by {self.wanted[1]}"
        if self.where:
            what += " where " + " and ".join(f"{column} is {word} {number}" for column, word, number in self.where)
        if self.by is not None:
            what += f", sorted by {self.by}" + (" downwards" if self.descending else "")
        if self.limit is not None:
            what += f", at most {self.limit}"
        return f"Write SQL for {self.table}({', '.join(self.columns)}): {what}."

    @classmethod
    def read(cls, text: str) -> QueryRequest | None:
        found = re.fullmatch(
            rf"Write SQL for ({NAME})\(((?:{NAME}, )*{NAME})\): (?:(sum|max|min|count) of ({NAME}) by ({NAME})|(.+?))"
            rf"(?: where (.+?))?(?:, sorted by ({NAME})( downwards)?)?(?:, at most (\d{{1,3}}))?\.",
            text,
        )
        if found is None:
            return None
        where = []
        for condition in found[7].split(" and ") if found[7] else []:
            parts = re.fullmatch(rf"({NAME}) is ({'|'.join(COMPARISONS)}) (\d{{1,9}})", condition)
            if parts is None:
                return None
            where.append((parts[1], parts[2], int(parts[3])))
        columns = tuple(found[2].split(", "))
        wanted = (found[4], found[5]) if found[3] else tuple(divided(found[6]))
        limit = int(found[10]) if found[10] else None
        used = {*wanted, *(column for column, _, _ in where), *([found[8]] if found[8] else [])}
        if not used <= set(columns) or len(set(columns)) < len(columns) or SQL & {found[1], *columns}:
            return None
        if found[3] and (found[8] or limit is not None):
            return None
        request = cls(found[1], columns, wanted, found[3], tuple(where), found[8], bool(found[9]), limit)
        return request if all(request._kept_values(column, 0) for column in columns) else None

    def _draw(self, column: str, count: int, chooser: random.Random) -> list[int]:
        """Return values of a column in rows of which the first half meets all conditions, if that many values do.

        The others are at the borders of the conditions and beyond. Values to sort by are all different, groups few.
        """
        numbers = [number for name, _, number in self.where if name == column]
        good = self._kept_values(column, count)
        if self.by == column:
            first = chooser.sample(good, min(count // 2, len(good)))
            others = {*range(min(good) - 2 * count, max(good) + 2 * count)} - {*first}
            borders = [n + i for n in numbers for i in (-1, 0, 1) if n + i in others][: count // 4]
            rest = chooser.sample(sorted(others - {*borders}), count - len(first) - len(borders))
            return [*first, *borders, *rest]
        if self.total is not None and column == self.wanted[1]:
            good = chooser.sample(good, min(4, len(good)))
        others_too = [*good[:4], *(n + i for n in numbers for i in (-1, 0, 1))]
        return [chooser.choice(good if i < count // 2 else others_too) for i in range(count)]

    def _kept_values(self, column: str, around: int) -> list[int]:
        """Return values that meet all conditions of a column, not far from their numbers."""
        numbers = [number for name, _, number in self.where if name == column] or [500]
        values = {number + i for number in numbers for i in range(-around - 1, around + 2)}
        return [value for value in sorted(values) if self._keeps({column: value})]

    def _keeps(self, row: Mapping[str, int]) -> bool:
        """Return whether a row, or some columns of one, meet the conditions."""
        return all(COMPARISONS[word][1](row[name], number) for name, word, number in self.where if name in row)

    def check(self) -> str:
        chooser = random.Random(0)
        count = 40 + 3 * (self.limit or 0)
        drawn = {column: self._draw(column, count, chooser) for column in self.columns}
        rows = [dict(zip(drawn, values, strict=True)) for values in zip(*drawn.values(), strict=True)]
        chooser.shuffle(rows)
        kept = [row for row in rows if self._keeps(row)]
        assert kept, "a check of a query that returns nothing says nothing"
        if (by := self.by) is not None:
            kept.sort(key=lambda row: row[by], reverse=self.descending)
        if self.total is None:
            expected = [tuple(row[column] for column in self.wanted) for row in kept]
        else:
            value, group = self.wanted
            groups = sorted({row[group] for row in kept})
            run: Any = {"sum": sum, "max": max, "min": min, "count": len}[self.total]
            expected = [(g, run([row[value] for row in kept if row[group] == g])) for g in groups]
        ordered = self.by is not None
        return "\n".join([
            "import sqlite3",
            "database = sqlite3.connect(':memory:')",
            f"database.execute('CREATE TABLE {self.table} ({', '.join(self.columns)})')",
            f"rows = {[tuple(row.values()) for row in rows]}",
            f"database.executemany('INSERT INTO {self.table} VALUES ({', '.join('?' * len(self.columns))})', rows)",
            f"got, expected, limit = database.execute(answer).fetchall(), {expected}, {self.limit}",
            "assert limit is None or len(got) == min(limit, len(expected)), f'{len(got)} rows'",
            "assert set(got) <= set(expected), f'it returns {got}, expected {expected}'",
            f"assert {not ordered} or got == expected[:limit], f'it returns {{got}}, expected {{expected[:limit]}}'",
            "assert limit is not None or sorted(got) == sorted(expected), f'it returns {got}, expected {expected}'",
        ])  # fmt: skip


KINDS: tuple[type[Request], ...] = (ClassRequest, FunctionRequest, CommandRequest, QueryRequest)
EXAMPLES = (
    "Write a class Invoice with number: int, customer: str and total: float = 0.0 that converts to and from a dict.",
    "Write a function total(prices) that returns the sum of the squares of the odd values in prices.",
    "Write a command line parser with path, --count: int = 3 and --verbose.",
    "Write SQL for orders(id, customer, total): sum of total by customer where total is above 100.",
)
"""One request of each kind."""


def parse(text: str) -> Request | None:
    """Return the request that a text makes, or None if it is of no kind that the model knows."""
    sentence = text.strip()
    sentence = sentence[:1].upper() + sentence[1:].removesuffix(".") + "."
    return next((request for kind in KINDS if (request := kind.read(sentence)) is not None), None)
