"""Ranks for tests, forked from one process that has imported torch and Megatron already.

    results = template.run_ranks(4, ["--num-layers", "2", ...])
    results = template.run_ranks(2, argv, target="tests.accelerator.programs:unequal_shapes")

An import of Megatron takes 4-7 s per process; a fork takes milliseconds. Each rank runs in a session of its
own, gets the environment that torchrun would give it, and dies with the template, which dies with pytest.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_resilience.megatron_adapter import versions

ROOT = Path(__file__).resolve().parents[2]
NEWEST = versions.check().startswith(f"{versions.SUPPORTED[-1]}.")
"""Whether Megatron is of the newest release that is supported."""
TRAIN_GPT = str(ROOT / "examples/train_gpt.py" if NEWEST else ROOT / "tests/support/train_gpt_older.py")


def free_port() -> int:
    """A TCP port of the loopback that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def plain_environment() -> dict[str, str]:
    """This process's environment, as a rank under torchrun should see it on any machine."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    return environment | {
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "MEGATRON_RESILIENCE_ACCELERATOR": "cpu",
    }


@dataclass
class Result:
    """How one rank ended.

    Attributes:
        rank: its number.
        returncode: exit status; negative: the signal that killed it.
        output: its standard output and error together.
    """

    rank: int
    returncode: int
    output: str


class Child:
    """A forked process, in a session and process group of its own (its id is ``pid``)."""

    def __init__(self, template: Template, pid: int, output: Path) -> None:
        self._template = template
        self.pid = pid
        self.output_path = output

    @property
    def output(self) -> str:
        """What it has written so far."""
        return self.output_path.read_text(errors="replace")

    def poll(self) -> int | None:
        """Exit status, or None while it runs."""
        return self._template._poll(self.pid)

    def wait(self, timeout: float) -> int:
        """Exit status.

        Raises:
            TimeoutError: it still runs after ``timeout`` seconds.
        """
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise TimeoutError(f"process {self.pid} still runs after {timeout} s:\n{self.output[-4000:]}")
            time.sleep(0.01)
        return code

    def signal(self, number: int) -> None:
        """Signals the process alone; nothing if it has ended."""
        with contextlib.suppress(ProcessLookupError):
            if self.poll() is None:
                os.kill(self.pid, number)

    def kill_group(self) -> None:
        """Kills the process and what it started in its own process group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        # Just forked it has no group yet.
        self.signal(signal.SIGKILL)


class Template:
    """The pre-imported process. Use as a context manager; closing it kills all that it forked."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="template-")
        self._codes: dict[int, int] = {}
        self._count = 0
        ours, theirs = socket.socketpair()
        log = Path(self._folder.name) / "template.log"
        with log.open("wb") as output, theirs:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    str(Path(__file__).with_name("template_process.py")),
                    str(theirs.fileno()),
                    str(os.getpid()),
                ],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=plain_environment(),
                cwd=ROOT,
            )
        self._socket = ours
        self._answers = ours.makefile("r", encoding="utf-8")
        if not self._answers.readline():
            message = log.read_text()
            self.close()
            raise RuntimeError(f"the template process did not start:\n{message}")

    def __enter__(self) -> Template:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the template, all ranks and their orphans."""
        if self._process.poll() is None:
            self.kill_orphans()
        self._answers.close()
        self._socket.close()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._folder.cleanup()

    def fork(
        self,
        target: str,
        argv: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        output: Path | None = None,
        cwd: Path = ROOT,
    ) -> Child:
        """Starts one process.

        Args:
            target: a script's path ending in ``.py``, or ``module:function``, called without arguments.
            argv: becomes ``sys.argv[1:]``.
            env: its whole environment; default: ``plain_environment()``.
            output: file for standard output and error, appended to; default: one in a temporary folder.
        """
        self._count += 1
        output = output or Path(self._folder.name) / f"{self._count}.log"
        output.touch(mode=0o600)
        environment = plain_environment() if env is None else dict(env)
        answer = self._ask(op="fork", target=target, argv=list(argv), env=environment, output=str(output), cwd=str(cwd))
        # Process ids come again within a session (there are 32768 of them): this one's end is not its namesake's.
        self._codes.pop(answer["pid"], None)
        return Child(self, answer["pid"], output)

    def start_ranks(
        self,
        world_size: int,
        argv: Sequence[str],
        env: Mapping[str, str] | None = None,
        target: str = TRAIN_GPT,
    ) -> list[Child]:
        """Starts ranks 0 .. ``world_size``-1 as torchrun would on one node.

        Args:
            env: added to ``plain_environment()``.
        """
        common = plain_environment() | {
            "WORLD_SIZE": str(world_size),
            "LOCAL_WORLD_SIZE": str(world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
        }
        ranks = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(world_size)]
        return [self.fork(target, argv, common | rank | dict(env or {})) for rank in ranks]

    def run_ranks(
        self,
        world_size: int,
        argv: Sequence[str],
        env: Mapping[str, str] | None = None,
        timeout: float = 120,
        target: str = TRAIN_GPT,
    ) -> list[Result]:
        """Runs ranks to their end; when one fails, the others are killed, as torchrun does.

        Raises:
            TimeoutError: after ``timeout`` seconds, with every rank's last output; all are killed.
        """
        children = self.start_ranks(world_size, argv, env, target)
        deadline = time.monotonic() + timeout
        try:
            while None in (codes := [child.poll() for child in children]):
                if any(codes):
                    break
                if time.monotonic() > deadline:
                    tails = "\n".join(f"--- rank {r}\n{c.output[-3000:]}" for r, c in enumerate(children))
                    raise TimeoutError(f"{world_size} ranks still run after {timeout} s\n{tails}")
                time.sleep(0.01)
        finally:
            # Ranks that all ended by themselves keep what they left behind, for `orphans` to show.
            if None in [child.poll() for child in children]:
                for child in children:
                    child.kill_group()
        return [Result(rank, child.wait(10), child.output) for rank, child in enumerate(children)]

    def orphans(self) -> list[int]:
        """Live processes that ranks started and left behind."""
        self._collect()
        return self._ask(op="orphans")["pids"]

    def wait_for_orphans(self, patience: float) -> None:
        """Waits until those are gone that their parents' deaths kill; who is still there after ``patience`` seconds stays."""
        deadline = time.monotonic() + patience
        while self.orphans() and time.monotonic() < deadline:
            time.sleep(0.01)

    def kill_orphans(self) -> list[int]:
        """Kills them, and returns which they were."""
        killed = []
        deadline = time.monotonic() + 10
        # An orphan's own children become orphans when it dies.
        while (pids := self.orphans()) and time.monotonic() < deadline:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            killed += [pid for pid in pids if pid not in killed]
            time.sleep(0.01)
        return killed

    def _poll(self, pid: int) -> int | None:
        if pid not in self._codes:
            self._collect()
        return self._codes.get(pid)

    def _collect(self) -> None:
        exited = self._ask(op="poll")["exited"]
        self._codes |= {int(pid): code for pid, code in exited.items()}

    def _ask(self, **request: Any) -> dict[str, Any]:
        self._socket.sendall(json.dumps(request).encode() + b"\n")
        if not (answer := self._answers.readline()):
            raise RuntimeError("the template process died; what it forked has died with it")
        return json.loads(answer)
