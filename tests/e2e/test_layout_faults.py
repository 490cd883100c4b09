"""Ranks and nodes die while the layout changes, or it changes because they died."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from megatron_resilience.observe.events import read_events
from megatron_resilience.observe.trace import read
from tests.e2e.test_commands import People
from tests.e2e.test_hot_swap import longer
from tests.support.configurations import Configuration
from tests.support.job import LAUNCHER, end_together, job, kill_node
from tests.support.oracles import (
    ENDLESS,
    HOTSWAP,
    LOGICAL,
    RESHARDABLE,
    assert_equal_until,
    logical_state,
    resharded_oracle,
)
from tests.support.template import Child, Template, free_port, plain_environment

pytestmark = pytest.mark.e2e

DIE_IN_SWITCH = str(Path(__file__).parents[1] / "support" / "die_in_switch.py")

full = pytest.mark.full


def dying(folder: Path, what: str, rank: int) -> tuple[Path, dict[str, str]]:
    """A schedule with one change, and what die_in_switch.py is told about the death in the middle of it."""
    schedule = folder / "schedule.yaml"
    schedule.write_text("4: PP2 DP2\n")
    (folder / "sums").mkdir()
    marker = str(folder / "died")
    return schedule, {"SUMS": str(folder / "sums"), "DIE_RANK": str(rank), "DIE_WHAT": what, "DIE_MARKER": marker}


@pytest.mark.parametrize(("what", "rank"), [("rank", 1), ("node", 0), pytest.param("node", 3, marks=full)])
def test_a_death_in_the_middle_of_a_switch_loses_nothing(
    template: Template, tmp_path: Path, oracle: Callable[[Configuration], Path], what: str, rank: int
) -> None:
    """The old layout trains on (with a spare where a node died), and the change is made later."""
    base = longer("tp2_dp2_fp32", 60)
    schedule, env = dying(tmp_path, what, rank)
    extra = (*HOTSWAP, "--hotswap-schedule", str(schedule))
    with job(template, tmp_path / "run", base, extra, script=DIE_IN_SWITCH, env=env) as running:
        running.finish(timeout=200)
    (abandoned,) = running.of_kind("switch_abandoned")
    (switched,) = running.of_kind("switch_done")
    assert len(running.of_kind("recovered")) == (what == "node")
    assert abandoned["layout"] == "TP1·PP2·DP2" and switched["generation"] > 4
    ended, began = (logical_state(tmp_path / "sums", moment, switched["generation"]) for moment in ("end", "begin"))
    assert ended and ended == began
    assert_equal_until(running.trace, oracle(base), switched["generation"])


@pytest.mark.parametrize(("what", "rank"), [("rank", 1), pytest.param("node", 0, marks=full)])
def test_where_two_layouts_do_not_fit_the_old_one_makes_room(
    template: Template, tmp_path: Path, oracle: Callable[[Configuration], Path], what: str, rank: int
) -> None:
    """It takes its memory again when the change fails, and trains on with what it had; the next attempt succeeds."""
    base = longer("tp2_dp2_bf16_overlap", 40)
    schedule, env = dying(tmp_path, what, rank)
    (tmp_path / "tenants").mkdir()
    env["TENANTS"] = str(tmp_path / "tenants")
    extra = (*HOTSWAP, "--hotswap-exclusive-memory", "--hotswap-schedule", str(schedule))
    with job(template, tmp_path / "run", base, extra, script=DIE_IN_SWITCH, env=env) as running:
        running.finish(timeout=200)
    assert len(running.of_kind("switch_abandoned")) == 1
    assert len(running.of_kind("recovered")) == (what == "node")
    (switched,) = running.of_kind("switch_done")
    assert switched["wait_s"] > 0 and switched["prepare_s"] < 0.1, "nothing of it was hidden"
    ended, began = (logical_state(tmp_path / "sums", moment, switched["generation"]) for moment in ("end", "begin"))
    assert ended and ended == began
    assert_equal_until(running.trace, oracle(base), switched["generation"])
    # Whenever a rank of the new world began to make tensors, no rank of the old one held any.
    found = [int(line) for line in (tmp_path / "tenants" / "found").read_text().splitlines()]
    assert len(found) >= 8 and not any(found), found


@pytest.mark.parametrize("memory", [(), pytest.param(("--hotswap-exclusive-memory",), marks=full)])
def test_a_node_is_lost_and_no_spare_is_left(
    template: Template, tmp_path: Path, oracle: Callable[[Configuration], Path], memory: tuple[str, ...]
) -> None:
    """The survivors go on in a smaller layout, sourced partly from copies, as stock Megatron would with that state there."""
    base = longer("dp4", 30, *RESHARDABLE)
    extra = (*HOTSWAP, *memory, "--deadpool-on-no-spare", "shrink")
    with job(template, tmp_path / "run", base, extra, nodes=4, spares=0) as running:
        running.wait_for_step(5)
        kill_node(running.agents()[2])
        running.finish(timeout=200)
    (switched,) = running.of_kind("switch_done")
    at = switched["generation"]
    assert "DP2" in switched["cause"] and 4 <= at <= 29
    stock_trace = resharded_oracle(template, tmp_path, base, at, "DP2", 30)
    for rank, lines in read(stock_trace).items():
        after = [line for line in read(running.trace)[rank] if line["iteration"] > at]
        assert after[-len(lines) :] == lines
    assert_equal_until(running.trace, oracle(base), at)


def test_a_node_that_comes_back_is_used_again(template: Template, tmp_path: Path) -> None:
    """Three nodes train, one dies, two go on, a third joins, three go on: no element is lost or moved on the way."""
    base = longer("dp4", ENDLESS, "--global-batch-size", "12", "--micro-batch-size", "1")
    port, events, sums, children = free_port(), tmp_path / "events.jsonl", tmp_path / "sums", []
    sums.mkdir()
    environment = plain_environment() | {"MEGATRON_RESILIENCE_SECRET": "between us", "SUMS": str(sums)}

    def start(rank: int) -> Child:
        argv = ["launch", "--nnodes", "3", "--nproc-per-node", "1", "--node-rank", str(rank), "--rdzv-endpoint"]
        argv += [f"127.0.0.1:{port}", "--events", str(events), LOGICAL, *base.argv, *HOTSWAP]
        children.append(template.fork(LAUNCHER, [*argv, "--deadpool-on-no-spare", "shrink"], env=environment))
        return children[-1]

    def seen(kind: str) -> list[dict[str, Any]]:
        return [event for event in (read_events(events) if events.exists() else []) if event["kind"] == kind]

    def wait_for(kind: str, count: int) -> None:
        while len(seen(kind)) < count:
            assert first.poll() is None, first.output[-4000:]
            time.sleep(0.02)

    try:
        first, _, third = (start(rank) for rank in range(3))
        wait_for("training", 1)
        while not list(sums.glob("end6.*")):
            time.sleep(0.02)
        kill_node(psutil.Process(third.pid))
        wait_for("switch_done", 1)
        start(2)
        wait_for("switch_done", 2)
    finally:
        end_together(children)
    smaller, larger = seen("switch_done")
    assert "DP2" in smaller["cause"] and "DP3" in larger["cause"]
    for switch in (smaller, larger):
        ended, began = (logical_state(sums, moment, switch["generation"]) for moment in ("end", "begin"))
        assert ended and ended == began


@full
def test_a_leader_without_ranks_dies_before_a_change(template: Template, tmp_path: Path) -> None:
    """Ranks have been told where to stop, and nobody prepares yet: whoever leads next must know of it, or they stand for ever."""
    people, schedule = People(tmp_path / "job"), tmp_path / "schedule.yaml"
    schedule.write_text("200: PP2 DP2\n")
    extra = (*HOTSWAP, "--hotswap-exclusive-memory", "--hotswap-schedule", str(schedule))
    base = longer("tp2_dp2_fp32", ENDLESS)
    with job(template, tmp_path, base, extra, launch=("--job-dir", str(people.folder))) as running:
        running.wait_for_step(4)
        leader = running.agents()[0]
        assert people.run("drain", "n0").status == 0
        running.wait_for(lambda: len(people.of_kind("switch_agreed")) == 2)
        kill_node(leader)
        running.wait_for(lambda: people.of_kind("switch_done"))
        (switched,) = people.of_kind("switch_done")
        assert switched["generation"] == 200 and people.status()["leader"] == "n1"
