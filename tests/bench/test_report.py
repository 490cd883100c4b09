"""Medians, goals, and the file they go to."""

import json
import os

import pytest

from megatron_resilience.bench import overhead, recovery
from megatron_resilience.bench._model import MODELS
from megatron_resilience.bench._report import Goal, check_writable, missed, spread, write
from megatron_resilience.errors import ConfigurationError


def test_spread_is_median_and_range():
    assert spread([3.0, 1.0, 10.0]) == {"median": 3.0, "min": 1.0, "max": 10.0}


def test_a_goal_is_missed_on_its_own_side():
    goals = [Goal("seconds", 3.0), Goal("ratio", 10.0, at_least=True)]
    good = {"seconds": spread([2.9]), "ratio": spread([10.1])}
    bad = {"seconds": spread([3.1]), "ratio": spread([9.9])}
    assert missed(goals, good) == []
    assert missed(goals, bad) == ["seconds is 3.1, the goal is <= 3", "ratio is 9.9, the goal is >= 10"]


def test_the_file_is_checked_before_minutes_are_spent(tmp_path):
    with pytest.raises(ConfigurationError, match=r"--json .*does not exist or is not writable"):
        check_writable(tmp_path / "no" / "report.json")
    write(tmp_path / "report.json", {"a": 1})
    assert json.loads((tmp_path / "report.json").read_text()) == {"a": 1}
    assert os.listdir(tmp_path) == ["report.json"]


def test_the_standard_model_is_the_one_the_goals_are_for():
    assert MODELS["standard"].parameters >= 8e6


def test_recovery_leaves_the_first_step_and_the_replay_out_of_the_ratio():
    phases = dict.fromkeys(recovery.PHASES, 0.1)
    trial = {
        "recovery_s": 1.5,
        "recovery_before_step_s": 0.5,
        "phases_s": phases,
        "restart_s": 13.0,
        "restart_before_step_s": 12.0,
        "replay_after_recovery_s": 1.0,
        "replay_after_restart_s": 7.0,
        "iteration_s": 1.0,
    }
    report = recovery.summary([trial, trial | {"restart_before_step_s": 14.0}, trial | {"restart_before_step_s": 10.0}])
    assert report["ratio_to_restart"] == {"median": 24.0, "min": 20.0, "max": 28.0}
    assert missed(recovery.GOALS, report) == []


def test_overhead_compares_blocks_of_a_pair_with_each_other():
    def block(seconds, exposed=0.0):
        step = {"iteration_s": seconds, "cpu_s": 2 * seconds, "exposed_s": exposed}
        return [step | {"copy_bytes": 8.0, "copy_s": 2.0, "round_bytes": 6.0, "round_s": 3.0}] * 3

    # The machine slowed down between the pairs: that is not protection's doing.
    pairs = [
        {"protected": block(1.02, 0.0051), "plain": block(1.0)},
        {"protected": block(2.04, 0.0102), "plain": block(2.0)},
    ]
    report = overhead.summary(pairs)
    assert report["ratio"]["median"] == pytest.approx(1.02)
    assert report["exposed_fraction"]["max"] == pytest.approx(0.005)
    assert report["bytes_per_second"]["copied"]["median"] == 4.0
    assert missed(overhead.GOALS, report) == []
    pairs[0]["protected"] = pairs[1]["protected"] = block(2.2, 0.03)
    assert len(missed(overhead.GOALS, overhead.summary(pairs))) == 2
