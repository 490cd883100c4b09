"""One agent per node: starts and watches its ranks, keeps its memory, and is one among the agents.

The agents form a star around the one that leads. When it goes, the next in order of joining leads: every agent
carries the last state it was told, and says again what its ranks have said in the current epoch.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
import time
from typing import Any

from megatron_resilience import exits
from megatron_resilience.control import events as e
from megatron_resilience.control.addresses import address_towards, bind
from megatron_resilience.control.coordinator import Coordinator
from megatron_resilience.control.desk import Desk
from megatron_resilience.control.health import Reading, judge
from megatron_resilience.control.jobdir import JobDir
from megatron_resilience.control.leader import Leader
from megatron_resilience.control.membership import Evidence, next_leader
from megatron_resilience.control.node import Node, RankProcess
from megatron_resilience.control.nvml import Devices
from megatron_resilience.control.options import LaunchOptions, failure_domain, split_endpoint
from megatron_resilience.control.overseer import Overseer
from megatron_resilience.control.peers import Peer, accept, connect
from megatron_resilience.control.record import Phase, Settings
from megatron_resilience.control.zygote import die_with_parent, start_zygote
from megatron_resilience.errors import ControlError, ResilienceError
from megatron_resilience.observe.console import say
from megatron_resilience.observe.events import EventLog
from megatron_resilience.topology.epoch import Epoch

_HEARTBEAT_S = 1.0
_RETRY_S = 0.05
_ENDING_S = 10.0
_DEVICES_S = 5.0
_FIRST_S = 300.0
"""How long the first agent may take to come up after this one: both import torch first, and the file system is cold."""
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
        self._domain = domain or node
        self._id = node
        self._order = order
        self._address = address
        self._endpoint = endpoint
        self._secret = secret
        self._listener = listener
        self._settings = Settings(options.nnodes, options.spares, options.nproc_per_node, options.max_restarts)
        self._jobdir = None if options.job_dir is None else JobDir(options.job_dir)
        log = options.events or (None if self._jobdir is None else self._jobdir.events_file(node))
        self._events = EventLog(log, node)
        self._leader: Leader | None = None
        self._to_leader: Peer | None = None
        self._leader_at: tuple[str, int] | None = None
        self._followers: dict[str, Peer] = {}
        self._addresses: dict[str, tuple[str, int]] = {}
        self._state: dict[str, Any] = {"version": 0, "state": None, "addresses": {}}
        self._epoch: Epoch | None = None
        self._running = False
        self._finishing = False
        self._loaded = False
        self._passed: dict[str, Evidence] = {}
        self._ended: asyncio.Future[int] | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        zygote_pid, self._zygote = start_zygote(options.script)
        self._zygote_pid = zygote_pid
        self.node = Node(node, address, options, self._zygote, self._watch, self._unwatch)
        self._overseer = Overseer(self.node, self._events, self._tell_leader, self._spawn)
        self._desk = Desk(lambda: self._leader, lambda: self._leader_at, self._send_to_agent)

    async def run(self) -> int:
        """Runs until the job ends; returns its exit status."""
        loop = asyncio.get_running_loop()
        self._ended = loop.create_future()
        loop.add_signal_handler(signal.SIGTERM, self._ask_to_end)
        loop.add_signal_handler(signal.SIGINT, self._broadcast_end, 128 + signal.SIGINT, "interrupted (SIGINT)")
        try:
            await self._listen()
            loop.add_reader(self._zygote.sock, self._read_zygote)
            if self._order == 0:
                if self._jobdir is not None:
                    self._jobdir.begin()
                self._lead(Coordinator(self._settings))
                self._share_addresses()
                self._leader_event(e.NodeJoined(self._id, self._order, self._domain))
            elif not await self._join():
                return await self._ended
            self._spawn(self._tick())
            self._spawn(self._watch_devices())
            return await self._ended
        finally:
            self._server.close()
            self.node.end_all()
            self._end_zygote()

    async def _join(self) -> bool:
        """Follows the agent of node rank 0; False when the job ends first.

        Raises:
            ControlError: it cannot be reached.
        """
        assert self._ended is not None
        joining = asyncio.create_task(self._follow(self._endpoint, first=True))
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

    # -- network -----------------------------------------------------------------------------------

    async def _listen(self) -> None:
        if self._listener is None:
            port = self._endpoint[1] if self._order == 0 else 0
            self._listener = bind(self._address, port)
        self._server = await asyncio.start_server(self._accepted, sock=self._listener)
        self._port = self._listener.getsockname()[1]
        self._addresses[self._id] = (self._address, self._port)

    async def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # Cancelled when the job ends, which asyncio's server would report as an error.
        with contextlib.suppress(asyncio.CancelledError):
            await self._serve(reader, writer)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            peer = await accept(reader, writer, self._secret)
            hello = await peer.receive()
        except ControlError as error:
            writer.close()
            say(f"refused a connection from {writer.get_extra_info('peername')}: {error}")
            return None
        if hello is not None and hello.get("kind") == "ask":
            return await self._desk.serve(peer, hello)
        if hello is None or hello.get("kind") != "hello" or self._leader is None:
            return peer.close()
        node = hello["node"]
        self._followers[node] = peer
        self._addresses[node] = (hello["address"][0], hello["address"][1])
        if hello["state"]["version"] > self._leader.version and hello["state"]["state"]:
            # The predecessor told this follower more than us before it died.
            self._leader.machine = Coordinator.from_json(self._settings, hello["state"]["state"])
            self._leader.version = hello["state"]["version"]
        if node not in self._leader.machine.alive:
            self._leader_event(e.NodeJoined(node, hello["order"], hello["domain"]))
        self._share_addresses()
        self._leader.publish_again()
        if self._leader.machine.epoch is not None:
            peer.send({"kind": "epoch", "epoch": self._leader.machine.epoch.to_json()})
            if self._leader.machine.phase is Phase.RUNNING:
                peer.send({"kind": "running"})
        evidence = await self._read_peer(peer, lambda m: self._from_agent(node, m))
        if self._followers.get(node) is peer:
            del self._followers[node]
            if self._ended and not self._ended.done():
                self._share_addresses()
                self._leader.lost(node, evidence)
        return None

    async def _read_peer(self, peer: Peer, handle: Any) -> Evidence:
        """Reads until the other side is gone; says how that is known."""
        while True:
            try:
                message = await asyncio.wait_for(peer.receive(), self._options.heartbeat_timeout_s)
            except TimeoutError:
                peer.close()
                return Evidence.SILENT
            except ControlError as error:
                say(str(error))
                message = None
            if message is None:
                peer.close()
                return Evidence.CLOSED
            if message["kind"] != "beat":
                handle(message)

    async def _follow(self, endpoint: tuple[str, int], first: bool = False) -> None:
        """Connects to the agent that leads and says everything it must know of this node."""
        patience = time.monotonic() + (_FIRST_S if first else self._options.heartbeat_timeout_s)
        while True:
            try:
                peer = await connect(*endpoint, self._secret)
                break
            except OSError as error:
                if time.monotonic() > patience:
                    raise ControlError(
                        f"no agent answers at {endpoint[0]}:{endpoint[1]} ({error.strerror or error}): "
                        "is --rdzv-endpoint right, and was the node of rank 0 started?"
                    ) from error
                endpoint = self._another(endpoint) if first else endpoint
                await asyncio.sleep(_RETRY_S)
        self._to_leader, self._leader_at = peer, endpoint
        peer.send(
            {
                "kind": "hello",
                "node": self._id,
                "order": self._order,
                "domain": self._domain,
                "address": self._addresses[self._id],
                "state": self._state,
            }
        )
        for process in self.node.ranks.values():
            for message in process.said.values():
                peer.send(message)
        self._spawn(self._stay(peer))

    def _another(self, endpoint: tuple[str, int]) -> tuple[str, int]:
        """Where to look for the leader next: the node of rank 0 may be dead, and the job's folder knows who leads."""
        known = self._jobdir.read_agents() if self._jobdir is not None else []
        return known[0] if known and known[0] != endpoint else self._endpoint

    async def _stay(self, peer: Peer) -> None:
        heard = False

        def handle(message: dict[str, Any]) -> None:
            nonlocal heard
            heard = True
            self._from_leader(message)

        evidence = await self._read_peer(peer, handle)
        if self._ended is None or self._finishing or self._to_leader is not peer:
            return None
        self._to_leader = self._leader_at = None
        if not heard and self._state["state"] is None:
            return self._finish(
                1,
                "the agent of node rank 0 closed the connection before this node could join: it ended, or the job's secret "
                "differs here (--secret-file, $MEGATRON_RESILIENCE_SECRET)",
            )
        return await self._succeed(evidence, heard)

    async def _succeed(self, evidence: Evidence, heard: bool) -> None:
        """The agent that led is gone: the next in order leads, perhaps this one."""
        state = self._state["state"]
        if state is None:
            return self._finish(1, "the agent that led is gone before the job began")
        roster: dict[str, int] = state["roster"]
        if heard:
            led = next_leader(roster, set(state["gone"]) | set(self._passed))
            if led is not None:
                self._passed[led] = evidence
        candidate = next_leader(roster, set(state["gone"]) | set(self._passed))
        if candidate is None or candidate == self._id:
            self._lead(Coordinator.from_json(self._settings, state))
            assert self._leader is not None
            self._leader.version = self._state["version"]
            self._spawn(self._take_over(dict(self._passed)))
            return None
        endpoint = self._state["addresses"][candidate]
        try:
            await asyncio.sleep(0 if heard else _RETRY_S)
            await self._follow((endpoint[0], endpoint[1]))
        except ControlError:
            self._passed[candidate] = Evidence.SILENT
            await self._succeed(Evidence.SILENT, heard=False)
        return None

    async def _take_over(self, passed: dict[str, Evidence]) -> None:
        """As successor: waits for the others to find us, then reports those that did not."""
        assert self._leader is not None
        say(f"node {self._id} leads now")
        self._share_addresses()
        self._events.write("leader", node=self._id)
        waiting_until = time.monotonic() + self._options.heartbeat_timeout_s
        while time.monotonic() < waiting_until:
            expected = set(self._leader.machine.alive) - set(passed) - {self._id}
            if expected <= set(self._followers):
                break
            await asyncio.sleep(_RETRY_S / 5)
        for process in self.node.ranks.values():
            for message in process.said.values():
                self._leader.message(self._id, message)
        # A change of layout that the predecessor had not ended is given up.
        if self.node.next_epoch is not None:
            self._leader.end_unfinished_switch(self.node.next_epoch)
        for node in list(self._leader.machine.alive):
            if node != self._id and node not in self._followers:
                self._leader.lost(node, passed.get(node, Evidence.SILENT))

    # -- leading -----------------------------------------------------------------------------------

    def _lead(self, machine: Coordinator) -> None:
        self._addresses = {**self._state["addresses"], **self._addresses}
        self._leader = Leader(self._id, self._address, machine, self._send_to_agent, self._events, self._desk.answered)

    def _leader_event(self, event: e.Event) -> None:
        assert self._leader is not None
        self._leader.event(event)

    def _send_to_agent(self, node: str, message: dict[str, Any]) -> None:
        if node == self._id:
            # Not at once: the machine is in the middle of an event.
            asyncio.get_running_loop().call_soon(self._from_leader, message)
        elif node in self._followers:
            self._followers[node].send(message)

    def _share_addresses(self) -> None:
        for peer in self._followers.values():
            peer.send({"kind": "addresses", "addresses": self._addresses})
        self._state["addresses"] = dict(self._addresses)
        if self._jobdir is not None:
            here = {self._id, *self._followers}
            with self._jobdir.best_effort():
                self._jobdir.write_agents(self._id, {n: at for n, at in self._addresses.items() if n in here})

    def _from_agent(self, node: str, message: dict[str, Any]) -> None:
        assert self._leader is not None
        if message["kind"] == "end":
            self._leader.event(e.RankFatal(-1, message["message"]))
            return
        if message["kind"] == "end_asked":
            self._leader.event(e.EndAsked(message["why"]))
            return
        if message["kind"] == "seen":
            self._desk.seen(node, message)
            return
        if message["kind"] == "layout_checked":
            self._desk.checked(message)
            return
        self._leader.message(node, message)

    # -- following ---------------------------------------------------------------------------------

    def _from_leader(self, message: dict[str, Any]) -> None:
        kind = message["kind"]
        if kind == "state":
            self._passed = {}
            self._state = {**self._state, "version": message["version"], "state": message["state"]}
        elif kind == "addresses":
            self._state["addresses"] = message["addresses"]
        elif kind == "epoch":
            self._enter(Epoch.from_json(message["epoch"]))
        elif kind == "plan":
            self.node.plan(message)
        elif kind == "leave":
            self.node.tell_all(message)
        elif kind == "look":
            self._tell_leader({"kind": "seen", "look": message["look"], "seen": self.node.seen()})
        elif kind == "running":
            self._running = True
            self._prepare()
        elif kind == "check_layout":
            self.node.tell_rank_zero(message)
        elif kind == "prepare":
            recalled = self.node.prepare_next(Epoch.from_json(message["epoch"]))
            if recalled:
                self._tell_leader({"kind": "recalled", "ranks": recalled})
        elif kind in ("hold", "stop_at"):
            self.node.tell_all(message)
        elif kind == "abandon":
            self.node.resume()
        elif kind == "switched":
            self._take_next(Epoch.from_json(message["epoch"]))
        elif kind == "survey":
            self._spawn(self._overseer.survey(message["survey"]))
        elif kind == "end_rank":
            self._overseer.end_rank(message["rank"], message["generation"], message["why"])
        elif kind == "save_stacks":
            self._spawn(self._overseer.save_stacks(message["why"]))
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
                self._spawn(self._overseer.kill(process))

    def _prepare(self) -> None:
        """A spare gets ranks ready once training runs: until then the machine has better things to do."""
        if self._epoch is None or self._id in self._epoch.slots or not self._running:
            return
        slots = self._options.spare_skeletons
        if slots is None:
            slots = 1 if os.path.exists("/proc/driver/nvidia/version") else len(self._epoch.slots)
        self.node.prepare(self._epoch, slots)

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
                self.node.parked(process, message["layout"], message["keeps"])
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
        self._tell_leader(message)

    def _tell_leader(self, message: dict[str, Any]) -> None:
        if self._leader is not None:
            self._from_agent(self._id, message)
        elif self._to_leader is not None:
            self._to_leader.send(message)

    def _read_zygote(self) -> None:
        received = self._zygote.receive()
        if received is None:
            asyncio.get_running_loop().remove_reader(self._zygote.sock)
            # Its ranks have died with it. This node is of no use any more; the others go on without it.
            return self._finish(
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
            self._tell_leader(
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
            if self._leader is not None:
                self._leader.event(e.Tick())
            if self._epoch is not None:
                self._overseer.tick(self._epoch.number)
            if time.monotonic() - beat > _HEARTBEAT_S:
                beat = time.monotonic()
                for peer in [*self._followers.values(), *([self._to_leader] if self._to_leader else [])]:
                    peer.send({"kind": "beat"})

    async def _watch_devices(self) -> None:
        """Reports what goes wrong with this node's devices; on another thread, because a driver in trouble may take its time."""
        devices = await asyncio.to_thread(Devices.open)
        before: list[Reading] = []
        while devices is not None:
            now = await asyncio.to_thread(devices.read)
            for ailment in judge(before, now):
                self._events.write("device", text=ailment.text, grave=ailment.grave)
                if ailment.grave:
                    self._tell_leader({"kind": "ailing", "why": ailment.text})
            before = now
            await asyncio.sleep(_DEVICES_S)

    def _ask_to_end(self) -> None:
        """SIGTERM: the job ends in good order, as a whole."""
        why = f"node {self._id} got SIGTERM"
        if self._leader is None and self._to_leader is None:
            self._broadcast_end(128 + signal.SIGTERM, why)
        else:
            self._tell_leader({"kind": "end_asked", "why": why})

    def _broadcast_end(self, status: int, message: str) -> None:
        """Ends the job everywhere from here."""
        if self._leader is not None:
            for peer in self._followers.values():
                peer.send({"kind": "stop", "status": status, "message": message})
        elif self._to_leader is not None:
            self._to_leader.send({"kind": "end", "message": f"node {self._id}: {message}"})
        self._end_of_job(status, message)

    def _end_of_job(self, status: int, message: str) -> None:
        """The job ends, not only this node's part in it: whoever leads leaves word of it."""
        if self._leader is not None and self._jobdir is not None and not self._finishing:
            with self._jobdir.best_effort():
                self._jobdir.end(status, message)
        self._finish(status, message)

    def _finish(self, status: int, message: str) -> None:
        if self._ended is None or self._finishing:
            return
        self._finishing = True
        if message and (self._leader is not None or self._to_leader is None):
            say(message)
        self._spawn(self._flush_and_end(status))

    async def _flush_and_end(self, status: int) -> None:
        for peer in list(self._followers.values()):
            await peer.flush()
        await asyncio.sleep(0.05)
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(status)

    def _spawn(self, coroutine: Any) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)

        def done(finished: asyncio.Task[Any]) -> None:
            self._tasks.discard(finished)
            if not finished.cancelled() and (error := finished.exception()) is not None:
                if not isinstance(error, ResilienceError):
                    sys.excepthook(type(error), error, error.__traceback__)
                self._finish(1, str(error))

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
