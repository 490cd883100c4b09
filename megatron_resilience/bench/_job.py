"""Starts and ends the jobs of a bench: stock Megatron under torchrun, and the same under ``--deadpool``."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil

from megatron_resilience.bench import _model, _probe
from megatron_resilience.control.zygote import die_with_parent
from megatron_resilience.errors import ResilienceError
from megatron_resilience.observe.events import read_events

ROOT = Path(__file__).resolve().parents[2]
TRAIN_GPT = ROOT / "examples" / "train_gpt.py"
_PROGRAM = Path(__file__).with_name("_program.py")
_POLL_S = 0.002
_IDLE_S, _IDLE_CPU = 1.0, 0.05
_ENDING_S = 30.0


class BenchError(ResilienceError):
    """A job of the bench did not do what it was started for."""


class Job:
    """A running job.

    Args:
        folder: of its own; holds ``steps{rank}.jsonl``, ``log`` and, if protected, ``events.jsonl``.
        command: that starts it.
        relayout: whether its ranks note what :mod:`_relayout` does.
    """

    def __init__(self, folder: Path, command: Sequence[str], relayout: bool = False) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        environment = os.environ | {
            "MEGATRON_RESILIENCE_ACCELERATOR": "cpu",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
            _probe.FOLDER: str(folder),
            _probe.SCRIPT: str(TRAIN_GPT),
        }
        if relayout:
            environment[_probe.RELAYOUT] = "1"
        with (folder / "log").open("w") as log:
            self._process = subprocess.Popen(
                command,
                stdout=log,
                stderr=log,
                env=environment,
                cwd=folder,
                preexec_fn=functools.partial(die_with_parent, os.getpid()),
            )

    @classmethod
    def stock(cls, folder: Path, argv: Sequence[str], relayout: bool = False) -> Job:
        """Under plain torchrun, without ``--deadpool``."""
        _check_script()
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        return cls(folder, [*torchrun, "--nproc-per-node", str(_model.WORLD_SIZE), str(_PROGRAM), *argv], relayout)

    @classmethod
    def protected(cls, folder: Path, argv: Sequence[str]) -> Job:
        """2 nodes x 2 ranks and a spare, all agents on this machine."""
        return cls._launched(folder, argv, _model.SPARES)

    @classmethod
    def changing(cls, folder: Path, argv: Sequence[str]) -> Job:
        """2 nodes x 2 ranks, which change their layout when they are asked to (:mod:`_relayout`)."""
        return cls._launched(folder, [*argv, "--hotswap-parallelism"], spares=0, relayout=True)

    @classmethod
    def _launched(cls, folder: Path, argv: Sequence[str], spares: int, relayout: bool = False) -> Job:
        _check_script()
        launch = [sys.executable, "-m", "megatron_resilience.control.cli", "launch", "--local-nodes"]
        launch += ["--nnodes", str(_model.NODES + spares), "--spares", str(spares)]
        launch += ["--nproc-per-node", str(_model.RANKS_PER_NODE), "--events", str(folder / "events.jsonl")]
        # Agents are stopped for long while it is the other job's turn.
        launch += ["--heartbeat-timeout", "3600"]
        return cls(folder, [*launch, str(_PROGRAM), *argv, "--deadpool"], relayout)

    # -- what it has done --------------------------------------------------------------------------

    def steps(self, rank: int) -> list[dict[str, Any]]:
        """The steps that a rank has completed, in order; see :mod:`_probe`."""
        return self.notes("steps", rank)

    def notes(self, name: str, rank: int) -> list[dict[str, Any]]:
        """The lines of one of a rank's files."""
        path = self.folder / f"{name}{rank}.jsonl"
        if not path.exists():
            return []
        *lines, _ = path.read_text().split("\n")
        return [json.loads(line) for line in lines]

    def all_steps(self) -> list[list[dict[str, Any]]]:
        """The same of every rank."""
        return [self.steps(rank) for rank in range(_model.WORLD_SIZE)]

    def of_kind(self, kind: str) -> list[dict[str, Any]]:
        """Its events of one kind."""
        path = self.folder / "events.jsonl"
        return [event for event in (read_events(path) if path.exists() else []) if event["kind"] == kind]

    def wait_for(self, condition: Callable[[], Any], what: str, timeout_s: float = 180.0) -> Any:
        """Polls until the condition is truthy, and returns it.

        Raises:
            BenchError: the job ended, or the time is up; with the end of its output.
        """
        deadline = time.monotonic() + timeout_s
        while not (result := condition()):
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise self._failed(f"no {what}")
            time.sleep(_POLL_S)
        return result

    def wait_for_end(self, timeout_s: float = 300.0) -> None:
        """Until it has ended, well.

        Raises:
            BenchError: it has not.
        """
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_s)
        if self._process.returncode != 0:
            raise self._failed("no good end")

    def _failed(self, what: str) -> BenchError:
        status = self._process.poll()
        how = "still runs" if status is None else f"ended with {status}"
        log = (self.folder / "log").read_text(errors="replace")
        # torchrun's own report comes last and does not say why.
        why = log[log.find("Traceback") :][:6000] if "Traceback" in log else ""
        return BenchError(f"{what}: the job {how}\n{why}\n...\n{log[-2000:]}")

    def wait_for_step(self, iteration: int, timeout_s: float = 180.0) -> None:
        """Until every rank has completed an iteration."""

        def done() -> bool:
            return all(steps and steps[-1]["iteration"] >= iteration for steps in self.all_steps())

        self.wait_for(done, f"iteration {iteration}", timeout_s)

    def wait_for_arrival(self, iteration: int) -> None:
        """Until every rank waits at its gate (see :mod:`_probe`) to begin an iteration."""

        def arrived() -> bool:
            files = [self.folder / f"{_probe.ARRIVED}{rank}" for rank in range(_model.WORLD_SIZE)]
            return all(file.exists() and file.read_text() == str(iteration) for file in files)

        self.wait_for(arrived, f"arrival at iteration {iteration}")

    # -- its processes -----------------------------------------------------------------------------

    def agents(self) -> list[psutil.Process]:
        """By node rank; of a protected job."""
        return sorted(psutil.Process(self._process.pid).children(), key=lambda process: process.pid)

    def tree(self) -> list[psutil.Process]:
        """All its processes."""
        try:
            top = psutil.Process(self._process.pid)
            return [top, *top.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def wait_for_spare(self) -> None:
        """Until the spare's ranks wait at the door of ``train()``: they are all there and use no processor."""
        spare = self.agents()[-1]
        since, before = time.monotonic(), -1.0

        def idle() -> bool:
            nonlocal since, before
            if len(waiting := spare.children(recursive=True)) <= _model.WORLD_SIZE:
                return False
            used = sum(sum(process.cpu_times()[:2]) for process in waiting)
            if used - before > _IDLE_CPU:
                since, before = time.monotonic(), used
            return time.monotonic() - since > _IDLE_S

        self.wait_for(idle, "spare at the door")

    def pause(self) -> None:
        """Stops all its processes."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Lets them go on."""
        self._signal(signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL to everything; returns when the kernel has taken it down."""
        victims = self.tree()
        kill_all(victims)
        self._process.wait()
        deadline = time.monotonic() + _ENDING_S
        while any(map(_runs, victims)) and time.monotonic() < deadline:
            time.sleep(_POLL_S)

    def _signal(self, signum: signal.Signals) -> None:
        for process in self.tree():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signum)


def _runs(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def kill_all(victims: Sequence[psutil.Process]) -> None:
    """SIGKILL."""
    for victim in victims:
        with contextlib.suppress(psutil.NoSuchProcess):
            victim.kill()


def _check_script() -> None:
    if not TRAIN_GPT.is_file():
        raise BenchError(
            f"{TRAIN_GPT} is not there: the bench trains with it, so run it from a checkout of the repository "
            "(pip install -e .), not from an installed package"
        )
