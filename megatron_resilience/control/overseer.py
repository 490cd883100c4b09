"""An agent's eye on the ranks of its node: who is frozen, who makes no progress; saves their stacks and ends them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable, Coroutine
from typing import Any

from megatron_resilience.control.node import Node, RankProcess
from megatron_resilience.control.watch import Alarm, Watch
from megatron_resilience.observe.console import say
from megatron_resilience.observe.events import EventLog

SURVEY_S = 1.0
"""How long a rank has to answer a survey."""
KILL_S = 10.0
"""How long a killed process may take to end; one that takes longer hangs in the kernel."""
_POLL_S = 0.02


class Overseer:
    """See the module.

    Args:
        node: whose ranks it watches.
        events: gets the stacks.
        tell_leader: sends a message to the agent that leads.
        spawn: runs a coroutine in the background.
    """

    def __init__(
        self,
        node: Node,
        events: EventLog,
        tell_leader: Callable[[dict[str, Any]], None],
        spawn: Callable[[Coroutine[Any, Any, None]], None],
    ) -> None:
        self._node = node
        self._events = events
        self._tell_leader = tell_leader
        self._spawn = spawn
        self._watch = Watch()

    def rank_said(self, process: RankProcess, message: dict[str, Any]) -> bool:
        """Takes note of what a rank says; True when the message was for nobody else."""
        now, pulse, kind = time.monotonic(), process.pulse, message["kind"]
        if kind == "progress":
            pulse.enters(message["generation"], message["in_step"], now)
            pulse.protected = message["protected"]
        elif kind == "pong":
            pulse.answers(message["waits"], now)
            pulse.protected = message["protected"]
        elif kind == "joined":
            pulse.begins(message["hang_timeout_s"], now)
        elif kind in ("ready", "broken", "finished"):
            pulse.rests()
        return kind in ("progress", "pong")

    def tick(self, epoch: int) -> None:
        """Looks at every rank; to be called several times a second."""
        ask, alarms = self._watch.look({r: p.pulse for r, p in self._node.ranks.items()}, time.monotonic())
        for rank in ask:
            self._node.tell(self._node.ranks[rank], {"kind": "ping"})
        for rank, alarm in alarms.items():
            process = self._node.ranks[rank]
            if alarm is Alarm.FROZEN:
                self._spawn(self._end(process, "its process did not react"))
            else:
                self._tell_leader({"kind": "stalled", "rank": rank, "epoch": epoch})

    async def survey(self, number: int) -> None:
        """Tells the leader where each rank of this node stands now."""
        asked, ranks = time.monotonic(), dict(self._node.ranks)
        for process in ranks.values():
            if process.pulse.asked is None:
                process.pulse.asked = asked
                self._node.tell(process, {"kind": "ping"})
        while time.monotonic() < asked + SURVEY_S and any(p.pulse.answered < asked for p in ranks.values()):
            await asyncio.sleep(_POLL_S)
        standings = [
            (rank, p.pulse.answered >= asked, p.pulse.generation, p.pulse.overdue(asked), p.pulse.waits)
            for rank, p in ranks.items()
        ]
        self._tell_leader({"kind": "standings", "survey": number, "standings": standings})

    def end_rank(self, rank: int, generation: int, why: str) -> None:
        """Ends a rank that holds the others up, unless it has gone on meanwhile."""
        process = self._node.ranks.get(rank)
        if process is not None and process.pulse.in_step and process.pulse.generation == generation:
            self._spawn(self._end(process, why))

    async def save_stacks(self, why: str) -> None:
        """Writes the stacks of this node's ranks to the event log."""
        for process in list(self._node.ranks.values()):
            if process.pid is not None:
                self._events.write("stacks", rank=process.rank, why=why, text=await process.stacks.take(process.pid))

    async def _end(self, process: RankProcess, why: str) -> None:
        if process.pid is None or process.killed or process.hung:
            return
        process.hung = why
        process.pulse.rests()
        text = await process.stacks.take(process.pid)
        self._events.write("hung", rank=process.rank, generation=process.pulse.generation, why=why, stacks=text)
        say(f"rank {process.rank} hangs in the step after generation {process.pulse.generation}: {why}; it is killed")
        await self.kill(process)

    async def kill(self, process: RankProcess) -> None:
        """Kills a rank, whose exit is then news like any other; tells the leader when its process does not end."""
        if process.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
        deadline = time.monotonic() + KILL_S
        while self._node.ranks.get(process.rank) is process:
            if time.monotonic() > deadline:
                return self._tell_leader({"kind": "unkillable", "rank": process.rank})
            await asyncio.sleep(_POLL_S)
        return None
