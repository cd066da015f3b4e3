"""The demo's requests: each can be read again, and its check tells right answers from wrong ones."""

import json
import re

import pytest

from medusa_decoding.cli.parsers import demo as parser
from medusa_decoding.demo import CHECKPOINT, checking
from medusa_decoding.demo.requests import EXAMPLES, KINDS, combinations, parse
from recipes.demo import requests, words
from recipes.demo.requests import answer, draw

CLASS, FUNCTION, COMMAND, QUERY = EXAMPLES


def fails(text, changed):
    """Whether the check of a request refuses an answer."""
    try:
        exec(parse(text).check(), {"answer": changed})
    except (Exception, SystemExit):
        return True
    return False


@pytest.mark.parametrize("held_out", [False, True])
def test_requests_can_be_read_and_their_answers_pass(held_out):
    for request in draw(400, 5, held_out=held_out):
        assert parse(request.text) == request
        assert not fails(request.text, answer(request)), request.text


def test_the_examples_are_one_of_each_kind_and_in_the_help():
    assert [type(parse(text)) for text in EXAMPLES] == list(KINDS)
    shown = [line.strip() for line in parser.__doc__.splitlines() if line.startswith("    Write ")]
    assert shown == list(EXAMPLES)
    quoted = re.search(r'--prompt "(.+?)"', parser.__doc__)[1]
    assert parse(quoted) is not None


@pytest.mark.parametrize(
    "text",
    [
        "",
        "def read_lines(path):",
        "Write a poem.",
        "Write a class invoice with number: int.",
        "Write a class None with number: int.",
        "Write a class Invoice with class: int.",
        "Write a class Invoice with number: int that is sorted by price.",
        "Write a function total(prices) that returns the sum of the squares of the odd values in costs.",
        "Write a function max(values) that returns the largest of the values in values.",
        "Write a class Invoice with number: int = 3 and total: int.",
        "Write a class Invoice with number: int and number: int.",
        "Write a command line parser with --help.",
        "Write SQL for orders(id, group): id.",
        "Write SQL for orders(id, total): sum of total by id, sorted by id downwards.",
        "Write SQL for orders(id, total): id where total is above 5 and total is below 3.",
        "Write SQL for orders(id, total): price.",
    ],
)
def test_what_is_none_of_them(text):
    assert parse(text) is None


@pytest.mark.parametrize(
    ("text", "before", "after"),
    [
        (CLASS, "self.customer = customer", "self.customer = number"),
        (CLASS, "{self.total!r}", "{self.number!r}"),
        (CLASS, "(self.number, self.customer, self.total) ==", "(self.number, self.customer, other.total) =="),
        (CLASS, '"customer": self.customer, ', ""),
        (CLASS, 'data["number"], data["customer"]', 'data["customer"], data["number"]'),
        (CLASS, "return False", "return True"),
        ("Write a class Point with x: float and y: float that is sorted by y.", "self.y < other.y", "self.x > other.x"),
        (FUNCTION, "value ** 2", "value ** 3"),
        (FUNCTION, "value % 2 == 1", "value % 2 == 0"),
        ("Write a function f(xs) that returns a list of the values above 7 in xs.", "> 7", ">= 7"),
        ("Write a function f(xs) that returns a list of the values below 7 in xs.", "< 7", "< 8"),
        ("Write a function f(xs) that returns a list of the words longer than 4 in xs.", "> 4", ">= 4"),
        (COMMAND, "default=3", "default=4"),
        (COMMAND, "type=int", "type=str"),
        (COMMAND, '"path"', '"--path"'),
        (QUERY, "> 100", ">= 100"),
        (QUERY, "GROUP BY customer", "GROUP BY id"),
        ("Write SQL for t(a, b): a where b is below 9 and a is equal to 5.", " AND a = 5", ""),
        ("Write SQL for t(a, b): a, sorted by b downwards.", " DESC", ""),
        ("Write SQL for t(a, b): a and b, at most 7.", "LIMIT 7", "LIMIT 6"),
    ],
)
def test_a_wrong_answer_fails(text, before, after):
    right = answer(parse(text))
    assert not fails(text, right)
    assert before in right
    assert fails(text, right.replace(before, after))


