"""One launcher per node, as under srun: they meet at the endpoint, and one that comes late joins as a spare."""

import time
from pathlib import Path

import psutil
import pytest

from megatron_resilience.control.jobdir import JobDir
from megatron_resilience.observe.events import read_events
from megatron_resilience.observe.trace import differences
from tests.e2e.test_hot_swap import longer
from tests.support.job import LAUNCHER, end, kill_node
from tests.support.template import TRAIN_GPT, free_port, plain_environment

pytestmark = pytest.mark.e2e


def test_late_agents_join_as_spares(template, tmp_path, oracle):
    """A node dies, its spare takes over; the node comes back, and takes over when the spare dies."""
    configuration = longer("tp2_dp2_fp32", 60)
    port, events, children = free_port(), tmp_path / "events.jsonl", []

    def start(rank: int):
        argv = ["launch", "--nnodes", "3", "--spares", "1", "--nproc-per-node", "2", "--node-rank", str(rank)]
        argv += ["--rdzv-endpoint", f"127.0.0.1:{port}", "--events", str(events), TRAIN_GPT, *configuration.argv]
        argv += ["--trace-dir", str(tmp_path / "trace"), "--deadpool"]
        environment = plain_environment() | {"MEGATRON_RESILIENCE_SECRET": "between us"}
        children.append(template.fork(LAUNCHER, argv, env=environment))
        return children[-1]

    def wait_for(kind: str, count: int) -> None:
        while sum(event["kind"] == kind for event in (read_events(events) if events.exists() else [])) < count:
            assert first.poll() is None, first.output[-4000:]

    try:
        first, second, third = (start(rank) for rank in range(3))
        wait_for("training", 1)
        kill_node(psutil.Process(second.pid))
        wait_for("recovered", 1)
        back = start(1)
        wait_for("node_joined", 4)
        kill_node(psutil.Process(third.pid))
        wait_for("recovered", 2)
        assert first.wait(90) == 0, first.output[-4000:]
        assert back.wait(30) == 0, back.output[-4000:]
        assert differences(tmp_path / "trace", oracle(configuration)) == []
    finally:
        for child in children:
            end(child)


def test_a_newcomer_finds_the_job_though_the_first_node_is_dead(template, tmp_path, oracle):
    """The endpoint that it was given answers no more; the job's folder says who leads."""
    configuration = longer("tp2_dp2_fp32", 60)
    port, folder, children = free_port(), JobDir(tmp_path / "job"), []

    def start(rank: int):
        argv = ["launch", "--nnodes", "3", "--spares", "1", "--nproc-per-node", "2", "--node-rank", str(rank)]
        argv += ["--rdzv-endpoint", f"127.0.0.1:{port}", "--job-dir", str(folder.path), TRAIN_GPT, *configuration.argv]
        argv += ["--trace-dir", str(tmp_path / "trace"), "--deadpool"]
        children.append(template.fork(LAUNCHER, argv, env=plain_environment()))
        return children[-1]

    def wait_for(kind: str, count: int, alive) -> None:
        path = folder.path / "events"
        while sum(event["kind"] == kind for event in (read_events(path) if path.exists() else [])) < count:
            assert alive.poll() is None, alive.output[-4000:]
            time.sleep(0.02)

    try:
        first, second, third = (start(rank) for rank in range(3))
        wait_for("training", 1, first)
        kill_node(psutil.Process(first.pid))
        wait_for("recovered", 1, second)
        newcomer = start(3)
        wait_for("node_joined", 4, second)
        kill_node(psutil.Process(third.pid))
        wait_for("recovered", 2, second)
        assert second.wait(90) == 0, second.output[-4000:]
        assert newcomer.wait(30) == 0, newcomer.output[-4000:]
        assert differences(tmp_path / "trace", oracle(configuration)) == []
    finally:
        for child in children:
            end(child)


def test_another_jobs_secret_is_refused(template, tmp_path):
    """It does not get in, and the job that it knocked at goes on waiting for its own."""
    port = free_port()
    argv = ["launch", "--nnodes", "2", "--nproc-per-node", "1", "--rdzv-endpoint", f"127.0.0.1:{port}", "--node-rank"]
    script = [str(Path(TRAIN_GPT)), "--deadpool"]
    first = template.fork(
        LAUNCHER, [*argv, "0", *script], env=plain_environment() | {"MEGATRON_RESILIENCE_SECRET": "a"}
    )
    other = template.fork(
        LAUNCHER, [*argv, "1", *script], env=plain_environment() | {"MEGATRON_RESILIENCE_SECRET": "b"}
    )
    try:
        assert other.wait(60) != 0
        assert first.poll() is None
        assert "refused a connection" in first.output
        assert "secret" in other.output
    finally:
        for child in (first, other):
            end(child)
