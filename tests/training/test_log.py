"""What a run says of itself: its speed in the log, trackers, and the upload of its heads."""

from __future__ import annotations

import shlex
from types import SimpleNamespace

import pytest
import torch
import workshop
from accelerate import tracking
from huggingface_hub import HfApi
from huggingface_hub.errors import LocalTokenNotFoundError, RepositoryNotFoundError

from medusa_decoding import MedusaHeads
from medusa_decoding.checkpoints import write_heads
from medusa_decoding.training import Config
from medusa_decoding.training.loop import estimate, machines, meter, preflight, run
from medusa_decoding.training.loop.processes import Processes
from medusa_decoding.training.loop.schedules import Progress

pytestmark = pytest.mark.usefixtures("without_plots")
CPU = torch.device("cpu")


def test_figures_are_those_of_the_steps_since_the_last_line(tmp_path, monkeypatch):
    base = workshop.make_base(tmp_path / "base")
    config = workshop.config(tmp_path / "out", base, "data", model={"gradient_checkpointing": True})
    shapes = estimate.shapes_of(config)
    monkeypatch.setattr(meter, "_peak", lambda device, dtype: 1e6)
    states = SimpleNamespace(made=2)
    at = Progress(tokens=1000, seconds=50.0)  # as after --resume
    found = meter.Meter(config, states, 0.5, Processes(0, 2, CPU, False), at)
    backbone, heads = estimate.operations(workshop.config(tmp_path / "out", base, "data"), shapes)
    states.made = 4  # by this process; the other one of two made as many
    line = found(Progress(tokens=1200, seconds=54.0), False)
    assert line["tokens_per_second"] == 50.0
    assert line["mfu"] == pytest.approx((2 * 48 * 2 * backbone + 200 * 0.5 * heads) / 4.0 / 2e6, abs=1e-4)
    # From then on all states are read.
    line = found(Progress(tokens=1300, seconds=55.0), False)
    assert line["tokens_per_second"] == 100.0
    assert line["mfu"] == pytest.approx(100 * 0.5 * heads / 2e6, abs=1e-4)
    assert 2**26 < line["peak_memory"] < 2**40  # a Python process with torch, in bytes
    assert estimate.operations(config, shapes, True)[0] > 2 * backbone


def test_gpus_are_found_by_their_names():
    names = ["A100-SXM4-80GB", "A100-PCIE-40GB", "H100 80GB HBM3", "H100 PCIe", "GeForce RTX 4090", "L40S"]
    found = [machines.find(f"NVIDIA {name}").name for name in names]
    assert found == ["A100-80GB", "A100-40GB", "H100", "H100-PCIe", "4090", "L40S"]
    for name in ("NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA A100-SXM4-40GB MIG 1g.5gb", "NVIDIA A10G"):
        assert machines.find(name) is None


class Tracker(tracking.GeneralTracker):
    """Keeps what it is told."""

    name, requires_logging_directory, seen = "fake", False, []
    tracker = None

    def __init__(self, project):
        super().__init__()
        self.seen.append(project)

    def store_init_configuration(self, values):
        self.seen.append(values["heads.num_heads"])

    def log(self, values, step=None):
        self.seen.append((step, sorted(name.partition("/")[0] for name in values)[0], values.get("train/mfu")))

    def finish(self):
        self.seen.append("finished")


def test_trackers_of_accelerate_get_the_log(tmp_path, monkeypatch):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.setitem(tracking.LOGGER_TYPE_TO_CLASS, "fake", Tracker)
    base, data = workshop.make_base(tmp_path / "base"), workshop.make_data(tmp_path / "data.jsonl")
    output = {"trackers": ["fake", "tensorboard"]}
    config = workshop.config(tmp_path / "out", base, data, output=output, optimisation={"max_steps": 2})
    run.train(config)
    lines = workshop.read_log(tmp_path / "out")
    trained = [line for line in lines if "of" in line]
    assert all(line["mfu"] > 0 for line in trained)
    expected = [(line["step"], "rate" if "of" in line else "held_out", line.get("mfu")) for line in lines]
    assert Tracker.seen == ["medusa", "3", *expected, "finished"]
    events = EventAccumulator(str(tmp_path / "out" / "tensorboard" / "medusa"))
    events.Reload()
    written = [event.value for event in events.Scalars("train/loss")]
    assert written == pytest.approx([line["loss"] for line in trained])


