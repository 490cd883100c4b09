"""A rank's end of its channel to the agent: epochs arrive here, on a thread of their own."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from typing import Any

from megatron_resilience import exits
from megatron_resilience.control.channel import Channel
from megatron_resilience.control.stacks import main_thread_waits
from megatron_resilience.deadpool.recovery import RestorePlan
from megatron_resilience.errors import ControlError, Interrupted, SetAside
from megatron_resilience.topology.epoch import Epoch

AGENT_FD = "MEGATRON_RESILIENCE_AGENT_FD"
"""Environment variable with the number of the channel's descriptor in a rank."""


class AgentLink:
    """Talks to the node's agent.

    Args:
        channel: this rank's end.
        on_superseded: called on the link's thread as soon as a newer epoch is known, or that the job goes on without this
            process; must not block.
        given_up: how many changes of layout were.
        training_world: that this rank trains in (``Epoch.world``).
        on_leave: the same, when the job is to save a checkpoint and to end.
        protected: the same; the newest generation that is safe on other nodes too, or None.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._condition = threading.Condition()
        self._epoch: Epoch | None = None
        self._plans: dict[int, RestorePlan] = {}
        self._memory: list[tuple[dict[str, Any], list[int]]] = []
        self._lent: list[tuple[dict[str, Any], list[int]]] = []
        self._gone = 0
        self.given_up = 0
        self._entered = -1
        self._trains_in = 0
        self.training_world = 0
        self._limit: int | None = None
        self._stop_at: int | None = None
        self._set_aside = False
        self.on_superseded: Callable[[], None] = lambda: None
        self.on_leave: Callable[[], None] = lambda: None
        self.on_check: Callable[[dict[str, Any]], None] = self._cannot_check
        self.protected: Callable[[], int | None] = lambda: None
        threading.Thread(target=self._read, name="agent-link", daemon=True).start()

    @classmethod
    def from_environment(cls) -> AgentLink | None:
        """The link of a rank that an agent started, or None in any other process."""
        import socket

        text = os.environ.get(AGENT_FD)
        return None if text is None else cls(Channel(socket.socket(fileno=int(text))))

    def send(self, kind: str, fds: list[int] | None = None, **fields: Any) -> None:
        """Tells the agent something; ``time`` (``time.time()``, seconds) is added.

        Raises:
            ControlError: the agent is gone.
        """
        try:
            self._channel.send({"kind": kind, "time": time.time(), **fields}, fds)
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

    def borrow(self, world: int, sources: list[tuple[int, int]]) -> dict[int, tuple[dict[str, Any], list[int]]]:
        """Memory of another world's ranks that lies on this node.

        Args:
            world: number of the world.
            sources: ``(owner, holder)`` of each segment.

        Returns:
            By owner: sizes (``bytes``, ``table_bytes``), and the descriptors of segment and table.

        Raises:
            ControlError: it is not there; the message says what is missing.
        """
        self.send("borrow", world=world, sources=sources)
        with self._condition:
            self._condition.wait_for(lambda: len(self._lent) == len(sources) or self._lent_error() is not None)
            error, lent, self._lent = self._lent_error(), self._lent, []
        if error is not None:
            raise ControlError(error)
        return {message["owner"]: (message, fds) for message, fds in lent}

    def _lent_error(self) -> str | None:
        return next((message["error"] for message, _ in self._lent if "error" in message), None)

    @property
    def training_epoch(self) -> int:
        """Number of the epoch that this rank trains in."""
        return self._trains_in

    # -- changes of layout -------------------------------------------------------------------------

    def trains(self, epoch: int, generation: int, world: int) -> None:
        """This rank is about to train from a generation on, in an epoch; what was said in earlier ones is over."""
        with self._condition:
            self._trains_in, self._entered, self.training_world = epoch, generation - 1, world
            self._limit = self._stop_at = None
            self._set_aside = False

    def may_enter(self, generation: int) -> bool:
        """On entry to the step after ``generation``: waits for the word that it may be taken; False: park here.

        Raises:
            Interrupted: a newer epoch came.
        """
        with self._condition:
            self._condition.wait_for(lambda: self._limit is None or generation < self._limit or self._superseded())
            if self._superseded():
                raise Interrupted
            self._entered = max(self._entered, generation)
            return self._stop_at != generation

    def wait_resumed(self, generation: int) -> None:
        """Parked at ``generation``: returns when the change of layout was given up.

        Raises:
            SetAside: it was made, and this process is kept.
            Interrupted: a newer epoch came.
        """
        with self._condition:
            self._condition.wait_for(lambda: self._stop_at != generation or self._superseded() or self._set_aside)
            if self._set_aside:
                raise SetAside
            if self._superseded():
                raise Interrupted

    def wait_go(self, epoch: int) -> None:
        """In a new world: returns when it is the one that trains.

        Raises:
            Interrupted: a newer epoch came.
        """
        with self._condition:
            self._condition.wait_for(lambda: self._gone >= epoch or self.latest() > epoch)
            if self.latest() > epoch:
                raise Interrupted

    def _cannot_check(self, message: dict[str, Any]) -> None:
        error = "the job runs without --hotswap-parallelism, or training has not begun"
        self.send("layout_checked", ticket=message["ticket"], error=error)

    def _superseded(self) -> bool:
        return self.latest() > self._trains_in

    def _read(self) -> None:
        while True:
            received = self._channel.receive()
            if received is None:
                # Nobody is left to decide anything for this process.
                os._exit(exits.AGENT_LOST)
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
                        self.on_superseded()
                elif kind == "plan":
                    plan = RestorePlan.from_json(message["plan"])
                    self._plans[plan.epoch] = plan
                elif kind == "memory":
                    self._memory.append((message, fds))
                elif kind == "lent":
                    self._lent.append((message, fds))
                elif kind == "go":
                    self._gone = message["epoch"]
                elif kind == "set_aside":
                    self._set_aside = True
                    self.on_superseded()
                elif kind == "hold":
                    self._limit = self._entered + 1
                    with contextlib.suppress(ControlError):
                        self.send("held", epoch=self._trains_in, limit=self._limit)
                elif kind == "stop_at":
                    self._stop_at, self._limit = message["generation"], None
                elif kind == "check_layout":
                    # Not here: the agent's other questions must not wait for it.
                    threading.Thread(target=self.on_check, args=(message,), daemon=True).start()
                elif kind == "resume":
                    self._stop_at = self._limit = None
                    self.given_up += 1
                self._condition.notify_all()
