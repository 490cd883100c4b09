"""One agent per node: starts and watches its ranks, keeps its memory, and does what the one that leads says (:mod:`star`)."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import Coroutine, Iterable
from typing import Any

from megatron_resilience import exits
from megatron_resilience.control.addresses import address_towards
from megatron_resilience.control.health import Reading, judge
from megatron_resilience.control.jobdir import JobDir
from megatron_resilience.control.node import Node, RankProcess
from megatron_resilience.control.nvml import Devices
from megatron_resilience.control.options import LaunchOptions, failure_domain, split_endpoint
from megatron_resilience.control.overseer import Overseer
from megatron_resilience.control.star import Member, Star
from megatron_resilience.control.zygote import die_with_parent, start_zygote
from megatron_resilience.errors import ResilienceError
from megatron_resilience.observe.console import say
from megatron_resilience.observe.events import EventLog
from megatron_resilience.topology.epoch import Epoch

_HEARTBEAT_S = 1.0
_ENDING_S = 10.0
_DEVICES_S = 5.0
_REMEMBERED = ("ready", "holdings", "joined", "stepped", "finished", "broken")
UNBLOCK_TIMEOUT_S = 30.0
"""After a new epoch, a rank that is not back at the door by then is killed and started again in place."""


class Agent:
    """See the module.

    Args:
        options: the launcher's.
        node: this node's id, unique in the job.
        order: its node rank.
        address: of the configured interface.
        endpoint: where the agent of node rank 0 listens.
        secret: the job's.
        domain: failure domain that this node shares with others; default: it is one of its own.
    """

    def __init__(
        self,
        options: LaunchOptions,
        node: str,
        order: int,
        address: str,
        endpoint: tuple[str, int],
        secret: bytes,
        listener: socket.socket | None = None,
        domain: str = "",
    ) -> None:
        self._options = options
        self._id = node
        self._jobdir = None if options.job_dir is None else JobDir(options.job_dir)
        log = options.events or (None if self._jobdir is None else self._jobdir.events_file(node))
        self._events = EventLog(log, node)
        me = Member(node, order, address, domain or node)
        self._star = Star(options, me, endpoint, secret, listener, self._events, self._jobdir, self)
        self._leads_first = order == 0
        self._epoch: Epoch | None = None
        self._running = False
        self._loaded = False
        self._ended: asyncio.Future[int] | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        zygote_pid, self._zygote = start_zygote(options.script)
        self._zygote_pid = zygote_pid
        self.node = Node(node, address, options, self._zygote, self._watch, self._unwatch)
        self._overseer = Overseer(self.node, self._events, self._star.tell_leader, self.spawn)

    async def run(self) -> int:
        """Runs until the job ends; returns its exit status."""
        loop = asyncio.get_running_loop()
        self._ended = loop.create_future()
        loop.add_signal_handler(signal.SIGTERM, self._ask_to_end)
        loop.add_signal_handler(signal.SIGINT, self._broadcast_end, 128 + signal.SIGINT, "interrupted (SIGINT)")
        try:
            await self._star.listen()
            loop.add_reader(self._zygote.sock, self._read_zygote)
            if self._leads_first:
                self._star.begin()
            elif not await self._join():
                return await self._ended
            self.spawn(self._tick())
            self.spawn(self._watch_devices())
            return await self._ended
        finally:
            self._star.close()
            self.node.end_all()
            self._end_zygote()

    async def _join(self) -> bool:
        """Follows the agent that leads; False when the job ends first.

        Raises:
            ControlError: it cannot be reached.
        """
        assert self._ended is not None
        joining = asyncio.create_task(self._star.join())
        either: list[asyncio.Future[Any]] = [joining, self._ended]
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if joining.done():
            joining.result()
            return True
        joining.cancel()
        return False

    def _end_zygote(self) -> None:
        """Lets it end its ranks and wait for them, so that no process of this node outlives the agent."""
        self._zygote.close()
        deadline = time.monotonic() + (_ENDING_S if self._loaded else 0.0)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(self._zygote_pid, os.WNOHANG)[0] == 0:
                if time.monotonic() >= deadline:
                    os.kill(self._zygote_pid, signal.SIGKILL)
                    os.waitpid(self._zygote_pid, 0)
                    return
                time.sleep(0.005)

    # -- following ---------------------------------------------------------------------------------

    def from_leader(self, message: dict[str, Any]) -> None:
        """Does what the one that leads says."""
        kind = message["kind"]
        if kind == "epoch":
            self._enter(Epoch.from_json(message["epoch"]))
        elif kind == "plan":
            self.node.plan(message)
        elif kind == "leave":
            self.node.tell_all(message)
        elif kind == "look":
            self._star.tell_leader({"kind": "seen", "look": message["look"], "seen": self.node.seen()})
        elif kind == "running":
            self._running = True
            self._prepare()
        elif kind == "check_layout":
            self.node.tell_rank_zero(message)
        elif kind == "prepare":
            recalled = self.node.prepare_next(Epoch.from_json(message["epoch"]))
            if recalled:
                self._star.tell_leader({"kind": "recalled", "ranks": recalled})
        elif kind in ("hold", "stop_at"):
            self.node.tell_all(message)
        elif kind == "abandon":
            self.node.end_next()
            self.node.tell_all({"kind": "resume"})
        elif kind == "switched":
            self._take_next(Epoch.from_json(message["epoch"]))
        elif kind == "drained":
            self.node.leave()
        elif kind == "survey":
            self.spawn(self._overseer.survey(message["survey"]))
        elif kind == "end_rank":
            self._overseer.end_rank(message["rank"], message["generation"], message["why"])
        elif kind == "save_stacks":
            self.spawn(self._overseer.save_stacks(message["why"]))
        elif kind == "stop":
            self._end_of_job(message["status"], message["message"])

    def _enter(self, epoch: Epoch) -> None:
        if self._epoch is not None and epoch.number <= self._epoch.number:
            return
        if self.node.next_epoch is not None and epoch.number == self.node.next_epoch.number:
            # Word of the switch got lost with a leader.
            self._take_next(epoch)
            return
        self._epoch = epoch
        self._running = False
        self.node.enter(epoch)
        asyncio.get_running_loop().call_later(UNBLOCK_TIMEOUT_S, self._unblock, epoch)

    def _take_next(self, epoch: Epoch) -> None:
        """The next world is this one; what is left of the old one on this node is ended."""
        if self._epoch is not None and epoch.number <= self._epoch.number:
            return
        self._epoch = epoch
        self.node.take_next(epoch)

    def _unblock(self, epoch: Epoch) -> None:
        """Kills what did not leave the dead world; a killed rank is started again in place."""
        if self._epoch is not epoch or epoch.fresh:
            return
        for process in self.node.ranks.values():
            if not process.newcomer and process.ready_epoch < epoch.number and process.pid is not None:
                say(f"rank {process.rank} does not leave the old world, it is killed and started again")
                self.spawn(self._overseer.kill(process))

    def _prepare(self) -> None:
        """A spare gets ranks ready once training runs: until then the machine has better things to do."""
        if self._epoch is None or self._id in self._epoch.slots or not self._running:
            return
        slots = self._options.spare_skeletons
        if slots is None:
            slots = 1 if os.path.exists("/proc/driver/nvidia/version") else len(self._epoch.slots)
        self.node.prepare(self._epoch, slots)

    def said(self) -> Iterable[dict[str, Any]]:
        """What this node's ranks have said in the current epoch."""
        return [message for process in self.node.ranks.values() for message in process.said.values()]

    def unfinished_switch(self) -> Epoch | None:
        """The first epoch of a world that this node prepares."""
        return self.node.next_epoch

    # -- this node's processes ---------------------------------------------------------------------

    def _watch(self, process: RankProcess) -> None:
        asyncio.get_running_loop().add_reader(process.channel.sock, self._read_rank, process)

    def _unwatch(self, process: RankProcess) -> None:
        # The zygote's word may come before what the rank said last. And a channel that is closed while the loop still reads it
        # would keep the next rank with the same descriptor from being heard.
        while (received := process.channel.receive(wait=False)) is not None:
            self._hear(process, *received)
        asyncio.get_running_loop().remove_reader(process.channel.sock)

    def _read_rank(self, process: RankProcess) -> None:
        received = process.channel.receive()
        if received is None:
            asyncio.get_running_loop().remove_reader(process.channel.sock)
            return
        self._hear(process, *received)

    def _hear(self, process: RankProcess, message: dict[str, Any], fds: list[int]) -> None:
        kind = message["kind"]
        if self._overseer.rank_said(process, message):
            return
        if kind == "memory":
            self.node.provide_memory(process, message["sizes"])
        elif kind == "drop_memory":
            self.node.drop_memory(process, message["owners"])
        elif kind == "shelf":
            self.node.keep_shelf(process, message["owner"], fds[0], message["size"])
        elif kind == "borrow":
            self.node.lend(process, message["world"], message["sources"])
        elif self.node.next.get(process.rank) is process:
            message.setdefault("rank", process.rank)
            self._report(process, message)
        elif self.node.ranks.get(process.rank) is process:
            message.setdefault("rank", process.rank)
            if kind == "parked":
                self.node.parked(process, message["epoch"], message["layout"], message["keeps"])
            if kind == "joined":
                # From now on it is one of those that must leave a dead world in time.
                process.newcomer = False
            self._report(process, message)
            if kind == "ready" and self._epoch is not None:
                process.ready_epoch = message["epoch"]
                if self.node.all_ready(self._epoch):
                    newest = max(p.pulse.generation for p in self.node.ranks.values())
                    held = {"kind": "holdings", "epoch": self._epoch.number, "holdings": self.node.holdings()}
                    self._report(process, {**held, "newest": newest})

    def _report(self, process: RankProcess, message: dict[str, Any]) -> None:
        if message["kind"] == "ready":
            process.said.clear()
        if message["kind"] in _REMEMBERED:
            process.said[message["kind"]] = message
        self._star.tell_leader(message)

    def _read_zygote(self) -> None:
        received = self._zygote.receive()
        if received is None:
            asyncio.get_running_loop().remove_reader(self._zygote.sock)
            # Its ranks have died with it. This node is of no use any more; the others go on without it.
            return self.finish(
                exits.NODE_LEFT, f"the zygote of node {self._id} died, and its ranks with it: this node leaves the job"
            )
        message, fds = received
        if message["kind"] == "failed":
            return self._broadcast_end(2, message["error"])
        if message["kind"] == "loaded":
            self._loaded = True
            return None
        ended = self.node.zygote_said(message, fds)
        if ended is not None and self._epoch is not None:
            process, status = ended
            self._star.tell_leader(
                {
                    "kind": "exited",
                    "rank": process.rank,
                    "epoch": process.ready_epoch if process.world > self.node.world else self._epoch.number,
                    "status": status,
                    "generation": process.pulse.generation,
                    "hung": process.hung,
                }
            )
        return None

    # -- time and ends -----------------------------------------------------------------------------

    async def _tick(self) -> None:
        beat = 0.0
        while True:
            await asyncio.sleep(0.1)
            self._star.tick()
            if self._epoch is not None:
                self._overseer.tick(self._epoch.number)
            if time.monotonic() - beat > _HEARTBEAT_S:
                beat = time.monotonic()
                self._star.beat()

    async def _watch_devices(self) -> None:
        """Reports what goes wrong with this node's devices; on another thread, because a driver in trouble may take its time."""
        devices = await asyncio.to_thread(Devices.open)
        before: list[Reading] = []
        while devices is not None:
            now = await asyncio.to_thread(devices.read)
            for ailment in judge(before, now):
                self._events.write("device", text=ailment.text, grave=ailment.grave)
                if ailment.grave:
                    self._star.tell_leader({"kind": "ailing", "why": ailment.text})
            before = now
            await asyncio.sleep(_DEVICES_S)

    def _ask_to_end(self) -> None:
        """SIGTERM: the job ends in good order, as a whole."""
        why = f"node {self._id} got SIGTERM"
        if self._star.alone:
            self._broadcast_end(128 + signal.SIGTERM, why)
        else:
            self._star.tell_leader({"kind": "end_asked", "why": why})

    def _broadcast_end(self, status: int, message: str) -> None:
        """Ends the job everywhere from here."""
        self._star.end_everywhere(status, message)
        self._end_of_job(status, message)

    def _end_of_job(self, status: int, message: str) -> None:
        """The job ends, not only this node's part in it: whoever leads leaves word of it."""
        if self._star.leader is not None and self._jobdir is not None and not self._star.finishing:
            with self._jobdir.best_effort():
                self._jobdir.end(status, message)
        self.finish(status, message)

    def finish(self, status: int, message: str) -> None:
        """Ends this agent."""
        if self._ended is None or self._star.finishing:
            return
        self._star.finishing = True
        if message and (self._star.leader is not None or self._star.alone):
            say(message)
        self.spawn(self._flush_and_end(status))

    async def _flush_and_end(self, status: int) -> None:
        await self._star.flush()
        await asyncio.sleep(0.05)
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(status)

    def spawn(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        """Runs it beside; its error ends this agent."""
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)

        def done(finished: asyncio.Task[Any]) -> None:
            self._tasks.discard(finished)
            if not finished.cancelled() and (error := finished.exception()) is not None:
                if not isinstance(error, ResilienceError):
                    sys.excepthook(type(error), error, error.__traceback__)
                self.finish(1, str(error))

        task.add_done_callback(done)


