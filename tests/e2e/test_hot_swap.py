"""A whole node is killed in training; a spare takes its place; the result is bit-equal to a run without any fault."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_resilience.observe.trace import differences
from tests.support.configurations import CONFIGURATIONS, Configuration
from tests.support.deaths import Death, environment, missing
from tests.support.job import TRAIN_AND_DIE, Job, job, kill_node
from tests.support.template import Template

pytestmark = pytest.mark.e2e

MOMENTS = ("forward", "backward", "reduction", "optimizer", "gather")
Oracle = Callable[[Configuration], Path]


def longer(name: str, iterations: int = 10, *more: str) -> Configuration:
    """A configuration with more iterations (argparse takes the last)."""
    known = CONFIGURATIONS[name]
    return Configuration(known.world_size, (*known.argv, "--train-iters", str(iterations), *more))


def assert_swapped(running: Job, oracle: Path, swaps: int = 1) -> None:
    """Bit-equal to the oracle, after the expected number of recoveries, with nothing repeated beyond the promise."""
    assert differences(running.trace, oracle) == []
    recovered = running.of_kind("recovered")
    assert len(recovered) == swaps, running.child.output[-4000:]
    assert all(event["steps_again"] <= 1 for event in recovered), recovered
    assert all(set(event["seconds"]) >= {"detect", "unblock", "restore", "verify"} for event in recovered)


def test_without_a_fault_protection_changes_nothing(template: Template, tmp_path: Path, oracle: Oracle) -> None:
    configuration = longer("tp2_dp2_fp32")
    with job(template, tmp_path, configuration) as running:
        running.finish()
        assert differences(running.trace, oracle(configuration)) == []
        assert not running.of_kind("recovered")


@pytest.mark.parametrize("node", [0, 1])
@pytest.mark.parametrize("name", ["tp2_dp2_fp32", "tp2_dp2_bf16_overlap"])
def test_any_node_may_die(template: Template, tmp_path: Path, oracle: Oracle, name: str, node: int) -> None:
    """Node 0 has rank 0, the coordinator and the store; killed from outside, its memory goes with it."""
    configuration = longer(name, 14)
    with job(template, tmp_path, configuration) as running:
        running.wait_for_step(5)
        segments = {os.readlink(f"/proc/{p.pid}/fd/{fd}") for p in running.agents() for fd in memory_of(p.pid)}
        assert segments, "protection was on, so agents hold segments"
        pids = kill_node(running.agents()[node])
        running.finish()
        assert not any(Path(f"/proc/{pid}/maps").exists() for pid in pids)
        assert_swapped(running, oracle(configuration))


def memory_of(pid: int) -> list[str]:
    """Descriptors of a process that are segments (memfd; they have no name in any file system)."""
    folder = Path(f"/proc/{pid}/fd")
    return [fd.name for fd in folder.iterdir() if os.readlink(fd).startswith("/memfd:mr-")]


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("name", [pytest.param("tp2_dp2_fp32", marks=pytest.mark.full), "tp2_dp2_bf16_overlap"])
def test_any_moment(template: Template, tmp_path: Path, oracle: Oracle, name: str, moment: str) -> None:
    configuration = longer(name)
    chance = random.Random(f"{name}/{moment}")
    death = Death(moment, chance.randint(2, 7), chance.randrange(4), after=chance.choice([0, chance.uniform(0, 0.03)]))
    env = environment(tmp_path, death)
    with job(template, tmp_path, configuration, script=TRAIN_AND_DIE, env=env) as running:
        running.finish()
        assert not missing(tmp_path, death)
        assert_swapped(running, oracle(configuration))


@pytest.mark.parametrize("name", ["pp2_dp2_tied", "moe_tp2_ep2_sp", "pp2_vpp2_dp2_bf16", "no_distributed_optimizer"])
def test_other_layouts(template: Template, tmp_path: Path, oracle: Oracle, name: str) -> None:
    configuration = longer(name, 12)
    with job(template, tmp_path, configuration) as running:
        running.wait_for_step(4, rank=3)
        kill_node(running.agents()[1])
        running.finish()
        assert_swapped(running, oracle(configuration))


def test_a_second_node_dies_later(template: Template, tmp_path: Path, oracle: Oracle) -> None:
    """The second victim is the promoted spare; loaders have processes of their own, as by default."""
    configuration = longer("tp2_dp2_fp32", 24, "--num-workers", "2")
    with job(template, tmp_path, configuration, spares=2) as running:
        running.wait_for_step(5)
        kill_node(running.agents()[1])
        running.wait_for(lambda: running.of_kind("recovered"))
        resumed = running.of_kind("recovered")[0]["generation"]
        running.wait_for_step(resumed + 3)
        kill_node(running.agents()[1])
        running.finish()
        assert_swapped(running, oracle(configuration), swaps=2)


def test_a_killed_rank_is_started_again_in_place(template: Template, tmp_path: Path, oracle: Oracle) -> None:
    configuration = longer("tp2_dp2_fp32", 12, "--num-workers", "2")
    with job(template, tmp_path, configuration, spares=0) as running:
        running.wait_for_step(4)
        running.ranks(1)[1].kill()
        running.finish()
        assert_swapped(running, oracle(configuration))
        assert not running.of_kind("node_lost")


def test_no_spare_is_one_clear_message(template: Template, tmp_path: Path) -> None:
    configuration = longer("tp2_dp2_fp32", 200)
    with job(template, tmp_path, configuration, spares=0) as running:
        running.wait_for_step(3)
        kill_node(running.agents()[1])
        assert running.child.wait(30) == 1
        assert "no spare is left" in running.child.output
        assert "Traceback" not in running.child.output


def test_the_promoted_spare_dies_during_the_recovery(template: Template, tmp_path: Path, oracle: Oracle) -> None:
    configuration = longer("tp2_dp2_fp32", 14)
    with job(template, tmp_path, configuration, spares=2) as running:
        running.wait_for_step(5)
        agents = running.agents()
        kill_node(agents[1])
        running.wait_for(lambda: any(event["epoch"] == 2 for event in running.of_kind("epoch")))
        kill_node(agents[2])
        running.finish()
        assert differences(running.trace, oracle(configuration)) == []
        causes = [event["cause"] for event in running.of_kind("epoch")]
        assert len(causes) == 3, "a rebuild that was given up must not disturb the next one"


@pytest.mark.parametrize("victims", [(0, 1), (0, 3), pytest.param((1, 2), marks=pytest.mark.full)])
def test_two_nodes_die_at_once(template: Template, tmp_path: Path, oracle: Oracle, victims: tuple[int, int]) -> None:
    """Two copies elsewhere outlive two nodes, whoever leads."""
    configuration = longer("tp2_dp2_fp32", 14)
    extra = ("--deadpool", "--deadpool-replicas", "2")
    with job(template, tmp_path, configuration, extra, nodes=4, spares=2) as running:
        running.wait_for_step(5)
        agents = running.agents()
        for node in victims:
            kill_node(agents[node])
        running.finish()
        assert differences(running.trace, oracle(configuration)) == []
        assert {event["node"] for event in running.of_kind("node_lost")} >= {f"n{node}" for node in victims}
        assert all(event["steps_again"] <= 1 for event in running.of_kind("recovered"))


def test_a_whole_rack_dies(template: Template, tmp_path: Path, oracle: Oracle) -> None:
    """One copy is enough when it lies in another failure domain. The spares are in a third."""
    configuration = longer("tp2_dp2_bf16_overlap", 14)
    racks = tmp_path / "racks.yaml"
    racks.write_text("west: [n0, n1]\neast: [n2, n3]\nnorth: [n4, n5]\n")
    launch = ("--failure-domains", str(racks))
    with job(template, tmp_path, configuration, nodes=4, spares=2, launch=launch) as running:
        running.wait_for_step(5)
        for agent in running.agents()[2:4]:
            kill_node(agent)
        running.finish()
        assert differences(running.trace, oracle(configuration)) == []
        assert running.of_kind("recovered")[-1]["steps_again"] <= 1
        assert running.of_kind("protected")[-1]["generation"] >= running.of_kind("recovered")[-1]["generation"]


@pytest.mark.parametrize("part", ["agent", "zygote"])
def test_part_of_a_node_dies(template: Template, tmp_path: Path, oracle: Oracle, part: str) -> None:
    """An agent takes its ranks along; a zygote too, and its node leaves, even if it led."""
    configuration = longer("tp2_dp2_fp32", 12)
    with job(template, tmp_path, configuration) as running:
        running.wait_for_step(4)
        agent = running.agents()[0]
        (agent if part == "agent" else agent.children()[0]).kill()
        running.finish()
        assert_swapped(running, oracle(configuration))


def test_a_death_before_training_starts_everyone_again(template: Template, tmp_path: Path, oracle: Oracle) -> None:
    configuration = longer("tp2_dp2_fp32")
    with job(template, tmp_path, configuration) as running:
        running.wait_for(lambda: running.of_kind("epoch"))
        kill_node(running.agents()[1])
        running.finish()
        assert differences(running.trace, oracle(configuration)) == []
