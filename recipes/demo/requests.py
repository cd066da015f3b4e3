"""Write requests for the demo model, with the answers that it learns, as conversations in a JSON lines file.

    python -m recipes.demo.requests runs/demo-model/requests.jsonl --count 200000
    python -m recipes.demo.requests runs/demo/held-out.jsonl --count 100 --held-out

Names are words of the standard library. Held-out requests have other names and ask for other combinations of things.
"""

from __future__ import annotations

import argparse
import json
import keyword
import random
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from medusa_decoding.demo.requests import (
    COMPARISONS,
    NUMBER_FILTERS,
    TYPES,
    ClassRequest,
    CommandRequest,
    Field,
    FunctionRequest,
    QueryRequest,
    Request,
    combinations,
)
from medusa_decoding.files import whole_file
from recipes.demo.base import END
from recipes.demo.words import Words, is_held_out, stdlib_words


def a_default(type: str, words: Words, chooser: random.Random) -> str:
    """Return a default value of a type as Python writes it."""
    if type == "str":
        return json.dumps(words.draw(chooser))
    if type == "float":
        return f"{chooser.randrange(100)}.{chooser.randrange(10)}"
    return {"int": str(chooser.randrange(1000)), "bool": chooser.choice(("True", "False"))}[type]


def fields(words: Words, chooser: random.Random, names: list[str], types: list[str], defaults: float) -> list[Field]:
    """Return fields, of which the last ones may have default values."""
    first = len(names) - sum(chooser.random() < defaults for _ in names)
    found = []
    for i, name in enumerate(names):
        of = chooser.choice(types if i < first else [type for type in types if type != "list"])
        found.append(Field(name, of, a_default(of, words, chooser) if i >= first else None))
    return found


def a_class(words: Words, chooser: random.Random) -> ClassRequest:
    """Draw a class."""
    while keyword.iskeyword(name := "".join(word.capitalize() for word in words.name(chooser).split("_"))):
        pass  # True, False and None
    names = words.names(chooser, chooser.choice((1, 2, 2, 3, 3, 3, 4, 4)))
    chosen = tuple(fields(words, chooser, names, [*TYPES], 0.3))
    by = chooser.choice(names) if chooser.random() < 0.3 else None
    return ClassRequest(name, chosen, chooser.random() < 0.4, by)


def a_function(words: Words, chooser: random.Random) -> FunctionRequest:
    """Draw a function."""
    allowed = [c for c in combinations() if is_held_out(" ".join(part.words for part in c)) == words.held_out]
    # Each condition as often as any other, and not as often as there are things to do with what it leaves.
    which = chooser.choice(sorted({c[2].words for c in allowed}))
    parts = chooser.choice([c for c in allowed if c[2].words == which])
    number = None
    if "N" in which:
        number = chooser.randint(2, 99 if parts[2] in NUMBER_FILTERS else 9)
    name, argument = words.names(chooser, 2)
    return FunctionRequest(name, argument, *parts, number)


def a_command(words: Words, chooser: random.Random) -> CommandRequest:
    """Draw a command line."""
    count = chooser.choice((2, 2, 3, 3, 3, 4, 4, 5))
    names = words.names(chooser, count)
    positional = chooser.choice((0, 1, 1, 1, 2))
    options = fields(words, chooser, names[positional:], ["int", "str", "float", "bool"], 1.0)
    options = [Field(o.name, o.type, "False") if o.type == "bool" else o for o in options]
    return CommandRequest(tuple(names[:positional]), tuple(options))


def a_query(words: Words, chooser: random.Random) -> QueryRequest:
    """Draw a query."""
    table, *columns = words.names(chooser, chooser.choice((3, 4, 4, 5, 5, 6)))
    conditions = tuple(
        (column, chooser.choice([*COMPARISONS]), chooser.randrange(1000))
        for column in chooser.sample(columns, chooser.choice((0, 1, 1, 1, 2)))
    )
    if chooser.random() < 0.3:
        total = chooser.choice(("sum", "max", "min", "count"))
        return QueryRequest(table, tuple(columns), tuple(chooser.sample(columns, 2)), total, conditions)
    wanted = tuple(chooser.sample(columns, chooser.randint(1, min(3, len(columns)))))
    by = chooser.choice((None, chooser.choice(columns)))
    limit = chooser.randint(1, 50) if chooser.random() < 0.4 else None
    return QueryRequest(
        table, tuple(columns), wanted, None, conditions, by, by is not None and chooser.random() < 0.5, limit
    )


DRAWS: tuple[Callable[[Words, random.Random], Request], ...] = (a_class, a_function, a_command, a_query)


def answer(request: Any) -> str:
    """Return the answer to a request."""
    return {
        ClassRequest: class_answer, FunctionRequest: function_answer, CommandRequest: command_answer,
        QueryRequest: query_answer,
    }[type(request)](request)  # fmt: skip


