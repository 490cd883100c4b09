"""The thin process around the coordinator, in the agent that leads: clock, voice, epoch stores, event log."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from megatron_resilience.control import events as e
from megatron_resilience.control.coordinator import Coordinator
from megatron_resilience.control.hang import Finding, Standing
from megatron_resilience.control.membership import Evidence
from megatron_resilience.control.record import Phase
from megatron_resilience.control.survey import Surveys
from megatron_resilience.control.switching import Fallback, Wish
from megatron_resilience.deadpool.recovery import Holding
from megatron_resilience.observe.console import say
from megatron_resilience.observe.events import EventLog
from megatron_resilience.observe.report import Recovery, phases
from megatron_resilience.observe.switch import SwitchTimes
from megatron_resilience.topology.epoch import Epoch


class Leader:
    """Turns agents' messages into events, and actions into messages.

    Args:
        node: this node's id.
        address: of this node's configured interface.
        machine: the coordinator, new or inherited.
        send: sends a message to the agent of a node (this one's own included).
        events: the job's log.
        answer: takes the answer to something that people asked for.
    """

    def __init__(
        self,
        node: str,
        address: str,
        machine: Coordinator,
        send: Callable[[str, dict[str, Any]], None],
        events: EventLog,
        answer: Callable[[e.Answer], None],
    ) -> None:
        self.machine = machine
        self.node = node
        self._address = address
        self._send = send
        self._events = events
        self._answer = answer
        self._store: Any = None
        self._next_store: Any = None
        self._switching = SwitchTimes()
        self._taken: SwitchTimes | None = None
        self._last_state: dict[str, Any] | None = None
        self.version = 0
        self._evidence_at: float | None = None
        self._published_at = 0.0
        self._times: dict[int, dict[str, float]] = {}
        self._newest = 0
        self._resumed = 0
        self._surveys = Surveys()
        self.result: tuple[int, str] | None = None

    def event(self, event: e.Event) -> None:
        """Feeds the machine and carries out what it asks for."""
        if isinstance(event, (e.NodeLost, e.RankExited, e.RankBroken, e.AllWait)) and self._evidence_at is None:
            self._evidence_at = time.time()
        self._carry_out(self.machine.handle(event, time.monotonic()))

    def message(self, node: str, message: dict[str, Any]) -> None:
        """A message of an agent about one of its ranks."""
        kind, rank = message["kind"], message.get("rank", -1)
        if kind == "ready":
            self.event(e.RankReady(rank, message["epoch"]))
        elif kind == "holdings":
            self._newest = max(self._newest, message["newest"])
            held = tuple(Holding(r, g, s, h, node) for r, g, s, h in message["holdings"])
            self.event(e.NodeHoldings(node, message["epoch"], held))
        elif kind == "exited":
            status, generation, hung = message["status"], message["generation"], message["hung"]
            self.event(e.RankExited(node, rank, message["epoch"], status, generation, hung))
        elif kind == "ailing":
            say(f"node {node}: {message['why']}")
            self.event(e.NodeAiling(node, message["why"]))
        elif kind == "unkillable":
            self.event(e.RankUnkillable(node, rank))
        elif kind == "stalled":
            self._stalled(message["epoch"])
        elif kind == "standings":
            self._standings(node, message["survey"], [Standing(*s) for s in message["standings"]])
        elif kind == "joined":
            self._resumed = message["generation"]
            said = {name: message[name] for name in ("epoch", "generation", "replicas", "saves", "exclusive")}
            self.event(e.RankJoined(rank, **said))
        elif kind == "broken":
            self._events.write("broken", rank=rank, error=message["error"])
            self.event(e.RankBroken(rank, message.get("epoch", 0), message["error"]))
        elif kind == "finished":
            self.event(e.RankFinished(rank, message["epoch"]))
        elif kind == "fatal":
            self.event(e.RankFatal(rank, message["error"], message["epoch"]))
        elif kind == "wish":
            self.event(e.SwitchAsked(Wish.from_json(message["wish"]), world=message["world"]))
        elif kind == "fallbacks":
            known = {int(nodes): Fallback(*layout) for nodes, layout in message["layouts"].items()}
            self.event(e.FallbacksKnown(message["epoch"], known))
        elif kind == "held":
            self.event(e.RankHeld(rank, message["epoch"], message["limit"]))
        elif kind == "prepared":
            self._switching.prepared(message)
            self.event(e.RankPrepared(rank, message["epoch"]))
        elif kind == "parked":
            self._switching.parked(message)
            self.event(e.RankParked(rank, message["epoch"], message["generation"], message["slot"]))
        elif kind == "stepped":
            self._stepped(rank, message)
        else:
            fields = {k: v for k, v in message.items() if k not in ("kind", "time")}
            self._events.write(kind, node=node, **fields)
            if kind in ("unprotected", "damaged"):
                say(f"{kind}: {fields}")

    def publish_again(self) -> None:
        """Gives every agent the state anew (a successor's first word)."""
        self._last_state = None
        self._share_state()

    def end_unfinished_switch(self, target: Epoch | None) -> None:
        """As successor: ends a change of layout that the predecessor had begun, or completes it where it was made.

        Said always: ranks may have been told to stop though nobody prepares yet. Rank 0 asks again for what its schedule wants.

        Args:
            target: first epoch of the world that this node prepares, if it does.
        """
        epoch = self.machine.epoch
        if target is not None and epoch is not None and target.world == epoch.world:
            # The predecessor made it, and died before everybody was told; perhaps the new world has asked for the next one since.
            self._broadcast({"kind": "switched", "epoch": epoch.to_json()})
        elif target is not None:
            why = "the node that led it is gone"
            self._events.write("switch_abandoned", layout=target.layout, why=why)
            say(f"the change to {target.layout} is given up: {why}")
        self.machine.wish = None
        self._broadcast({"kind": "abandon"})

    def _stepped(self, rank: int, message: dict[str, Any]) -> None:
        epoch = self.machine.epoch
        if epoch is None or message["epoch"] != epoch.number:
            return
        self.machine.first_step()
        self._times[rank] = message["times"]
        if len(self._times) < epoch.world_size:
            return
        if epoch.fresh:
            self._events.write("training", epoch=epoch.number)
        elif self._taken is not None and self._taken.number == epoch.number:
            summary = self._taken.summary(epoch, self._resumed, self._times)
            self._events.write("switch_done", **summary.to_json())
            say(summary.text())
        else:
            seconds = phases(self._evidence_at or self._published_at, self._published_at, self._times)
            again = max(0, self._newest - self._resumed)
            recovery = Recovery(epoch.number, epoch.cause, self._resumed, again, seconds)
            record = {
                "epoch": epoch.number,
                "cause": epoch.cause,
                "generation": self._resumed,
                "steps_again": again,
                "seconds": {k: round(v, 4) for k, v in seconds.items()},
            }
            self.machine.recovered(record | {"at": round(time.time(), 3)})
            self._events.write(
                "recovered",
                **record,
                marks={r: {k: round(t - self._published_at, 3) for k, t in m.items()} for r, m in self._times.items()},
            )
            say(recovery.text())
        self._evidence_at = None
        self._share_state()

    # -- hangs -------------------------------------------------------------------------------------

    def _stalled(self, number: int) -> None:
        epoch = self.machine.epoch
        if epoch is None or epoch.number != number or self.machine.phase is not Phase.RUNNING:
            return
        if self._surveys.begin(epoch.slots, time.monotonic()):
            for node in epoch.slots:
                self._send(node, {"kind": "survey", "survey": self._surveys.number})

    def _standings(self, node: str, number: int, standings: list[Standing]) -> None:
        epoch = self.machine.epoch
        if epoch is None or not self._surveys.answer(node, number, standings):
            return
        verdict = self._surveys.verdict(epoch.world_size)
        if verdict is None:
            return
        self._events.write("stalled", finding=verdict.finding.value, culprits=verdict.culprits)
        if verdict.finding is Finding.CULPRITS:
            for rank in verdict.culprits:
                generation = self._surveys.generation_of(rank)
                message = {"kind": "end_rank", "rank": rank, "generation": generation, "why": verdict.finding.value}
                self._send(epoch.node_of(rank), message)
        elif verdict.finding in (Finding.ALL_WAIT, Finding.UNCLEAR):
            self._broadcast({"kind": "save_stacks", "why": verdict.finding.value})
            self.event(e.AllWait(epoch.number, verdict.finding.value, self._surveys.generation))
        elif verdict.finding is Finding.SLOW:
            say(f"a step takes longer than --deadpool-hang-timeout: {verdict.finding.value}")

    def _carry_out(self, actions: list[e.Action]) -> None:
        publish = next((a for a in actions if isinstance(a, e.Publish)), None)
        if publish is not None:
            self._publish(publish.epoch)
        self._share_state()
        for action in actions:
            if isinstance(action, e.Publish):
                say(f"epoch {action.epoch.number}: {action.epoch.cause}")
                assert self.machine.epoch is not None
                self._broadcast({"kind": "epoch", "epoch": self.machine.epoch.to_json()})
            elif isinstance(action, e.Prepare):
                self._prepare(action.epoch)
            elif isinstance(action, e.Hold):
                self._time_switch()
                self._broadcast({"kind": "hold"})
            elif isinstance(action, e.StopAt):
                self._broadcast({"kind": "stop_at", "generation": action.generation})
            elif isinstance(action, e.Abandon):
                self._next_store = None
                say(f"the change of layout is given up, training goes on as it was: {action.why}")
                self._broadcast({"kind": "abandon"})
            elif isinstance(action, e.Switched):
                self._times, self._taken = {}, self._switching
                self._store, self._next_store = self._next_store, None
                self.machine.store_node = self.node
                self._broadcast({"kind": "switched", "epoch": action.epoch.to_json()})
            elif isinstance(action, e.SendPlan):
                self._switching.moving()
                self._broadcast({"kind": "plan", "plan": action.plan.to_json()})
            elif isinstance(action, e.Leave):
                say(f"{action.why}: a checkpoint is saved at the end of this step, and the job ends")
                self._broadcast({"kind": "leave", "why": action.why})
            elif isinstance(action, e.Answer):
                self._answer(action)
            elif isinstance(action, e.Note):
                self._events.write(action.kind, **action.fields)
                if action.kind in ("running", "switched"):
                    self._broadcast({"kind": "running"})
                elif action.kind == "drained":
                    self._send(action.fields["node"], {"kind": "drained"})
                elif action.kind == "switch_refused":
                    say(f"the change to {action.fields['layout']} is refused: {action.fields['why']}")
            elif isinstance(action, e.Stop):
                self.result = (action.status, action.message)
                self._broadcast({"kind": "stop", "status": action.status, "message": action.message})

    def _publish(self, epoch: Any) -> None:
        # Its import has been paid for by the launcher; here it would silence this node's heartbeat.
        from megatron_resilience.transport.store import host_store

        # The old store goes with this assignment: whoever still waits on it learns so at once.
        self._store = host_store(self._address)
        self.machine.epoch = replace(epoch, store=(self._address, self._store.port), token=secrets.token_hex(16))
        self.machine.store_node = self.node
        self._published_at = time.time()
        self._times = {}

    def _prepare(self, epoch: Epoch) -> None:
        """Has the next world started; its ranks meet at a store of their own."""
        from megatron_resilience.transport.store import host_store

        self._next_store = host_store(self._address)
        store = (self._address, self._next_store.port)
        assert self.machine.switch is not None
        self.machine.switch.target = replace(epoch, store=store, token=secrets.token_hex(16))
        self._time_switch()
        self._switching.preparing()
        if epoch.before is not None and epoch.before.lost:
            self._switching.lost(self._evidence_at or time.time())
        say(f"epoch {epoch.number} is being prepared: {epoch.cause}")
        self._broadcast({"kind": "prepare", "epoch": self.machine.switch.target.to_json()})

    def _time_switch(self) -> None:
        assert self.machine.switch is not None
        number = self.machine.switch.target.number
        if self._switching.number != number:
            self._switching = SwitchTimes(number)

    def _share_state(self) -> None:
        state = self.machine.to_json()
        if state != self._last_state:
            self._last_state = state
            self.version += 1
            self._broadcast({"kind": "state", "version": self.version, "state": state})

    def _broadcast(self, message: dict[str, Any]) -> None:
        for node in self.machine.alive:
            self._send(node, message)

    def lost(self, node: str, evidence: Evidence) -> None:
        """An agent is gone."""
        self.event(e.NodeLost(node, evidence))