@pytest.fixture
def hub(monkeypatch):
    """What the hub is asked and answers: `role` of the token, and whether the repository is `private`, or not there."""
    seen = SimpleNamespace(role="write", private=None, error=None, commits=[])

    def whoami(api):
        if seen.role is None:
            raise LocalTokenNotFoundError("none")
        return {"name": "me", "orgs": [{"name": "us"}], "auth": {"accessToken": {"role": seen.role}}}

    def model_info(api, name):
        if seen.private is None:
            response = SimpleNamespace(status_code=404, headers={}, request=None)
            raise RepositoryNotFoundError("none", response=response)
        return SimpleNamespace(private=seen.private, siblings=[])

    def create_commit(api, name, changes, commit_message):
        if seen.error is not None:
            raise seen.error
        seen.commits.append((name, [change.path_in_repo for change in changes]))
        return SimpleNamespace(commit_url="https://hub/commit/1")

    monkeypatch.setattr(HfApi, "whoami", whoami)
    monkeypatch.setattr(HfApi, "model_info", model_info)
    monkeypatch.setattr(HfApi, "create_repo", lambda api, name, **how: seen.commits.append(how["private"]))
    monkeypatch.setattr(HfApi, "create_commit", create_commit)
    return seen


def to_push(folder, name="us/heads", base="someone/base"):
    return workshop.config(folder, base, "data", output={"push_to_hub": name})


def test_a_push_that_must_fail_is_refused_before_the_run(hub, tmp_path):
    check = preflight._check_push
    check(to_push(tmp_path), "us/heads")
    with pytest.raises(ValueError, match=r"model.name: expected a model on the hub with output.push_to_hub"):
        check(to_push(tmp_path, base=tmp_path), "us/heads")
    with pytest.raises(OSError, match="them/heads: an upload would fail: the token writes to repositories of me, us"):
        check(to_push(tmp_path), "them/heads")
    hub.private = False
    with pytest.raises(ValueError, match="private: expected a private or new repository, got us/heads, which is pub"):
        check(to_push(tmp_path), "us/heads")
    for role, message in (("read", "the token may only read"), (None, "log in with `hf auth login`")):
        hub.role = role
        with pytest.raises(OSError, match=message):
            check(to_push(tmp_path), "us/heads")
    assert hub.commits == []
    with pytest.raises(ValueError, match=r"output.push_to_hub: expected null with method medusa-2"):
        workshop.config(tmp_path, "someone/base", "data", "medusa-2", output={"push_to_hub": "me/heads"})


def test_heads_are_pushed_with_their_card_after_the_run(hub, tmp_path):
    write_heads(MedusaHeads(8, 11, 2), tmp_path / "heads", base_model="someone/base")
    (tmp_path / "heads" / "README.md").write_text("---\ntags: [medusa]\n---\n# Card of the run\n")
    said = []
    hub.error = OSError("down")
    with pytest.raises(OSError, match="not uploaded: us/heads: the upload failed: down") as caught:
        run._push(to_push(tmp_path), said.append)
    words = shlex.split(str(caught.value).rpartition(". ")[2])
    assert words[:4] == ["medusa", "export", "--model", str(tmp_path / "heads")]
    assert words[-4:] == ["--push", "us/heads", "--yes", "--private"]
    assert (said, hub.commits) == ([], [True])
    hub.error = None
    run._push(to_push(tmp_path), said.append)
    (name, files) = hub.commits[-1]
    assert name == "us/heads"
    assert {"README.md", "config.json", "custom_generate/generate.py"} < set(files)
    assert "# Card of the run" in (tmp_path / "hub" / "README.md").read_text()
    assert "to us/heads (private): https://hub/commit/1" in said[0]


def test_the_key_of_older_files_for_tensorboard_is_read(tmp_path):
    values = {"model": {"name": "m"}, "data": {"train": [{"path": "d"}]}, "output": {"folder": "o"}}
    for given, expected in (({}, 1), ({"tensorboard": True}, 1), ({"tensorboard": False}, 0)):
        config = Config.of(values | {"output": {"folder": "o", **given}})
        assert config.output.trackers == ("tensorboard",) * expected
