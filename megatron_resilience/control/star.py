"""The agents form a star around the one that leads: an agent's connections, and who leads next.

When the one that leads goes, the next in order of joining leads: every agent carries the last state it was told, and says
again what its ranks have said in the current epoch. A successor first lets the others find it, and takes over the newest
state that any of them was told; only then is anything decided.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Coroutine, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from megatron_resilience.control import events as e
from megatron_resilience.control.addresses import bind
from megatron_resilience.control.coordinator import Coordinator
from megatron_resilience.control.desk import Desk
from megatron_resilience.control.jobdir import JobDir
from megatron_resilience.control.leader import Leader
from megatron_resilience.control.membership import Evidence, next_leader
from megatron_resilience.control.options import LaunchOptions
from megatron_resilience.control.peers import Peer, accept, connect
from megatron_resilience.control.record import Phase, Settings
from megatron_resilience.errors import ControlError
from megatron_resilience.observe.console import say
from megatron_resilience.observe.events import EventLog
from megatron_resilience.topology.epoch import Epoch

_RETRY_S = 0.05
_FIRST_S = 300.0
"""How long the first agent may take to come up after this one: both import torch first, and the file system is cold."""


@dataclass(frozen=True)
class Member:
    """An agent as the others know it.

    Attributes:
        node: its node's id, unique in the job.
        order: its node rank.
        address: of the configured interface.
        domain: failure domain that its node shares with others.
    """

    node: str
    order: int
    address: str
    domain: str


class Host(Protocol):
    """What a star asks of the agent whose place it is."""

    def from_leader(self, message: dict[str, Any]) -> None:
        """Does what the one that leads says."""

    def said(self) -> Iterable[dict[str, Any]]:
        """What this node's ranks have said in the current epoch."""

    def unfinished_switch(self) -> Epoch | None:
        """The first epoch of a world that this node prepares."""

    def finish(self, status: int, message: str) -> None:
        """Ends this agent."""

    def spawn(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        """Runs it beside; its error ends this agent."""


class _Succession:
    """What comes in while a successor waits for the others to find it.

    Args:
        settings: of the job.
        version: of the state that the successor was told.
        passed: nodes known to be gone, and how that is known.
        said: what the successor's own ranks have said, by node.

    Attributes:
        found: first words of those that have come, by node.
        version: of the newest state that anybody was told.
    """

    def __init__(
        self, settings: Settings, version: int, passed: dict[str, Evidence], said: list[tuple[str, dict[str, Any]]]
    ) -> None:
        self._settings = settings
        self.version, self.passed, self.said = version, passed, said
        self.found: dict[str, dict[str, Any]] = {}

    def find(self, hello: dict[str, Any], leader: Leader) -> None:
        """Another one has come; perhaps the predecessor told it more than us before it died."""
        self.found[hello["node"]] = hello
        told = hello["state"]
        if told["state"] and told["version"] > self.version:
            leader.machine = Coordinator.from_json(self._settings, told["state"])
            self.version = told["version"]


class Star:
    """See the module.

    Args:
        options: the launcher's.
        me: this agent.
        endpoint: where the agent of node rank 0 listens.
        secret: the job's.
        listener: already bound socket, of the agent with node rank 0.
        events: the log.
        jobdir: the job's folder.
        host: this agent.

    Attributes:
        leader: if this agent leads.
        finishing: the end has begun: nobody's going is news any more.
    """

    def __init__(
        self,
        options: LaunchOptions,
        me: Member,
        endpoint: tuple[str, int],
        secret: bytes,
        listener: socket.socket | None,
        events: EventLog,
        jobdir: JobDir | None,
        host: Host,
    ) -> None:
        self._options, self._me, self._host = options, me, host
        self._endpoint, self._secret, self._listener = endpoint, secret, listener
        self._events, self._jobdir = events, jobdir
        self._settings = Settings(options.nnodes, options.spares, options.nproc_per_node, options.max_restarts)
        self.leader: Leader | None = None
        self.finishing = False
        self._server: asyncio.Server | None = None
        self._to_leader: Peer | None = None
        self._leader_at: tuple[str, int] | None = None
        self._followers: dict[str, Peer] = {}
        self._addresses: dict[str, tuple[str, int]] = {}
        self._state: dict[str, Any] = {"version": 0, "state": None, "addresses": {}}
        self._passed: dict[str, Evidence] = {}
        self._succession: _Succession | None = None
        self._desk = Desk(lambda: self.leader, lambda: self._leader_at, self._send_to_agent, lambda: self._decides)

    @property
    def alone(self) -> bool:
        """Whether this agent neither leads nor knows one that does."""
        return self.leader is None and self._to_leader is None

    @property
    def _decides(self) -> bool:
        """Whether this agent leads, and has taken over whatever there was to take over."""
        return self.leader is not None and self._succession is None

    async def listen(self) -> None:
        """Lets others connect."""
        if self._listener is None:
            port = self._endpoint[1] if self._me.order == 0 else 0
            self._listener = bind(self._me.address, port)
        self._server = await asyncio.start_server(self._accepted, sock=self._listener)
        self._addresses[self._me.node] = (self._me.address, self._listener.getsockname()[1])

    def close(self) -> None:
        """Lets nobody connect any more."""
        if self._server is not None:
            self._server.close()

    def begin(self) -> None:
        """As the agent of node rank 0: leads a new job."""
        if self._jobdir is not None:
            self._jobdir.begin()
        self._lead(Coordinator(self._settings))
        self._share_addresses()
        self._leader_event(e.NodeJoined(self._me.node, self._me.order, self._me.domain))

    async def join(self) -> None:
        """Follows the agent of node rank 0, or whoever leads.

        Raises:
            ControlError: it cannot be reached.
        """
        await self._follow(self._endpoint, first=True)

    def tell_leader(self, message: dict[str, Any]) -> None:
        """To whoever leads, this agent included; lost while nobody does: what matters is said again."""
        if self.leader is not None:
            self._from_agent(self._me.node, message)
        elif self._to_leader is not None:
            self._to_leader.send(message)

    def tick(self) -> None:
        """Time passes."""
        if self._decides:
            self._leader_event(e.Tick())

    def beat(self) -> None:
        """A sign of life to everybody this agent is connected with."""
        for peer in [*self._followers.values(), *([self._to_leader] if self._to_leader else [])]:
            peer.send({"kind": "beat"})

    def end_everywhere(self, status: int, message: str) -> None:
        """Tells the others that the job ends."""
        if self.leader is not None:
            for peer in self._followers.values():
                peer.send({"kind": "stop", "status": status, "message": message})
        elif self._to_leader is not None:
            self._to_leader.send({"kind": "end", "message": f"node {self._me.node}: {message}"})

    async def flush(self) -> None:
        """Returns when the followers have what was sent to them."""
        for peer in list(self._followers.values()):
            await peer.flush()

    # -- connections -------------------------------------------------------------------------------

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
        if hello is None or hello.get("kind") != "hello" or self.leader is None:
            return peer.close()
        node = hello["node"]
        self._followers[node] = peer
        self._addresses[node] = (hello["address"][0], hello["address"][1])
        self._share_addresses()
        if self._succession is None:
            self._welcome(hello)
        else:
            self._succession.find(hello, self.leader)
        evidence = await self._read_peer(peer, lambda m: self._from_agent(node, m))
        if self._followers.get(node) is peer:
            del self._followers[node]
            if not self.finishing:
                self._share_addresses()
                if self._succession is None:
                    self.leader.lost(node, evidence)
                else:
                    self._succession.passed[node] = evidence
        return None

    def _welcome(self, hello: dict[str, Any]) -> None:
        """A follower becomes a member, if it is not yet one, and is told how things stand."""
        assert self.leader is not None
        node = hello["node"]
        if node not in self.leader.machine.alive:
            self._leader_event(e.NodeJoined(node, hello["order"], hello["domain"]))
        self.leader.publish_again()
        self._tell_epoch(node)

    def _tell_epoch(self, node: str) -> None:
        assert self.leader is not None
        if self.leader.machine.epoch is not None:
            self._send_to_agent(node, {"kind": "epoch", "epoch": self.leader.machine.epoch.to_json()})
            if self.leader.machine.phase is Phase.RUNNING:
                self._send_to_agent(node, {"kind": "running"})

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
                "node": self._me.node,
                "order": self._me.order,
                "domain": self._me.domain,
                "address": self._addresses[self._me.node],
                "state": self._state,
            }
        )
        for message in self._host.said():
            peer.send(message)
        self._host.spawn(self._stay(peer))

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
        if self.finishing or self._to_leader is not peer:
            return None
        self._to_leader = self._leader_at = None
        if not heard and self._state["state"] is None:
            return self._host.finish(
                1,
                "the agent of node rank 0 closed the connection before this node could join: it ended, or the job's secret "
                "differs here (--secret-file, $MEGATRON_RESILIENCE_SECRET)",
            )
        return await self._succeed(evidence, heard)

    async def _succeed(self, evidence: Evidence, heard: bool) -> None:
        """The agent that led is gone: the next in order leads, perhaps this one."""
        state = self._state["state"]
        if state is None:
            return self._host.finish(1, "the agent that led is gone before the job began")
        roster: dict[str, int] = state["roster"]
        if heard:
            led = next_leader(roster, set(state["gone"]) | set(self._passed))
            if led is not None:
                self._passed[led] = evidence
        candidate = next_leader(roster, set(state["gone"]) | set(self._passed))
        if candidate is None or candidate == self._me.node:
            own = [(self._me.node, message) for message in self._host.said()]
            self._succession = _Succession(self._settings, self._state["version"], dict(self._passed), own)
            self._lead(Coordinator.from_json(self._settings, state))
            self._host.spawn(self._take_over(self._succession))
            return None
        endpoint = self._state["addresses"][candidate]
        try:
            await asyncio.sleep(0 if heard else _RETRY_S)
            await self._follow((endpoint[0], endpoint[1]))
        except ControlError:
            self._passed[candidate] = Evidence.SILENT
            await self._succeed(Evidence.SILENT, heard=False)
        return None

    async def _take_over(self, succession: _Succession) -> None:
        """As successor: waits for the others to find us, hears them, and reports those that did not come."""
        leader = self.leader
        assert leader is not None
        say(f"node {self._me.node} leads now")
        self._share_addresses()
        self._events.write("leader", node=self._me.node)
        waiting_until = time.monotonic() + self._options.heartbeat_timeout_s
        while time.monotonic() < waiting_until:
            expected = set(leader.machine.alive) - set(succession.passed) - {self._me.node}
            if expected <= set(self._followers):
                break
            await asyncio.sleep(_RETRY_S / 5)
        self._succession = None
        leader.version = succession.version
        self._tell_epoch(self._me.node)
        for node, hello in succession.found.items():
            if node in self._followers:
                self._welcome(hello)
        leader.end_unfinished_switch(self._host.unfinished_switch())
        for node, message in succession.said:
            self._from_agent(node, message)
        for node in list(leader.machine.alive):
            if node != self._me.node and node not in self._followers:
                leader.lost(node, succession.passed.get(node, Evidence.SILENT))

    # -- leading -----------------------------------------------------------------------------------

    def _lead(self, machine: Coordinator) -> None:
        self._addresses = {**self._state["addresses"], **self._addresses}
        self.leader = Leader(
            self._me.node, self._me.address, machine, self._send_to_agent, self._events, self._desk.answered
        )

    def _leader_event(self, event: e.Event) -> None:
        assert self.leader is not None
        self.leader.event(event)

    def _send_to_agent(self, node: str, message: dict[str, Any]) -> None:
        if node == self._me.node:
            # Not at once: the machine is in the middle of an event.
            asyncio.get_running_loop().call_soon(self._from_leader, message)
        elif node in self._followers:
            self._followers[node].send(message)

    def _share_addresses(self) -> None:
        for peer in self._followers.values():
            peer.send({"kind": "addresses", "addresses": self._addresses})
        self._state["addresses"] = dict(self._addresses)
        if self._jobdir is not None:
            here = {self._me.node, *self._followers}
            with self._jobdir.best_effort():
                self._jobdir.write_agents(self._me.node, {n: at for n, at in self._addresses.items() if n in here})

    def _from_agent(self, node: str, message: dict[str, Any]) -> None:
        assert self.leader is not None
        kind = message["kind"]
        if kind == "seen":
            self._desk.seen(node, message)
        elif kind == "layout_checked":
            self._desk.checked(message)
        elif self._succession is not None:
            self._succession.said.append((node, message))
        elif kind == "end":
            self.leader.event(e.RankFatal(-1, message["message"]))
        elif kind == "end_asked":
            self.leader.event(e.EndAsked(message["why"]))
        else:
            self.leader.message(node, message)

    # -- following ---------------------------------------------------------------------------------

    def _from_leader(self, message: dict[str, Any]) -> None:
        kind = message["kind"]
        if kind == "state":
            self._passed = {}
            self._state = {**self._state, "version": message["version"], "state": message["state"]}
        elif kind == "addresses":
            self._state["addresses"] = message["addresses"]
        else:
            self._host.from_leader(message)
