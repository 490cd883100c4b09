"""A rank that makes no progress is found, its stacks are saved, it is ended, and training goes on bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_resilience.observe.trace import differences
from tests.e2e.test_hot_swap import longer
from tests.support.configurations import Configuration
from tests.support.deaths import Death, environment, missing
from tests.support.job import TRAIN_AND_DIE, job
from tests.support.template import Template

pytestmark = pytest.mark.e2e
LIMIT_S = 2.0


@pytest.mark.parametrize(
    ("hang", "moment", "name", "rank"),
    [
        ("freeze", "forward", "tp2_dp2_fp32", 3),
        ("loop", "backward", "tp2_dp2_bf16_overlap", 0),
        pytest.param("sleep", "optimizer", "pp2_dp2_tied", 2, marks=pytest.mark.full),
        ("loop", "forward", "pp2_vpp2_dp2_bf16", 1),
    ],
)
def test_the_rank_that_hangs_is_ended(
    template: Template,
    tmp_path: Path,
    oracle: Callable[[Configuration], Path],
    hang: str,
    moment: str,
    name: str,
    rank: int,
) -> None:
    configuration = longer(name)
    env = environment(tmp_path, Death(moment, 4, rank, hang=hang))
    extra = ("--deadpool", "--deadpool-hang-timeout", str(LIMIT_S))
    with job(template, tmp_path, configuration, extra, spares=0, script=TRAIN_AND_DIE, env=env) as running:
        running.finish()
        assert differences(running.trace, oracle(configuration)) == []
        (hung,) = running.of_kind("hung")
        assert hung["rank"] == rank, "the one that the others wait for, and no other"
        assert {"freeze": "freeze", "loop": "loop", "sleep": "<lambda>"}[hang] in hung["stacks"]
        assert "train_step" in hung["stacks"]
        (recovered,) = running.of_kind("recovered")
        assert f"rank {rank} hung" in recovered["cause"]
        assert recovered["steps_again"] <= 1


def test_a_long_tail_is_no_hang(template: Template, tmp_path: Path, oracle: Callable[[Configuration], Path]) -> None:
    """Evaluation and checkpoints take as long as they take: here a rank sleeps beyond the limit while it logs."""
    configuration = longer("tp2_dp2_fp32", 6, "--log-interval", "2")
    nap = Death("logging", 3, 3, hang="nap")
    env = environment(tmp_path, nap)
    extra = ("--deadpool", "--deadpool-hang-timeout", "1")
    with job(template, tmp_path, configuration, extra, spares=0, script=TRAIN_AND_DIE, env=env) as running:
        running.finish()
        assert not missing(tmp_path, nap)
        assert running.of_kind("stalled"), "the others waited, and it was looked into"
        assert not running.of_kind("hung") and not running.of_kind("recovered")
        assert differences(running.trace, oracle(configuration)) == []
