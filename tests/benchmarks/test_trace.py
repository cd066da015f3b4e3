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


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("9.99<!--=demo/best/ratio/ratio--> times", "3.67<!--=demo/best/ratio/ratio--> times"),
        ("9.9<!--=demo/best/ratio/ratio-->", "3.7<!--=demo/best/ratio/ratio-->"),
        ("1.00<!--=demo/median_us*1e-3--> ms", "3.85<!--=demo/median_us*1e-3--> ms"),
        ("1,000<!--=demo/median_us--> µs", "3,850<!--=demo/median_us--> µs"),
        ("1<!--=demo/list/1*100--> %", "50<!--=demo/list/1*100--> %"),
        ("1<!--=demo/best/a/b/seeds--> s", "7<!--=demo/best/a/b/seeds--> s"),
        ("9.99<!--=min over/ratio--> times", "1.20<!--=min over/ratio--> times"),
        ("9.99<!--=max over/ratio--> times", "2.50<!--=max over/ratio--> times"),
        ("9.99<!--=median over/ratio--> times", "1.85<!--=median over/ratio--> times"),
        ("9<!--=count over/ratio--> cases", "2<!--=count over/ratio--> cases"),
        ("9<!--=count over-slow/ratio--> cases", "1<!--=count over-slow/ratio--> cases"),
        ("1<!--=max op-quick/median_us--> us", "10<!--=max op-quick/median_us--> us"),
        ("9.9<!--=max over-16/ratio--> times", "2.5<!--=max over-16/ratio--> times"),
        ("9<!--=op-by/torch/op/median_us--> us", "50<!--=op-by/torch/op/median_us--> us"),
        ("9<!--=min op-by/torch/op/median_us--> us", "12<!--=min op-by/torch/op/median_us--> us"),
        ("9.9<!--=op-16/median_us : demo/list/1--> times", "40.0<!--=op-16/median_us : demo/list/1--> times"),
        ("9.9<!--=op-16/median_us : demo/list/1*1e-1--> x", "4.0<!--=op-16/median_us : demo/list/1*1e-1--> x"),
    ],
)
def test_figures_are_written_as_the_page_shows_them(text, expected):
    assert trace.written(text) == expected
    assert list(trace.problems(expected)) == []
    assert len(list(trace.problems(text))) == 1


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("\n9.99<!--=demo/best/ratio/ratio--> times", (2, "demo/best/ratio/ratio: expected 3.67, got 9.99")),
        ("1<!--=nobody/x-->", (1, "nobody: expected a name of docs/records.yaml, got another")),
        ("1<!--=demo/best/none-->", (1, "demo/best/none: expected a number in the record, got nothing")),
        (
            "1<!--=op-by/nobody/op/median_us-->",
            (1, "op-by/nobody/op/median_us: expected a record with such implementation, benchmark, got none"),
        ),
        ("1<!--=demo/best-->", (1, "demo/best: expected a number in the record, got dict")),
        ("It is 1.35 times\nas fast", (1, "a claim without a record: 1.35 times")),
        ("84 % of a copy", (1, "a claim without a record: 84 %")),
        ("takes 3.9 ms.", (1, "a claim without a record: 3.9 ms")),
        ("gave 0.99 (0.98 to 1.00) greedily", (1, "a claim without a record: 0.99 (0.98 to 1.00)")),
        ("a\n\n| x | **2.24** |\n", (3, "a claim without a record: 2.24")),
        ("# A\n<!-- no record: why -->\n2 times\n## B\n3 times", (5, "a claim without a record: 3 times")),
        ("2<!-- no record: why --> times, 3 times", (1, "a claim without a record: 3 times")),
        ("from 1.5 to 3 %", (1, "a claim without a record: 1.5 to 3 %")),
        ("**3** times", (1, "a claim without a record: 3** times")),
        ("takes 3\nms", (1, "a claim without a record: 3 ms")),
        ("<!-- records: demo -->\n50 ms", (2, "a claim that is in none of the 5 values: 50 ms")),
        ("<!-- no record: -->\n2 times", (2, "a claim without a record: 2 times")),
        ("<!-- records: demo -->\n3.67 times, 2.9 times", (2, "a claim that is in none of the 5 values: 2.9 times")),
        (
            "<!-- records: demo -->\n3.67 (3.48 to 3.85)",
            (2, "a claim that is in none of the 5 values: 3.67 (3.48 to 3.85)"),
        ),
        ("# A\n<!-- records: no -->", (2, "no: expected a name of docs/records.yaml, got another")),
    ],
)
def test_what_is_wrong_is_named_with_its_line(text, problem):
    assert list(trace.problems(text)) == [problem]


@pytest.mark.parametrize(
    "text",
    [
        "```console\n$ run\n3.67 times\n```",
        "`3 times`",
        "version 0.2 of torch 2.13.0, section 2.3.1, 64 nodes, batch 1",
        "[3.67 times](#3-times)".replace("3.67 times", "x"),
        "<!-- no record: the papers' -->\n\n2.18 times, 40 %",
        "at 64 nodes and 16 samples",
        "with a 95 % bootstrap interval",
        "<!-- records: demo -->\n3.67 times in 3.85 ms, 50 %; 3.7 (3.5 to 3.7)",
    ],
)
def test_what_is_no_claim(text):
    assert list(trace.problems(text)) == []


def test_no_record_with_the_fields(monkeypatch):
    monkeypatch.setattr(trace, "names", lambda: {"demo": {"file": "here", "benchmark": "none"}})
    with pytest.raises(ValueError, match=r"demo: expected a record with .*'none'.* in here, got none"):
        trace.records_of("demo")


def test_the_command(tmp_path, capsys):
    page = tmp_path / "page.md"
    page.write_text("9.99<!--=demo/best/ratio/ratio--> times\n")
    assert trace.main([str(page)]) == 1
    assert f"{page}:1: demo/best/ratio/ratio: expected 3.67, got 9.99" in capsys.readouterr().out
    assert trace.main([str(page), "--write"]) == 0
    assert page.read_text().startswith("3.67<!--")
