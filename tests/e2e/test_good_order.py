"""SIGTERM ends a job in good order: it saves a checkpoint that stock Megatron loads, and the same command goes on from it."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from megatron_resilience import exits
from megatron_resilience.control.jobdir import JobDir
from megatron_resilience.observe.trace import differences, read
from tests.e2e.test_hot_swap import longer
from tests.support.job import job, kill_node
from tests.support.oracles import STEADY, assert_equal_until, stock
from tests.support.template import Template

pytestmark = pytest.mark.e2e


def after(differing: list[str]) -> list[str]:
    """Without what must differ between a run and its second half."""
    return [d for d in differing if "iterations" not in d and "groups" not in d]


@pytest.mark.parametrize("node_dies", [True, pytest.param(False, marks=pytest.mark.full)])
def test_sigterm_saves_and_the_same_command_goes_on(template: Template, tmp_path: Path, node_dies: bool) -> None:
    whole = longer("tp2_dp2_bf16_overlap", 14, *STEADY)
    stock(template, whole.world_size, [*whole.argv, "--trace-dir", str(tmp_path / "whole")])
    checkpoint = str(tmp_path / "ckpt")
    save = ("--exit-signal-handler", "--save", checkpoint, "--save-interval", "1000", "--load", checkpoint)
    command = longer("tp2_dp2_bf16_overlap", 14, *STEADY, *save)
    launch = ("--job-dir", str(tmp_path / "job"))
    with job(template, tmp_path / "first", command, launch=launch) as running:
        running.wait_for_step(4)
        if node_dies:
            kill_node(running.agents()[1])
        running.child.signal(signal.SIGTERM)
        assert running.child.wait(90) == exits.LEFT, running.child.output[-4000:]
        assert "the same command goes on from it" in running.child.output
    status, said = JobDir(tmp_path / "job").outcome() or (0, "")
    assert status == exits.LEFT and "SIGTERM" in said
    saved = int((tmp_path / "ckpt" / "latest_checkpointed_iteration.txt").read_text())
    assert 4 <= saved < 14
    oracle = read(tmp_path / "whole")
    first = tmp_path / "first" / "trace"
    assert_equal_until(first, tmp_path / "whole", saved)
    assert all(lines[-1]["iteration"] == saved for lines in read(first).values())

    if node_dies:
        with job(template, tmp_path / "second", command, launch=launch) as running:
            running.finish()
        rest = tmp_path / "second" / "trace"
    else:
        rest = tmp_path / "stock"
        stock(template, whole.world_size, [*whole.argv, "--load", checkpoint, "--trace-dir", str(rest)])
    assert all(lines == oracle[rank][saved:] for rank, lines in read(rest).items())
    assert after(differences(rest, tmp_path / "whole")) == []


def test_without_a_way_to_save_it_says_what_is_lost(template: Template, tmp_path: Path) -> None:
    with job(template, tmp_path, longer("tp2_dp2_fp32", 200)) as running:
        running.wait_for_step(2)
        running.child.signal(signal.SIGTERM)
        assert running.child.wait(30) == 128 + signal.SIGTERM
        assert "--exit-signal-handler" in running.child.output