def class_answer(request: ClassRequest) -> str:
    """Return the class."""
    names = [field.name for field in request.fields]
    shown = ", ".join(f"{{self.{name}!r}}" for name in names)
    lines = [
        f"class {request.name}:",
        f"    def __init__(self, {', '.join(map(str, request.fields))}):",
        *(f"        self.{name} = {name}" for name in names),
        "",
        "    def __repr__(self):",
        f'        return f"{request.name}({shown})"',
        "",
        "    def __eq__(self, other):",
        f"        if not isinstance(other, {request.name}):",
        "            return False",
        f"        return {_tuple('self', names)} == {_tuple('other', names)}",
    ]
    if request.sorted_by is not None:
        by = request.sorted_by
        lines += ["", "    def __lt__(self, other):", f"        return self.{by} < other.{by}"]
    if request.converts:
        pairs = ", ".join(f'"{name}": self.{name}' for name in names)
        lines += [
            "",
            "    def to_dict(self):",
            f"        return {{{pairs}}}",
            "",
            "    @classmethod",
            "    def from_dict(cls, data):",
            "        return cls(" + ", ".join(f'data["{name}"]' for name in names) + ")",
        ]
    return "\n".join(lines)


def _tuple(of: str, names: list[str]) -> str:
    inner = ", ".join(f"{of}.{name}" for name in names)
    return inner if len(names) == 1 else f"({inner})"


def function_answer(request: FunctionRequest) -> str:
    """Return the function."""
    one = "value" if request.which in NUMBER_FILTERS else "word"
    condition = request.which.code.replace("N", str(request.number))
    lines = [f"def {request.name}({request.argument}):", f'    """Return {request.task}."""']
    if condition:
        lines.append(f"    chosen = [{one} for {one} in {request.argument} if {condition}]")
    each = f"{request.each.code} for {one} in {'chosen' if condition else request.argument}"
    lines.append(f"    return {request.result.code.format(x=each)}")
    return "\n".join(lines)


def command_answer(request: CommandRequest) -> str:
    """Return a function that parses the command line."""
    lines = ["import argparse", "", "", "def parse(argv=None):", "    parser = argparse.ArgumentParser()"]
    lines += [f'    parser.add_argument("{name}")' for name in request.arguments]
    for option in request.options:
        how = 'action="store_true"' if option.type == "bool" else f"type={option.type}, default={option.default}"
        lines.append(f'    parser.add_argument("--{option.name}", {how})')
    return "\n".join([*lines, "    return parser.parse_args(argv)"])


def query_answer(request: QueryRequest) -> str:
    """Return the query."""
    if request.total is None:
        lines = [f"SELECT {', '.join(request.wanted)}"]
    else:
        value, group = request.wanted
        lines = [f"SELECT {group}, {request.total.upper()}({value})"]
    lines.append(f"FROM {request.table}")
    if request.where:
        conditions = [f"{column} {COMPARISONS[word][0]} {number}" for column, word, number in request.where]
        lines.append("WHERE " + " AND ".join(conditions))
    if request.total is not None:
        lines.append(f"GROUP BY {request.wanted[1]}")
    if request.by is not None:
        lines.append(f"ORDER BY {request.by}{' DESC' if request.descending else ''}")
    if request.limit is not None:
        lines.append(f"LIMIT {request.limit}")
    return "\n".join(lines) + ";"


def draw(count: int, seed: int = 0, *, held_out: bool = False) -> Iterator[Request]:
    """Draw different requests, of each kind in turn.

    Args:
        count: how many.
        seed: of the choice.
        held_out: those with names and combinations that training never has.

    Raises:
        ValueError: a count below 1.
    """
    if count < 1:
        raise ValueError(f"count: expected at least 1, got {count}")
    # Held-out requests are as people write them: with few words that do not exist.
    words = Words(stdlib_words(), held_out, made_up=0.1 if held_out else 0.6)
    chooser, seen = random.Random(seed), set()
    while len(seen) < count:
        request = DRAWS[len(seen) % len(DRAWS)](words, chooser)
        if request.text not in seen:
            seen.add(request.text)
            yield request


def encoded(tokenizer: Any, requests: Iterable[Request]) -> list[torch.Tensor]:
    """Return the prompts of requests as the model was trained on them, int64 [1, T] each."""
    messages = ([{"role": "user", "content": request.text}] for request in requests)
    texts = (tokenizer.apply_chat_template(one, add_generation_prompt=True, tokenize=False) for one in messages)
    return [tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids for text in texts]


def asked(request: Request, chooser: random.Random) -> str:
    """Return a request as people write it: now and then without the capital or the full stop."""
    text = request.text
    if chooser.random() < 0.1:
        text = text[0].lower() + text[1:]
    return text.removesuffix(".") if chooser.random() < 0.1 else text


def main() -> int:
    """Write the file that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="to write, JSON lines")
    parser.add_argument("--count", type=int, default=1000, help="requests (default: 1000)")
    parser.add_argument("--seed", type=int, default=0, help="of the choice (default: 0)")
    parser.add_argument("--held-out", action="store_true", help="with names and combinations that training never has")
    parser.add_argument(
        "--texts", action="store_true", help="as texts without roles: a request, a line break, its answer"
    )
    args = parser.parse_args()
    args.file.parent.mkdir(parents=True, exist_ok=True)
    chooser = random.Random(args.seed)
    with whole_file(args.file) as part, open(part, "w", encoding="utf-8") as lines:
        for request in draw(args.count, args.seed, held_out=args.held_out):
            turns = {"human": asked(request, chooser), "gpt": answer(request)}
            record: dict[str, Any] = {"conversations": [{"from": who, "value": said} for who, said in turns.items()]}
            lines.write(json.dumps({"text": "\n".join(turns.values()) + END} if args.texts else record) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