def run_agent(
    options: LaunchOptions,
    order: int,
    secret: bytes,
    endpoint: tuple[str, int] | None = None,
    listener: socket.socket | None = None,
) -> int:
    """Runs one agent in this process until the job ends; returns the exit status.

    Args:
        order: its node rank.
        endpoint: of the agent with node rank 0; default: the option's.
        listener: already bound socket, of the agent with node rank 0.

    Raises:
        ResilienceError: it cannot start.
    """
    if endpoint is None:
        endpoint = split_endpoint(options.rdzv_endpoint) if options.rdzv_endpoint else ("127.0.0.1", 0)
    address = options.node_addr or address_towards(*(endpoint if endpoint[1] else (endpoint[0], 9)))
    # People know a node by the name that Slurm gives it.
    name = os.environ.get("SLURMD_NODENAME") or socket.gethostname().split(".")[0]
    node = f"n{order}" if options.local_nodes else f"{name}-{order}-{os.getpid()}"
    domain = failure_domain(options.failure_domains, {node} if options.local_nodes else {name, socket.gethostname()})
    agent = Agent(options, node, order, address, endpoint, secret, listener, domain)
    return asyncio.run(agent.run())


def be_local_node(launcher: int) -> None:
    """In a forked agent of ``--local-nodes``: ends with the launcher (its process id), and with nobody else's signals."""
    die_with_parent(launcher, signal.SIGTERM)
    os.setpgid(0, 0)
