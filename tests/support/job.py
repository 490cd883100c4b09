"""A protected job of several local nodes in a test, and the deaths it suffers."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from megatron_resilience.observe.events import read_events
from tests.support.configurations import Configuration
from tests.support.template import TRAIN_GPT, Child, Template, plain_environment

LAUNCHER = "megatron_resilience.control.cli:main"
TRAIN_AND_DIE = str(Path(__file__).with_name("train_and_die.py"))


@dataclass
class Job:
    """A running launcher.

    Attributes:
        child: its process.
        folder: holds ``trace/`` and ``events.jsonl``.
    """

    child: Child
    folder: Path

    @property
    def trace(self) -> Path:
        """Where ranks record their steps."""
        return self.folder / "trace"

    @property
    def events(self) -> list[dict[str, Any]]:
        """The job's events so far."""
        path = self.folder / "events.jsonl"
        return read_events(path) if path.exists() else []

    def of_kind(self, kind: str) -> list[dict[str, Any]]:
        """Events of one kind."""
        return [event for event in self.events if event["kind"] == kind]

    def agents(self) -> list[psutil.Process]:
        """The nodes' agents, by node rank; dead ones are left out."""
        return sorted(psutil.Process(self.child.pid).children(), key=lambda process: process.pid)

    def ranks(self, node: int) -> list[psutil.Process]:
        """A node's ranks: what its zygote forked, in order of rank."""
        (zygote,) = self.agents()[node].children()
        return sorted(zygote.children(), key=lambda process: process.pid)

    def wait_for(self, condition: Callable[[], Any], timeout: float = 90) -> None:
        """Polls until the condition holds.

        Raises:
            AssertionError: the job ended first, or the time is up; with the job's output.
        """
        deadline = time.monotonic() + timeout
        while not condition():
            assert self.child.poll() is None, f"the job ended early:\n{self.child.output[-6000:]}"
            assert time.monotonic() < deadline, f"waited {timeout} s in vain:\n{self.child.output[-6000:]}"
            time.sleep(0.005)

    def wait_for_step(self, iteration: int, rank: int = 0) -> None:
        """Polls until a rank has completed an iteration."""
        path = self.trace / f"rank{rank}.jsonl"
        self.wait_for(lambda: path.exists() and f'"iteration": {iteration},' in path.read_text())

    def finish(self, timeout: float = 120) -> None:
        """Waits for the end, which must be a good one."""
        code = self.child.wait(timeout)
        assert code == 0, f"exit status {code}:\n{self.child.output[-6000:]}"


def kill_node(agent: psutil.Process) -> list[int]:
    """SIGKILL to an agent and everything it started; returns the pids."""
    victims = [agent, *agent.children(recursive=True)]
    for victim in victims:
        with contextlib.suppress(ProcessLookupError):
            os.kill(victim.pid, signal.SIGKILL)
    return [victim.pid for victim in victims]


def end(child: Child) -> None:
    """Kills what is left of a launcher with all it started, and waits until the kernel has taken every process down."""
    if child.poll() is not None:
        return
    victims = []
    with contextlib.suppress(psutil.NoSuchProcess):
        launcher = psutil.Process(child.pid)
        victims = [launcher, *launcher.children(recursive=True)]
    for victim in victims:
        with contextlib.suppress(psutil.NoSuchProcess):
            victim.kill()
    child.kill_group()
    child.wait(30)
    # SIGKILL is an order, not a fact: a process with much memory takes its time.
    deadline = time.monotonic() + 30
    while any(_runs(victim) for victim in victims) and time.monotonic() < deadline:
        time.sleep(0.005)


def end_together(children: Sequence[Child]) -> None:
    """Kills the launchers of one job at once, so that none starts anything because another is gone, and waits for all they began.

    What they have forked dies with them, by the kernel's hand.
    """
    victims = []
    for child in children:
        with contextlib.suppress(psutil.NoSuchProcess):
            victims += [psutil.Process(child.pid)] if child.poll() is None else []
    for victim in victims:
        with contextlib.suppress(psutil.NoSuchProcess):
            victim.suspend()
    for child in children:
        end(child)


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@contextlib.contextmanager
def job(
    template: Template,
    folder: Path,
    configuration: Configuration,
    extra: Sequence[str] = ("--deadpool",),
    nodes: int = 2,
    spares: int = 1,
    script: str = TRAIN_GPT,
    env: dict[str, str] | None = None,
    launch: Sequence[str] = (),
) -> Iterator[Job]:
    """Starts a job; what is left of it at the end is killed."""
    per_node = configuration.world_size // nodes
    argv = ["launch", "--nnodes", str(nodes + spares), "--spares", str(spares), "--local-nodes"]
    if "--job-dir" not in launch:
        argv += ["--events", str(folder / "events.jsonl")]
    argv += ["--nproc-per-node", str(per_node), *launch]
    argv += [script, *configuration.argv, "--trace-dir", str(folder / "trace"), *extra]
    folder.mkdir(parents=True, exist_ok=True)
    child = template.fork(LAUNCHER, argv, env=plain_environment() | (env or {}), output=folder / "output.log")
    running = Job(child, folder)
    try:
        yield running
    finally:
        end(child)
