"""benchmarks.trace: figures follow their records, and claims need one."""

import pytest

from benchmarks import trace

KERNEL, PEER = "medusa_kernels", "torch"
TIMED = [
    {"benchmark": "op", "implementation": name, "shapes": {"nodes": nodes}, "median_us": taken}
    for nodes, name, taken in [
        (1, KERNEL, 10.0),
        (1, PEER, 12.0),
        (16, KERNEL, 20.0),
        (16, PEER, 50.0),
        (64, KERNEL, 9.0),
    ]
]
RECORD = {
    "benchmark": "demo",
    "best": {"ratio": {"ratio": 3.674, "low": 3.491}, "a/b": {"seeds": 7}},
    "median_us": 3850.4,
    "list": [1, 0.5],
}


@pytest.fixture(autouse=True)
def _records(monkeypatch):
    older = RECORD | {"median_us": 1.0, "list": [1, 0.5]}
    other = RECORD | {"benchmark": "other"}
    names = {
        "demo": {"file": "here", "benchmark": "demo"},
        "over": {"file": "here", "benchmark": "op", "over": "tor.*"},
        "over-16": {"file": "here", "benchmark": "op", "shapes.nodes": {"in": [16, 64]}, "over": "tor.*"},
        "over-slow": {"file": "here", "benchmark": "op", "over": "tor.*", "ratio": {"least": 2}},
        "op-quick": {"file": "here", "implementation": KERNEL, "median_us": {"most": 15}},
        "op-by": {"file": "here", "benchmark": "op", "by": ["implementation", "benchmark"]},
        "op-16": {"file": "here", "implementation": KERNEL, "shapes.nodes": 16},
    }
    monkeypatch.setattr(trace, "names", lambda: names)
    monkeypatch.setattr(trace, "records", lambda file: {"here": [older, RECORD, other, *TIMED]}[file])


def entry(text, *sources):
    return {"text": text, "from": list(sources)}


@pytest.mark.parametrize(
    ("source", "before", "after"),
    [
        ("demo/best/ratio/ratio", "9.99", "3.67"),
        ("demo/best/ratio/ratio", "9.9", "3.7"),
        ("demo/median_us*1e-3", "1.00", "3.85"),
        ("demo/median_us", "1,000", "3,850"),
        ("demo/list/1*100", "1", "50"),
        ("demo/best/a/b/seeds", "1", "7"),
        ("min over/ratio", "9.99", "1.20"),
        ("median over/ratio", "9.99", "1.85"),
        ("count over-slow/ratio", "9", "1"),
        ("max op-quick/median_us", "1", "10"),
        ("max over-16/ratio", "9.9", "2.5"),
        ("op-by/torch/op/median_us", "9", "50"),
        ("min op-by/torch/op/median_us", "9", "12"),
        ("op-16/median_us : demo/list/1*1e-1", "9.9", "4.0"),
    ],
)
def test_figures_are_written_as_the_page_shows_them(source, before, after):
    entries = [entry("takes {} times", source)]
    page = "It takes **2** steps, then\n  takes {} times as long."
    assert trace.written(page.format(before), entries) == page.format(after)
    assert list(trace.problems(page.format(after), entries)) == []
    assert list(trace.problems(page.format(before), entries)) == [(2, f"{source}: expected {after}, got {before}")]


RATIO = "demo/best/ratio/ratio"


@pytest.mark.parametrize(
    ("text", "entries", "problem"),
    [
        ("1", [entry("{}", "nobody/x")], (1, "nobody: expected a name of docs/records.yaml, got another")),
        ("1", [entry("{}", "demo/best/none")], (1, "demo/best/none: expected a number in the record, got nothing")),
        ("1", [entry("{}", "demo/best")], (1, "demo/best: expected a number in the record, got dict")),
        (
            "3.67 a",
            [entry("{} a", RATIO), entry("{} b", RATIO)],
            (1, "expected '{} b' with 1 figures after the entry before, got none"),
        ),
        ("It is 1.35 times\nas fast", [], (1, "a claim without a record: 1.35 times")),
        ("takes 3\nms", [], (1, "a claim without a record: 3 ms")),
        ("gave 0.99 (0.98 to 1.00) greedily", [], (1, "a claim without a record: 0.99 (0.98 to 1.00)")),
        ("a\n\n| x | **2.24** |\n", [], (3, "a claim without a record: 2.24")),
        ("from 1.5 to 3 %", [], (1, "a claim without a record: 1.5 to 3 %")),
        (
            "# A\n2 times\n## B\n3 times",
            [{"section": "# A", "none": "why"}],
            (4, "a claim without a record: 3 times"),
        ),
        (
            "2 times, 3 times",
            [entry("{} times,", {"none": "a setting"})],
            (1, "a claim without a record: 3 times"),
        ),
        (
            "# A\n3.67 (3.48 to 3.85)",
            [{"section": "# A", "records": "demo"}],
            (2, "a claim that is in none of the 5 values: 3.67 (3.48 to 3.85)"),
        ),
        ("# A\n", [{"section": "## B", "none": "why"}], (1, "expected a section '## B', got none")),
    ],
)
def test_what_is_wrong_is_named_with_its_line(text, entries, problem):
    assert list(trace.problems(text, entries)) == [problem]


@pytest.mark.parametrize(
    "text",
    [
        "```console\n$ run\n3.67 times\n```",
        "`3 times`",
        "version 0.2 of torch 2.13.0, section 2.3.1, 64 nodes, batch 1",
        "with a 95 % bootstrap interval",
        "# A\n3.67 times in 3.85 ms, 50 %; 3.7 (3.5 to 3.7)",
    ],
)
def test_what_is_no_claim(text):
    assert list(trace.problems(text, [{"section": "# A", "records": "demo"}] if text.startswith("# A") else [])) == []
