"""A running job is looked at and told what to do, by the commands that people use; training stays bit-equal."""

from __future__ import annotations

import contextlib
import io
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from megatron_resilience.control.cli import main
from megatron_resilience.control.jobdir import JobDir
from megatron_resilience.observe.events import read_events
from megatron_resilience.observe.trace import differences
from tests.e2e.test_hot_swap import longer
from tests.support.job import job, kill_node
from tests.support.template import Template

pytestmark = pytest.mark.e2e


@dataclass(frozen=True)
class Said:
    """What a command said, and its exit status."""

    status: int
    out: str
    error: str


class People:
    """Somebody who knows the job's folder. Commands run in this process: a new one takes longer than many steps."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def run(self, command: str, *argv: str) -> Said:
        with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as error:
            status = main([command, "--job-dir", str(self.folder), *argv])
        return Said(status, out.getvalue(), error.getvalue())

    def status(self) -> dict[str, Any]:
        result = self.run("status", "--json")
        assert result.status == 0, result.error
        return json.loads(result.out)

    def of_kind(self, kind: str) -> list[dict[str, Any]]:
        return [e for e in read_events(self.folder / "events") if e["kind"] == kind]


def test_nodes_are_swapped_and_drained_by_command(template: Template, tmp_path: Path, oracle) -> None:
    """First a node that follows, then the one that leads; then that one is shut down, and nobody misses it."""
    configuration = longer("tp2_dp2_fp32", 60)
    people = People(tmp_path / "job")
    launch = ("--job-dir", str(people.folder))
    with job(template, tmp_path, configuration, launch=launch) as running:
        running.wait_for_step(4)
        now = people.status()
        assert (now["phase"], now["leader"]) == ("running", "n0")
        assert [slot["node"] for slot in now["slots"]] == ["n0", "n1"]
        assert now["protected"] is not None and now["lag"] <= 2

        agents = running.agents()
        swapped = people.run("swap", "n1")
        assert swapped.status == 0, swapped.error
        assert "training goes on from generation" in swapped.out
        assert [slot["node"] for slot in people.status()["slots"]] == ["n0", "n2"]
        assert [spare["node"] for spare in people.status()["spares"]] == ["n1"]

        again = people.run("swap", "n1")
        assert again.status == 2 and "holds no slot" in again.error
        assert people.run("drain", "n7").status == 2

        drained = people.run("drain", "n0")
        assert drained.status == 0, drained.error
        now = people.status()
        assert [slot["node"] for slot in now["slots"]] == ["n1", "n2"]
        assert (now["drained"], now["spares"], now["restarts"]) == (["n0"], [], 0)

        kill_node(agents[0])
        running.wait_for(lambda: people.of_kind("leader"))
        now = people.status()
        assert now["leader"] == "n1" and now["gone"] == {"n0": "connection closed"}
        assert now["recovery"]["epoch"] == now["epoch"] == 3, "a successor knows of the last recovery"
        refused = people.run("drain", "n2")
        assert refused.status == 2 and "no spare waits" in refused.error
        running.finish()
    assert differences(running.trace, oracle(configuration)) == []
    assert [event["steps_again"] for event in people.of_kind("recovered")] <= [1, 1]
    told = people.run("events", "--kind", "drained", "--kind", "swapped").out
    assert [text.split()[3] for text in told.splitlines()] == ["swapped", "drained"]
    ended = people.run("status")
    assert ended.status == 3 and "ended with status 0" in ended.error
    assert people.run("outcome").status == 0


def test_status_answers_while_a_node_is_being_replaced(template: Template, tmp_path: Path, oracle) -> None:
    """Asked all the time, it always answers, and says nothing that the events do not say.

    The node that leads loses its zygote and leaves the job, which goes on: that is not the job's outcome.
    """
    configuration = longer("tp2_dp2_fp32", 60)
    people = People(tmp_path / "job")
    seen: list[dict[str, Any]] = []
    with job(template, tmp_path, configuration, launch=("--job-dir", str(people.folder))) as running:
        running.wait_for_step(4)
        running.agents()[0].children()[0].kill()
        while running.child.poll() is None and (not seen or seen[-1]["recovery"] is None):
            seen.append(people.status())
            assert JobDir(people.folder).outcome() is None
        running.finish()
    assert JobDir(people.folder).outcome() == (0, "")
    assert differences(running.trace, oracle(configuration)) == []
    epochs = {event["epoch"]: event["cause"] for event in people.of_kind("epoch")}
    assert all(epochs[now["epoch"]] == now["cause"] for now in seen)
    (recovered,) = people.of_kind("recovered")
    assert {k: seen[-1]["recovery"][k] for k in ("epoch", "generation")} == {
        k: recovered[k] for k in ("epoch", "generation")
    }


def test_who_lacks_the_secret_gets_no_answer(template: Template, tmp_path: Path) -> None:
    people, stranger = People(tmp_path / "job"), tmp_path / "stranger"
    with job(template, tmp_path, longer("tp2_dp2_fp32", 200), launch=("--job-dir", str(people.folder))) as running:
        running.wait_for_step(2)
        stranger.touch(mode=0o600)
        stranger.write_text("a guess")
        _, address, port = json.loads((people.folder / "agents.json").read_text())["agents"][0]
        asked = people.run("drain", "n1", "--agent", f"{address}:{port}", "--secret-file", str(stranger))
        assert asked.status == 3 and "secret" in asked.error
        assert not people.of_kind("drained")
        asked = people.run("status", "--agent", f"{address}:{port}", "--secret-file", str(people.folder / "secret"))
        assert asked.status == 0 and asked.out.startswith("running")
