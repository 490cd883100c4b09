"""Leaving ``train()`` and entering it again at every iteration, without any fault, changes nothing.

The first test of everything: whatever an interruption leaves half-way must be mended, and one omission trains wrongly with
exit status 0.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_resilience.observe.trace import differences
from tests.e2e.test_hot_swap import Oracle, assert_swapped, longer
from tests.support.configurations import CONFIGURATIONS
from tests.support.deaths import Death, environment, missing
from tests.support.job import TRAIN_AND_DIE, job
from tests.support.template import Template

pytestmark = pytest.mark.e2e

ITERATIONS = 6
TAIL = ("--eval-interval", "2", "--eval-iters", "1", "--split", "90,5,5", "--log-interval", "2")


def leave(template: Template, folder: Path, configuration, moment: str, extra=("--deadpool",)):
    """Runs a job that is left at every iteration; returns it when it has ended."""
    with job(
        template, folder, configuration, script=TRAIN_AND_DIE, env={"LEAVE_IN": moment}, spares=0, extra=extra
    ) as left:
        left.finish()
    return left


# The others are left and entered again with --full.
CROSS_SECTION = (
    "tp2_dp2_fp32",
    "pp2_vpp2_dp2_bf16",
    "moe_tp2_ep2_sp",
    "tp2_dp2_dropout",
    "llama_tp2_sp_recompute",
    "fp16",
    "batch_rampup",
)


@pytest.mark.parametrize(
    "name", [name if name in CROSS_SECTION else pytest.param(name, marks=pytest.mark.full) for name in CONFIGURATIONS]
)
def test_every_configuration(template: Template, tmp_path: Path, oracle: Oracle, name: str) -> None:
    configuration = longer(name, ITERATIONS)
    left = leave(template, tmp_path, configuration, "logging")
    assert differences(left.trace, oracle(configuration)) == []
    assert len(left.of_kind("recovered")) == ITERATIONS


@pytest.mark.parametrize("moment", ["reduction", "evaluation"])
def test_with_evaluation_and_averaged_logs(template: Template, tmp_path: Path, oracle: Oracle, moment: str) -> None:
    """The validation cursor goes back with everything else, and logged averages are those of the undisturbed run."""
    configuration = longer("tp2_dp2_bf16_overlap", ITERATIONS, *TAIL)
    left = leave(template, tmp_path, configuration, moment)
    assert differences(left.trace, oracle(configuration)) == []
    assert left.of_kind("recovered")


@pytest.mark.full
def test_checkpoints_are_those_of_an_undisturbed_run(template: Template, tmp_path: Path, oracle: Oracle) -> None:
    """Left at the end of every checkpoint; stock Megatron loads the result and goes on as from an undisturbed one.

    With fresh moments: Megatron's own defect keeps it from loading torch Adam's (distrib_optimizer.py:838).
    """
    save = ("--ckpt-format", "torch_dist", "--save-interval", "3", "--no-save-rng", "--no-load-rng", "--no-load-optim")
    plain = longer("tp2_dp2_fp32", ITERATIONS, *save)
    for name in ("ours", "theirs"):
        (tmp_path / name).mkdir()
    left = leave(template, tmp_path / "run", plain, "checkpoint", ("--deadpool", "--save", str(tmp_path / "ours")))
    assert left.of_kind("recovered")
    argv = [*plain.argv, "--save", str(tmp_path / "theirs"), "--trace-dir", str(tmp_path / "oracle")]
    for result in template.run_ranks(4, argv):
        assert result.returncode == 0, result.output
    assert differences(left.trace, tmp_path / "oracle") == []
    names = [{p.name for p in (tmp_path / n).rglob("*")} for n in ("ours", "theirs")]
    assert names[0] == names[1]
    for name in ("ours", "theirs"):
        more = [
            *plain.argv,
            "--train-iters",
            "8",
            "--load",
            str(tmp_path / name),
            "--trace-dir",
            str(tmp_path / f"go-{name}"),
        ]
        for result in template.run_ranks(4, more):
            assert result.returncode == 0, result.output
    assert differences(tmp_path / "go-ours", tmp_path / "go-theirs") == []
    assert json.loads((tmp_path / "go-ours" / "rank0.jsonl").read_text().splitlines()[0])["iteration"] == ITERATIONS + 1


@pytest.mark.parametrize(
    "moment", ["checkpoint", *(pytest.param(m, marks=pytest.mark.full) for m in ("evaluation", "logging"))]
)
def test_killed_in_the_tail_of_an_iteration(template: Template, tmp_path: Path, oracle: Oracle, moment: str) -> None:
    configuration = longer("tp2_dp2_fp32", 8, *TAIL)
    death = Death(moment, 4, rank=3)
    env = environment(tmp_path, death)
    save = ("--deadpool", "--save", str(tmp_path / "save"), "--save-interval", "2", "--ckpt-format", "torch_dist")
    with job(template, tmp_path / "run", configuration, extra=save, script=TRAIN_AND_DIE, env=env) as running:
        running.finish()
        assert not missing(tmp_path, death)
        assert_swapped(running, oracle(configuration))
