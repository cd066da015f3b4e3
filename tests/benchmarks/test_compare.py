"""benchmarks.compare: what counts as slower."""

import json

import pytest

from benchmarks import compare


def timed(median, low, high, commit="aaa", **case):
    return {
        "benchmark": "heads_topk", "op": "heads_topk", "dtype": "float32", "commit": commit, "date": "2026-01-01",
        "median_us": median, "p10_us": low, "p90_us": high, "calls": 7, **case,
    }  # fmt: skip


def rated(ratio, low, high, **case):
    best = {"settings": {"plain": "eager"}, "medusa_over_plain": {"ratio": ratio, "low": low, "high": high}}
    return {"benchmark": "generate-demo", "commit": "bbb", "prompts": 9, "best": best, **case}


@pytest.mark.parametrize(
    ("before", "after", "slower", "faster"),
    [
        (timed(10.0, 9.0, 11.0), timed(12.5, 12.0, 13.0), ["1.25 times (10 to 12.5 us): time of "], []),
        (timed(10.0, 9.0, 11.0), timed(12.5, 10.9, 14.0), [], []),  # ranges overlap
        (timed(10.0, 9.0, 11.0), timed(5.0, 4.0, 6.0), [], ["0.50 times (10 to 5 us): time of "]),
        (rated(1.6, 1.5, 1.7), rated(1.2, 1.1, 1.3), ["0.75 times (1.6 to 1.2): best, medusa_over_plain of "], []),
        (rated(1.6, 1.5, 1.7), rated(1.45, 1.4, 1.5), [], []),
        (rated(1.2, 1.1, 1.3), rated(1.5, 1.4, 1.6), [], ["1.25 times (1.2 to 1.5): best, medusa_over_plain of "]),
    ],
)
def test_beyond_noise(before, after, slower, faster):
    found = compare.compare([before], [after])
    assert [line[: len(start)] for line, start in zip(found[0], slower, strict=True)] == slower
    assert [line[: len(start)] for line, start in zip(found[1], faster, strict=True)] == faster
    assert found[2] == 1


def test_only_equal_cases_are_compared_and_the_last_record_counts():
    before = [timed(10.0, 9.0, 11.0, batch=1), timed(10.0, 9.0, 11.0, batch=4), timed(20.0, 19.0, 21.0, batch=1)]
    slower, faster, count = compare.compare(
        before, [timed(20.0, 19.0, 21.0, batch=1), timed(99.0, 98.0, 99.5, batch=8)]
    )
    assert (slower, faster, count) == ([], [], 1)


def test_the_command(tmp_path, capsys):
    file = tmp_path / "machine.jsonl"
    lines = [timed(10.0, 9.0, 11.0, "aaa111"), timed(30.0, 29.0, 31.0, "bbb222")]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert compare.main([f"{file}@aaa", f"{file}@bbb"]) == 1
    assert "slower: 1 of 1 figures in both\n  3.00 times" in capsys.readouterr().out
    assert compare.main([f"{file}@bbb", str(file)]) == 0
    for words, said in (
        (f"{file}@ccc", "expected records of commit ccc in"),
        ("no.jsonl", "expected a file of records"),
    ):
        with pytest.raises(SystemExit):
            compare.main([words, str(file)])
        assert said in capsys.readouterr().err
