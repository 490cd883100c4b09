"""The benches that train, on a tiny model: every value is there and says what it must; no figure is judged."""

import json
import os
import subprocess
import sys
import tempfile

import pytest

from megatron_resilience.bench.reshard import PAUSE
from megatron_resilience.observe.report import PHASES
from tests.support.template import ROOT

# Minutes each: several starts of a whole job.
pytestmark = [pytest.mark.e2e, pytest.mark.full]


def bench(tmp_path, *arguments):
    """Runs a bench with everything temporary in a folder of the test's; returns its report."""
    shared = set(os.listdir("/dev/shm"))
    # A short path: sockets of multiprocessing lie in it.
    temporary = tempfile.mkdtemp(prefix="mr-", dir="/tmp")
    command = [sys.executable, "-m", "megatron_resilience.bench", *arguments, "--model", "tiny"]
    command += ["--json", str(tmp_path / "report.json")]
    environment = os.environ | {"TMPDIR": temporary, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert os.listdir(temporary) == []
    os.rmdir(temporary)
    assert set(os.listdir("/dev/shm")) <= shared
    return json.loads((tmp_path / "report.json").read_text())


def assert_spread(value):
    assert set(value) == {"median", "min", "max"}
    assert 0 <= value["min"] <= value["median"] <= value["max"]


def test_recovery(tmp_path):
    report = bench(tmp_path, "recovery", "--trials", "1")
    for name in ("recovery_s", "restart_s", "ratio_to_restart", "replay_after_recovery_s", "replay_after_restart_s"):
        assert_spread(report[name])
    assert tuple(report["phases_s"]) == PHASES
    phases = sum(value["median"] for value in report["phases_s"].values())
    assert phases == pytest.approx(report["recovery_s"]["median"], abs=0.1)
    # A restart imports, sets up and loads; a recovery does not.
    assert report["ratio_to_restart"]["median"] > 1
    assert report["replay_after_restart_s"]["median"] > 0
    (trial,) = report["trials"]
    assert trial["steps_again"] <= 1


def test_overhead(tmp_path):
    report = bench(tmp_path, "overhead", "--pairs", "2", "--block", "2")
    for name in ("exposed_fraction", "ratio", "cpu_ratio"):
        assert_spread(report[name])
    assert [{arm: len(block) for arm, block in pair.items()} for pair in report["blocks"]] == [
        {"protected": 2, "plain": 2},
        {"plain": 2, "protected": 2},
    ]
    copied, sent = (report["bytes_per_iteration"][what] for what in ("copied", "sent"))
    # Masters and two moments in fp32 at least, once to the host and once to a partner.
    assert copied["median"] >= 12 * 0.9 * report["parameters"]
    assert sent["median"] >= copied["median"]
    assert not any(step.keys() & {"copy_bytes"} and step["copy_bytes"] for p in report["blocks"] for step in p["plain"])
    # Two generations of a node's ranks, and of those whose copies it keeps.
    assert report["memory"]["copies_per_node"]["min"] >= 2 * sent["median"]


def test_reshard(tmp_path):
    report = bench(tmp_path, "reshard", "--trials", "1")
    assert set(report["kinds"]) == {"dense", "moe"}
    for values in report["kinds"].values():
        assert tuple(values["phases_s"]) == PAUSE
        parts = sum(value["median"] for value in values["phases_s"].values())
        assert parts == pytest.approx(values["pause_s"]["median"], abs=0.05)
        # It changed when the new world was ready, and the second save is not the first.
        assert values["wait_s"]["median"] < 0.1
        assert 0 < values["save_s"]["median"] < values["restart_s"]["median"]
        assert values["load_s"]["median"] > 0
        (trial,) = values["trials"]
        # Not everything: each node has some of it. The job may choose a better order of its nodes than the one there was.
        least = trial["least_bytes_in_best_order"]
        assert 0 < least <= trial["received_bytes"] <= trial["least_bytes"] < 2 * trial["state_bytes"]
        assert values["memory"]["old model"]["median"] > 0 and values["memory"]["new optimizer"]["median"] > 0
        # Where memory is short the old world has none left when the new one takes its own.
        alone = {part: value["max"] for part, value in values["memory_exclusive"].items()}
        assert all(size == 0 for part, size in alone.items() if part.startswith("old"))
        assert alone["new model"] > 0 and alone["new optimizer"] > 0
        assert values["move_parts_s"]["between nodes"]["median"] <= values["phases_s"]["move"]["median"] + 0.05
    for kind in report["kinds"]:
        for name in ("ratio_to_restart", "ratio_to_save_load"):
            assert_spread(report[f"{kind}_{name}"])
            # A restart imports and sets up; a change of layout has done so before.
            assert report[f"{kind}_{name}"]["median"] > 1
    for name in (
        "bytes_over_minimum",
        "rate_over_raw",
        "prepare_hidden_fraction",
        "peak_over_limit",
        "peak_over_limit_exclusive",
    ):
        assert_spread(report[name])
    assert report["bytes_over_minimum"]["min"] >= 1
    assert report["prepare_hidden_fraction"]["max"] <= 1