def test_sides_share_no_word_and_no_combination():
    every = words.stdlib_words()
    sides = [set(words.Words(every, held_out).words) for held_out in (False, True)]
    assert not sides[0] & sides[1]
    assert min(map(len, sides)) > 200
    for held_out in (False, True):
        # The words are those of the running Python's library, so other versions draw other requests.
        recorded = [json.loads(line)["request"] for line in (CHECKPOINT / "answers.jsonl").open()] if held_out else []
        for request in (*draw(200, 9, held_out=held_out), *map(parse, recorded)):
            names = {
                "class": lambda r: [*re.findall("[A-Z][a-z0-9]*", r.name), *(f.name for f in r.fields)],
                "function": lambda r: [r.name, r.argument],
                "command line": lambda r: [*r.arguments, *(o.name for o in r.options)],
                "query": lambda r: [r.table, *r.columns],
            }[request.kind](request)
            parts = {word.lower() for name in names for word in name.split("_")}
            assert {words.is_held_out(word) for word in parts} == {held_out}, request.text
            if request.kind == "function":
                task = " ".join(part.words for part in (request.result, request.each, request.which))
                assert words.is_held_out(task) == held_out
    held_out = sum(words.is_held_out(" ".join(part.words for part in one)) for one in combinations())
    assert 20 < held_out < 60


def test_the_file_that_is_written(tmp_path, monkeypatch):
    file = tmp_path / "new" / "requests.jsonl"
    for more in ([], ["--texts"], []):
        monkeypatch.setattr("sys.argv", ["requests", str(file), "--count", "40", "--seed", "3", *more])
        assert requests.main() == 0
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        assert len(lines) == 40
        if more:
            assert {text["text"][-7:] for text in lines} == {"<|end|>"}
            continue
        pairs = [[turn["value"] for turn in line["conversations"]] for line in lines]
        assert [answer(parse(asked)) for asked, _ in pairs] == [said for _, said in pairs]
        assert len({asked for asked, _ in pairs}) == 40
        first = file.read_bytes()
    assert file.read_bytes() == first
    with pytest.raises(ValueError, match="count: expected at least 1, got 0"):
        next(draw(0))


def test_an_answer_is_run():
    right = answer(parse(FUNCTION))
    assert checking.problem(parse(FUNCTION), right) is None
    wrong = checking.problem(parse(FUNCTION), right.replace("** 2", "** 3"))
    assert re.fullmatch(r"AssertionError: of \[.*\] it returns -?\d+ instead of \d+", wrong)
    assert checking.problem(parse(FUNCTION), "def total(prices)") == "SyntaxError: expected ':' (<string>, line 1)"


def test_an_answer_cannot_pretend(monkeypatch):
    monkeypatch.setattr(checking, "SECONDS", 2)
    request = parse(FUNCTION)
    for program in ("raise SystemExit(0)", "import os; os._exit(0)", "print('done'); exit()", ""):
        assert checking.problem(request, program), program
    assert checking.problem(request, "x = 'a' * 10**10") == "MemoryError"
    assert checking.problem(request, "raise ValueError('x' * 10**6)") == ("ValueError: " + "x" * 300)[:300]
    flood = "import sys\nsys.stdout.buffer.write(b'\\xff' * 10**8)\nprint('x' * 10**6)\n"
    assert checking.problem(request, flood + answer(request)) is None
    assert checking.problem(request, "while True: pass") in (
        "it did not end within 2 seconds", "its program ended early (exit status -9)",
    )  # fmt: skip


def test_an_answer_that_reads_its_arguments_says_why_it_ended():
    request = parse("Write a command line parser with path and --verbose.")
    program = answer(request).replace('"path"', '"path", nargs=2')
    assert checking.problem(request, program).endswith("error: the following arguments are required: path")


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        (
            "Write SQL for t(a, b): sum of a by b where b is above 100.",
            "SELECT b, MAX(a) FROM t WHERE b > 100 GROUP BY b;",
        ),
        ("Write SQL for t(a, b): a and b, at most 45.", "SELECT a, b FROM t;"),
        ("Write SQL for t(a, b): a where a is equal to 3 and b is equal to 5.", "SELECT a FROM t WHERE 0;"),
        ("Write SQL for t(a, b): b where a is above 100 and a is below 200.", "SELECT b FROM t WHERE a < 200;"),
        ("Write SQL for t(a, b): b where a is below 9, sorted by a.", "SELECT b FROM t WHERE a <= 9 ORDER BY a;"),
        ("Write SQL for t(a, b): b, sorted by a.", "SELECT b FROM t ORDER BY a DESC;"),
    ],
)
def test_wrong_queries_fail(text, wrong):
    assert checking.problem(parse(text), answer(parse(text))) is None
    assert checking.problem(parse(text), wrong) is not None


def test_an_answer_leaves_no_file_and_sees_no_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("SECRET", "x")
    target = tmp_path / "written"
    program = f"import os\nassert not {{'SECRET'}} & {{*os.environ}}\nopen({str(target)!r}, 'w').write('a' * 100000)"
    assert "File too large" in checking.problem(parse(FUNCTION), program)
    assert not target.exists() or target.stat().st_size == 0
