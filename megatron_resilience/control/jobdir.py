"""The folder of one job, which all its nodes see: what people's commands find it by.

================  ==================================================================================
``secret``        made by the first agent that needs it; agents and people's commands prove it
``events/``       a file an agent (appending from several hosts loses lines on NFS)
``agents.json``   where the agents listen and which of them leads, kept by the one that leads
``outcome.json``  how the job ended; not there while it runs
================  ==================================================================================

The folder has mode 0700, its files 0600.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_resilience.errors import ConfigurationError
from megatron_resilience.observe.console import say


class JobDir:
    """See the module. Nothing is touched before the first call."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def prepare(self) -> None:
        """Makes the folder, or checks that it is ours alone.

        Raises:
            ConfigurationError: it cannot be made, or others may enter it.
        """
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._events.mkdir(mode=0o700, exist_ok=True)
            mode = self.path.stat().st_mode & 0o777
        except OSError as error:
            raise ConfigurationError(f"--job-dir {self.path}: {error.strerror}") from error
        if mode & 0o077:
            raise ConfigurationError(f"--job-dir {self.path} has mode {mode:04o}: others can enter it, chmod 700 it")

    def begin(self) -> None:
        """Forgets how the job ended last time (it was requeued). For the agent of node rank 0."""
        for name in ("outcome.json", "agents.json"):
            (self.path / name).unlink(missing_ok=True)

    def secret(self, create: bool = True) -> bytes:
        """The job's secret; with ``create`` the first that asks makes it, however many ask at once.

        Raises:
            ConfigurationError: there is none, or others can read it.
        """
        path = self.path / "secret"
        if create and not path.exists():
            made = self._temporary(secrets.token_hex(32))
            # Unlike a rename, a link fails if another agent was first.
            with contextlib.suppress(FileExistsError):
                os.link(made, path)
            os.unlink(made)
        return read_secret(path, f"--job-dir {self.path}: its file secret")

    def events_file(self, node: str) -> Path:
        """The event log of one agent."""
        return self._events / f"{node}.jsonl"

    @property
    def _events(self) -> Path:
        return self.path / "events"

    def write_agents(self, leader: str, addresses: dict[str, tuple[str, int]]) -> None:
        """Where the agents listen, the one that leads first."""
        ordered = sorted(addresses.items(), key=lambda item: item[0] != leader)
        self._publish("agents.json", {"leader": leader, "agents": [[n, *at] for n, at in ordered]})

    def read_agents(self) -> list[tuple[str, int]]:
        """Where agents listen, the likeliest to lead first; empty when no job runs."""
        data = self._read("agents.json")
        return [(address, port) for _, address, port in data["agents"]] if data else []

    def end(self, status: int, message: str) -> None:
        """Says how the job ended."""
        self._publish("outcome.json", {"status": status, "message": message})
        (self.path / "agents.json").unlink(missing_ok=True)

    def outcome(self) -> tuple[int, str] | None:
        """Exit status and message of a job that has ended; None: it runs, or nobody was left to say it."""
        data = self._read("outcome.json")
        return (int(data["status"]), str(data["message"])) if data else None

    @contextlib.contextmanager
    def best_effort(self) -> Iterator[None]:
        """A file system that fails, or is full, is no reason to stop training: it is said."""
        try:
            yield
        except OSError as error:
            say(f"--job-dir {self.path} cannot be written ({error.strerror}): training goes on, status may not find it")

    def _read(self, name: str) -> Any:
        try:
            return json.loads((self.path / name).read_text())
        except FileNotFoundError:
            return None
        except (OSError, json.JSONDecodeError) as error:
            raise ConfigurationError(f"--job-dir {self.path}: its file {name}: {error}") from error

    def _publish(self, name: str, data: Any) -> None:
        os.replace(self._temporary(json.dumps(data)), self.path / name)

    def _temporary(self, text: str) -> str:
        # Of mode 0600.
        fd, name = tempfile.mkstemp(dir=self.path, prefix=".new-")
        with os.fdopen(fd, "w") as file:
            file.write(text)
        return name


def read_secret(path: Path, what: str) -> bytes:
    """A secret from a file.

    Args:
        what: the option that named it, for messages.

    Raises:
        ConfigurationError: it cannot be read, is empty, or others can read it.
    """
    try:
        mode = path.stat().st_mode & 0o777
        if mode & 0o077:
            raise ConfigurationError(f"{what} has mode {mode:04o}: others can read it, chmod 600 it")
        secret = path.read_bytes().strip()
    except OSError as error:
        raise ConfigurationError(f"{what}: {error.strerror}") from error
    if not secret:
        raise ConfigurationError(f"{what} is empty: everybody knows that secret")
    return secret
