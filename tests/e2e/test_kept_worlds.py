"""A layout that was left is returned to: its processes are still there, and nobody can tell from what is trained."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_resilience.observe.trace import differences
from tests.e2e.test_commands import People
from tests.e2e.test_hot_swap import longer
from tests.support.deaths import Death, environment, missing
from tests.support.job import TRAIN_AND_DIE, Job, job
from tests.support.oracles import ENDLESS, HOTSWAP, RESHARDABLE, stock
from tests.support.template import Template

pytestmark = pytest.mark.e2e

ITERATIONS = 12
full = pytest.mark.full


def there_and_back(folder: Path, here: str, there: str) -> tuple[str, ...]:
    """Options of a job that changes its layout four times."""
    schedule = folder / "schedule.yaml"
    schedule.write_text(f"3: {there}\n5: {here}\n7: {there}\n9: {here}\n")
    return (*HOTSWAP, "--hotswap-schedule", str(schedule))


def recalled(running: Job) -> list[list[int]]:
    """Ranks whose processes were taken again, by node and return."""
    return [event["ranks"] for event in running.of_kind("recalled")]


@pytest.mark.parametrize(
    ("name", "here", "there", "more"),
    [
        # Streams of a layout begin anew at every return; loaders have processes of their own, as by default.
        ("tp2_dp2_dropout", "TP2 DP2", "PP2 DP2", ("--num-workers", "2")),
        pytest.param("moe_ep2_dp4", "EP2 DP4", "TP2 DP2 EP2", ("--sequence-parallel",), marks=full),
        pytest.param("fp16", "TP2 DP2", "DP4", (), marks=full),
    ],
)
@pytest.mark.parametrize("memory", [(), pytest.param(("--hotswap-exclusive-memory",), marks=full)])
def test_processes_that_were_kept_train_as_new_ones_would(
    template: Template, tmp_path: Path, name: str, here: str, there: str, more: tuple[str, ...], memory: tuple[str, ...]
) -> None:
    """Also when one of them dies after its return, and is started again in its place."""
    base = longer(name, ITERATIONS, *more)
    options = there_and_back(tmp_path, here, there)
    death = Death("backward", 11, 1, "rank")
    env = environment(tmp_path, death)
    kept = (*options, *memory, "--hotswap-keep-worlds", "2")
    with job(template, tmp_path / "kept", base, kept, spares=0, script=TRAIN_AND_DIE, env=env) as running:
        running.finish(timeout=300)
    with job(template, tmp_path / "plain", base, options, spares=0) as plain:
        plain.finish(timeout=300)
    assert not missing(tmp_path, death) and len(running.of_kind("recovered")) == 1
    for run in (running, plain):
        assert [event["generation"] for event in run.of_kind("switch_done")] == [3, 5, 7, 9]
    assert sorted(recalled(running)) == 3 * [[0, 1]] + 3 * [[2, 3]] and not recalled(plain)
    assert differences(running.trace, plain.trace) == []


@full
def test_ranks_that_loaded_their_streams_start_anew(template: Template, tmp_path: Path) -> None:
    """What start-up had made of the streams is lost with the checkpoint's; the next time they are kept like others."""
    checkpoint = tmp_path / "checkpoint"
    base = longer("tp2_dp2_dropout", ITERATIONS, *RESHARDABLE)
    stock(template, 4, [*base.argv, "--train-iters", "2", "--save", str(checkpoint), "--save-interval", "2"])
    options = (*there_and_back(tmp_path, "TP2 DP2", "PP2 DP2"), "--load", str(checkpoint))
    kept = (*options, "--hotswap-keep-worlds", "2")
    with job(template, tmp_path / "kept", base, kept, spares=0) as running:
        running.finish(timeout=300)
    with job(template, tmp_path / "plain", base, options, spares=0) as plain:
        plain.finish(timeout=300)
    assert sorted(recalled(running)) == 2 * [[0, 1]] + 2 * [[2, 3]]
    assert differences(running.trace, plain.trace) == []


@full
def test_a_rank_with_a_writer_starts_anew_among_those_that_were_kept(template: Template, tmp_path: Path) -> None:
    """The last rank's event file is continued by whoever takes its place."""
    base = longer("tp2_dp2_fp32", ITERATIONS)
    options = (*there_and_back(tmp_path, "TP2 DP2", "PP2 DP2"), "--tensorboard-dir", str(tmp_path / "board"))
    with job(template, tmp_path / "kept", base, (*options, "--hotswap-keep-worlds", "1"), spares=0) as running:
        running.finish(timeout=300)
    assert sorted(recalled(running)) == 3 * [[0, 1]] + 3 * [[2]]


@full
def test_a_world_that_is_kept_has_no_loaders(template: Template, tmp_path: Path) -> None:
    """Their processes were forked from its ranks, with all memory that those shared with others."""
    people = People(tmp_path / "job")
    base = longer("tp2_dp2_fp32", ENDLESS, "--num-workers", "2")
    kept = (*HOTSWAP, "--hotswap-keep-worlds", "1")
    with job(template, tmp_path, base, kept, spares=0, launch=("--job-dir", str(people.folder))) as running:
        running.wait_for_step(3)
        first = [rank for node in (0, 1) for rank in running.ranks(node)]
        assert any(rank.children() for rank in first)
        assert people.run("reshard", "--pp", "2", "--dp", "2").status == 0
        running.wait_for(lambda: people.of_kind("switch_done"))
        running.wait_for(lambda: not any(rank.children() for rank in first))
        assert all(rank.is_running() for rank in first)
        assert people.run("reshard", "--tp", "2", "--dp", "2").status == 0
        running.wait_for(lambda: len(people.of_kind("switch_done")) == 2)
        assert sorted(event["ranks"] for event in people.of_kind("recalled")) == [[0, 1], [2, 3]]
        running.wait_for(lambda: any(rank.children() for rank in first))
