"""`python -m benchmarks.simulator`: figures, limits, files, and what it refuses."""

import json

import pytest

from benchmarks.simulator.__main__ import main


def run(capsys, *argv):
    code = main([*map(str, argv)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_every_combination_and_the_limits_as_json(capsys):
    code, out, _ = run(
        capsys, "--model", "llama-3-8b", "--device", "h200", "--batch", "1,4", "--sequence", "128,1024",
        "--nodes", "1,16", "--heads", "5", "--shared", "--json",
    )  # fmt: skip
    result = json.loads(out)
    assert code == 0
    assert [(p["sequence"], p["batch"], p["nodes"]) for p in result["points"]] == [
        (s, b, n) for s in (128, 1024) for b in (1, 4) for n in (1, 16)
    ]
    assert result["device"]["name"] == "h200"
    assert result["heads"] == {"count": 5, "vocabulary": None, "shared": True, "layers": 1, "root_rank": 0}
    for point in result["points"]:
        assert point["speedup"] == pytest.approx(point["acceleration"] * point["plain_us"] / point["step_us"])
    limits = result["limits"]
    assert [(limit["sequence"], limit["batch"]) for limit in limits["nodes"]] == [
        (128, 1),
        (128, 4),
        (1024, 1),
        (1024, 4),
    ]
    # One batch loses where the next smaller one still pays.
    last = limits["batch"][-1]["paying_batches"][0][1]
    _, out, _ = run(
        capsys, "--model", "llama-3-8b", "--device", "h200", "--batch", f"{last},{last + 1}", "--sequence", "1024",
        "--nodes", "16", "--heads", "5", "--shared", "--json",
    )  # fmt: skip
    below = [point["speedup"] for point in json.loads(out)["points"]]
    assert below[0] >= 1 > below[1]


def test_accuracies_and_a_device_from_files(capsys, tmp_path):
    (tmp_path / "heads.json").write_text("[[0.5, 0.2], [0.4, 0.1]]")
    (tmp_path / "device.json").write_text('{"name": "mine", "flops": 1e13, "bandwidth": 1e12, "dtype": "float16"}')
    code, out, _ = run(
        capsys, "--accuracies", tmp_path / "heads.json", "--device", tmp_path / "device.json", "--nodes", "1,2,7",
        "--save-device", tmp_path / "copy.json", "--json",
    )  # fmt: skip
    result = json.loads(out)
    assert code == 0
    assert result["heads"]["count"] == 2
    # The second node is head 1's best; all six nodes: 0.7 + 0.7 * 0.5.
    assert [p["acceleration"] for p in result["points"][:3]] == pytest.approx([1, 1.5, 2.05])
    assert json.loads((tmp_path / "copy.json").read_text())["name"] == "mine"
