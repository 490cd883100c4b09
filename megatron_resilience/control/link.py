"""A rank's end of its channel to the agent: epochs arrive here, on a thread of their own."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from typing import Any

from megatron_resilience.control.channel import Channel
from megatron_resilience.control.stacks import main_thread_waits
from megatron_resilience.deadpool.recovery import RestorePlan
from megatron_resilience.errors import ControlError, Interrupted
from megatron_resilience.topology.epoch import Epoch

AGENT_FD = "MEGATRON_RESILIENCE_AGENT_FD"
"""Environment variable with the number of the channel's descriptor in a rank."""
AGENT_LOST_EXIT = 79
"""Exit status of a rank whose agent is gone."""


class AgentLink:
    """Talks to the node's agent.

    Args:
        channel: this rank's end.
        on_epoch: called on the link's thread as soon as a newer epoch is known; must not block.
        on_leave: the same, when the job is to save a checkpoint and to end.
        protected: the same; the newest generation that is safe on other nodes too, or None.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._condition = threading.Condition()
        self._epoch: Epoch | None = None
        self._plans: dict[int, RestorePlan] = {}
        self._memory: list[tuple[dict[str, Any], list[int]]] = []
        self.on_epoch: Callable[[Epoch], None] = lambda _: None
        self.on_leave: Callable[[], None] = lambda: None
        self.protected: Callable[[], int | None] = lambda: None
        threading.Thread(target=self._read, name="agent-link", daemon=True).start()

    @classmethod
    def from_environment(cls) -> AgentLink | None:
        """The link of a rank that an agent started, or None in any other process."""
        import socket

        text = os.environ.get(AGENT_FD)
        return None if text is None else cls(Channel(socket.socket(fileno=int(text))))

    def send(self, kind: str, **fields: Any) -> None:
        """Tells the agent something; ``time`` (``time.time()``, seconds) is added.

        Raises:
            ControlError: the agent is gone.
        """
        try:
            self._channel.send({"kind": kind, "time": time.time(), **fields})
        except OSError as error:
            raise ControlError(f"this rank's node agent is gone ({error})") from error

    def latest(self) -> int:
        """Number of the newest epoch known; 0 before the first."""
        epoch = self._epoch
        return 0 if epoch is None else epoch.number

    def wait_epoch(self, after: int, timeout_s: float | None = None) -> Epoch:
        """The newest epoch, once it is newer than ``after``.

        Raises:
            TimeoutError: none came within ``timeout_s``.
        """
        with self._condition:
            if not self._condition.wait_for(lambda: self.latest() > after, timeout_s):
                raise TimeoutError
            assert self._epoch is not None
            return self._epoch

    def wait_plan(self, epoch: int) -> RestorePlan:
        """The restore plan of an epoch.

        Raises:
            Interrupted: a newer epoch came first.
        """
        with self._condition:
            self._condition.wait_for(lambda: epoch in self._plans or self.latest() > epoch)
            if self.latest() > epoch:
                raise Interrupted
            return self._plans[epoch]

    def request_memory(self, rank: int, sizes: dict[int, int]) -> dict[int, int]:
        """Descriptors of the node's shared memory that ``rank`` keeps.

        Args:
            rank: the keeper.
            sizes: bytes by rank whose state it is.

        Returns:
            A descriptor for each; memory that the agent already has (of a predecessor) is handed over as it is.

        Raises:
            ControlError: the agent cannot provide it; the message says why.
        """
        self.send("memory", rank=rank, sizes=sorted(sizes.items()))
        with self._condition:
            self._condition.wait_for(lambda: bool(self._memory))
            message, fds = self._memory.pop(0)
        if "error" in message:
            raise ControlError(message["error"])
        return dict(zip(message["ranks"], fds, strict=True))

    def _read(self) -> None:
        while True:
            received = self._channel.receive()
            if received is None:
                # Nobody is left to decide anything for this process.
                os._exit(AGENT_LOST_EXIT)
            message, fds = received
            kind = message["kind"]
            if kind == "ping":
                with contextlib.suppress(ControlError):
                    self.send("pong", waits=main_thread_waits(), protected=self.protected())
                continue
            if kind == "leave":
                self.on_leave()
                continue
            with self._condition:
                if kind == "epoch":
                    epoch = Epoch.from_json(message["epoch"])
                    if epoch.number > self.latest():
                        self._epoch = epoch
                        self.on_epoch(epoch)
                elif kind == "plan":
                    plan = RestorePlan.from_json(message["plan"])
                    self._plans[plan.epoch] = plan
                elif kind == "memory":
                    self._memory.append((message, fds))
                self._condition.notify_all()
