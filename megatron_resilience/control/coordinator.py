"""Decides: events in, actions out. Pure and deterministic; :mod:`leader` gives it a clock and a voice.

States of a job::

    FORMING → STARTING → RUNNING → FINISHING → ended
                 ↑           ↓ ↑
                 └────── RECOVERING        (any loss; a loss during it starts it again)

Nothing here is asked per step. What a successor must know is :meth:`Coordinator.to_json`.
"""

from __future__ import annotations

from typing import Any

from megatron_resilience import exits
from megatron_resilience.control.classification import WINDOW, Decision, Fault, Sign, classify
from megatron_resilience.control.events import (
    Action,
    AllWait,
    Answer,
    EndAsked,
    Event,
    FallbacksKnown,
    Leave,
    NodeAiling,
    NodeHoldings,
    NodeJoined,
    NodeLost,
    Note,
    RankBroken,
    RankExited,
    RankFatal,
    RankFinished,
    RankHeld,
    RankJoined,
    RankParked,
    RankPrepared,
    RankReady,
    RankUnkillable,
    SendPlan,
    SwapAsked,
    SwitchAsked,
    Tick,
)
from megatron_resilience.control.layouts import Layouts
from megatron_resilience.control.membership import may_go_on
from megatron_resilience.control.record import Phase
from megatron_resilience.deadpool.recovery import plan_restore
from megatron_resilience.errors import StateError


class Coordinator(Layouts):
    """The state machine: what nodes, ranks and people say becomes epochs and changes of layout."""

    def handle(self, event: Event, now: float) -> list[Action]:
        """The actions that an event asks for.

        Args:
            now: seconds on any clock that does not go back.
        """
        if self.phase is Phase.ENDED:
            return []
        handlers: dict[type, Any] = {
            NodeJoined: self._node_joined,
            NodeLost: self._node_lost,
            RankExited: self._rank_exited,
            RankUnkillable: self._rank_unkillable,
            AllWait: self._all_wait,
            RankReady: self._rank_ready,
            NodeHoldings: self._node_holdings,
            RankJoined: self._rank_joined,
            RankBroken: self._rank_broken,
            RankFinished: self._rank_finished,
            RankFatal: self._rank_fatal,
            SwitchAsked: self._switch_asked,
            FallbacksKnown: self._fallbacks_known,
            RankHeld: self._rank_held,
            RankPrepared: self._rank_prepared,
            RankParked: self._rank_parked,
            NodeAiling: self._node_ailing,
            SwapAsked: self._swap_asked,
            EndAsked: self._end_asked,
            Tick: self._tick,
        }
        return handlers[type(event)](event, now)

    # -- nodes -------------------------------------------------------------------------------------

    def _node_joined(self, event: NodeJoined, now: float) -> list[Action]:
        self.gone.pop(event.node, None)
        self.roster[event.node] = event.order
        self.domains[event.node] = event.domain or event.node
        actions: list[Action] = [Note("node_joined", {"node": event.node})]
        if self.phase is Phase.FORMING and len(self.alive) >= self.settings.slots:
            if self._complete_at is None:
                self._complete_at = now
            if len(self.alive) >= self.settings.nnodes:
                actions += self._start("all nodes are there")
        return actions

    def _node_lost(self, event: NodeLost, now: float) -> list[Action]:
        if event.node not in self.roster or event.node in self.gone:
            return []
        self.gone[event.node] = event.evidence
        actions: list[Action] = [Note("node_lost", {"node": event.node, "evidence": event.evidence.value})]
        if not may_go_on(len(self.roster), self.gone):
            return actions + self._stop(
                exits.FAILED,
                f"only {len(self.alive)} of {len(self.roster)} nodes answer: the rest may be training without us",
            )
        if self.epoch is None:
            return actions
        if event.node not in self.epoch.slots:
            if self.switch is not None and event.node in self.switch.target.slots:
                actions += self._abandon(f"node {event.node} of the new layout is gone")
            if event.node == self.store_node and self.phase in (Phase.STARTING, Phase.RECOVERING):
                actions += self._again(f"node {event.node}, where ranks were meeting, is gone ({event.evidence})")
            return actions
        ranks = self.epoch.ranks_of(event.node)
        if self.phase is Phase.FINISHING:
            if set(ranks) <= self._exited:
                return actions
            return actions + self._stop(
                exits.FAILED, f"node {event.node} died after training had ended, before its ranks had"
            )
        smaller = self._smaller({*self.epoch.lost, event.node})
        rule = classify(
            Fault(
                Sign.NODE_GONE,
                begun=self.stepped,
                spares=0 if self.epoch.lost else len(self.waiting_spares),
                copies=self.replicas > 0,
                smaller=smaller is not None,
            )
        )
        what = f"node {event.node} is gone ({event.evidence})"
        if rule.decision is Decision.SHRINK:
            return actions + self._suspend(f"{what} and {rule.reason}", {*self.epoch.lost, event.node})
        if rule.decision is Decision.STOP:
            return actions + self._stop(exits.FAILED, f"{what} and {rule.reason}")
        return actions + self._replace_node(event.node, what)

    def _replace_node(self, node: str, what: str) -> list[Action]:
        """The first waiting spare takes a node's slot."""
        assert self.epoch is not None
        spare = self.waiting_spares[0]
        slots = tuple(spare if n == node else n for n in self.epoch.slots)
        if node not in self.gone:
            self.suspects.append(node)
        return self._again(f"{what}, spare {spare} takes its place", slots=slots, newcomers=self.epoch.ranks_of(node))

    def _node_ailing(self, event: NodeAiling, now: float) -> list[Action]:
        if event.node in self.ailing or event.node not in self.alive:
            return []
        self.ailing[event.node] = event.why
        return [Note("ailing", {"node": event.node, "why": event.why}), *self._leave_ailing()]

    def _leave_ailing(self) -> list[Action]:
        """While training runs, a healthy spare takes the slot of a node that ails."""
        if self.epoch is None or self.phase is not Phase.RUNNING or self.leaving:
            return []
        spares = sum(n not in self.ailing for n in self.waiting_spares)
        for node in self.epoch.slots:
            rule = classify(Fault(Sign.DEVICE_AILING, spares=spares, copies=self.replicas > 0))
            if node in self.ailing and rule.decision is Decision.REPLACE_NODE:
                return self._replace_node(node, f"node {node} ails ({self.ailing[node]}) and is left {rule.reason}")
        return []

    # -- what people ask for -----------------------------------------------------------------------

    def _swap_asked(self, event: SwapAsked, now: float) -> list[Action]:
        refusal = self._refusal(event)
        if refusal:
            return [Answer(event.ticket, False, refusal)]
        assert self.epoch is not None
        if event.drain and event.node not in self.drained:
            self.drained.append(event.node)
        asked = "is drained" if event.drain else "is swapped out"
        note = Note("drained" if event.drain else "swapped", {"node": event.node})
        if event.node not in self.epoch.slots:
            return [Answer(event.ticket, True, f"node {event.node} {asked}: it held no slot"), note]
        spare = self.waiting_spares[0]
        slots = tuple(spare if n == event.node else n for n in self.epoch.slots)
        newcomers = self.epoch.ranks_of(event.node)
        actions = self._next(f"node {event.node} {asked} on command, spare {spare} takes its place", slots, newcomers)
        return [Answer(event.ticket, True, self.epoch.cause, self.epoch.number), note, *actions]

    def _refusal(self, event: SwapAsked) -> str:
        """Why a node cannot leave its slot now; empty when it can."""
        if event.node not in self.alive:
            return f"no node {event.node} is in the job; there are {', '.join(self.alive)}"
        if self.epoch is None:
            return "the job has not begun: ask again when it is running"
        if event.node not in self.epoch.slots:
            return "" if event.drain else f"node {event.node} holds no slot: there is nothing to swap"
        if self.phase is not Phase.RUNNING:
            return f"the job is {self.phase}: ask again when it is running"
        if self.leaving:
            return f"the job is about to end ({self.leaving})"
        if self.replicas == 0:
            return f"with --deadpool-replicas 0 the state of node {event.node} lies nowhere else: it cannot be replaced"
        if not self.waiting_spares:
            return (
                f"no spare waits for the slot of node {event.node}: start an agent on another node, it joins as a spare"
            )
        return ""

    def _end_asked(self, event: EndAsked, now: float) -> list[Action]:
        if self.leaving or self.phase is Phase.FINISHING:
            return []
        if self.phase in (Phase.FORMING, Phase.STARTING):
            return self._stop(exits.LEFT, f"{event.why} before training began: there is nothing to save")
        if not self.saves:
            return self._stop(
                event.status,
                f"{event.why}: the state since the last checkpoint is lost, because nothing saves it at the end "
                "(--exit-signal-handler and --save do)",
            )
        self.leaving = event.why
        return [*self._abandon(event.why), Note("leaving", {"why": event.why}), Leave(event.why)]

    # -- ranks -------------------------------------------------------------------------------------

    def _rank_exited(self, event: RankExited, now: float) -> list[Action]:
        epoch = self.epoch
        if self._of_switch(event.epoch):
            return self._abandon(f"rank {event.rank} of the new layout ended with status {event.status}")
        if epoch is None or event.epoch > epoch.number or event.node not in epoch.slots:
            return []
        if event.rank not in epoch.ranks_of(event.node):
            return []
        how = f"signal {-event.status}" if event.status < 0 else f"exit status {event.status}"
        actions: list[Action] = [Note("rank_exited", {"rank": event.rank, "node": event.node, "how": how})]
        self._exited.add(event.rank)
        ended_well = self.phase is Phase.RUNNING and event.status == 0
        if self.phase is Phase.FINISHING or ended_well:
            if event.status != 0:
                return actions + self._stop(
                    abs(event.status), f"rank {event.rank} ended with {how} after training had ended"
                )
            if len(self._exited) == epoch.world_size:
                left = f"{self.leaving}: a checkpoint is saved, the same command goes on from it"
                return actions + (self._stop(exits.LEFT, left) if self.leaving else self._stop(exits.DONE, ""))
            return actions
        self._down.add(event.rank)
        place = f"{event.rank}@{event.generation}"
        on_node = [g for g in self.node_faults.get(event.node, []) if g > event.generation - WINDOW]
        self.node_faults[event.node] = [*on_node, event.generation]
        ranks = set(epoch.ranks_of(event.node))
        rule = classify(
            Fault(
                Sign.RANK_HUNG if event.hung else Sign.RANK_ENDED,
                event.status,
                begun=self.phase is not Phase.STARTING,
                spares=len(self.waiting_spares),
                copies=self.replicas > 0,
                same_step=self.faults.get(place, 0),
                on_node=len(self.node_faults[event.node]),
                whole_node=len(ranks) > 1 and ranks <= self._down,
            )
        )
        self.faults[place] = self.faults.get(place, 0) + 1
        what = f"rank {event.rank} hung ({event.hung})" if event.hung else f"rank {event.rank} ended with {how}"
        if rule.decision is Decision.STOP:
            after = f" after generation {event.generation}" if event.generation >= 0 else ""
            return actions + self._stop(
                event.status if event.status > 0 else exits.FAILED, f"{what}{after}, {rule.reason}"
            )
        if rule.decision is Decision.REPLACE_NODE:
            return actions + self._replace_node(event.node, f"{what}; node {event.node} is given up: {rule.reason}")
        return actions + self._again(f"{what}, its node {event.node} is well", newcomers=(event.rank,))

    def _rank_unkillable(self, event: RankUnkillable, now: float) -> list[Action]:
        if self.epoch is None or event.node not in self.epoch.slots or self.phase is Phase.FINISHING:
            return []
        fault = Fault(Sign.RANK_UNKILLABLE, spares=len(self.waiting_spares), copies=self.replicas > 0)
        rule = classify(fault)
        what = f"rank {event.rank} on node {event.node} was killed and does not end: {rule.reason}"
        if rule.decision is Decision.STOP:
            return self._stop(exits.FAILED, what)
        return self._replace_node(event.node, what)

    def _all_wait(self, event: AllWait, now: float) -> list[Action]:
        if not self._is_current(event.epoch) or self.phase is not Phase.RUNNING:
            return []
        place = f"all@{event.generation}"
        rule = classify(Fault(Sign.ALL_WAIT, same_step=self.faults.get(place, 0)))
        self.faults[place] = self.faults.get(place, 0) + 1
        what = f"no rank makes progress after generation {event.generation} ({event.why})"
        if rule.decision is Decision.STOP:
            return self._stop(exits.FAILED, f"{what}, {rule.reason}")
        return self._again(f"{what}, connections are renewed")

    def _rank_ready(self, event: RankReady, now: float) -> list[Action]:
        if self._is_current(event.epoch):
            self._ready.add(event.rank)
        return self._maybe_plan(now)

    def _node_holdings(self, event: NodeHoldings, now: float) -> list[Action]:
        if self._is_current(event.epoch):
            self._held[event.node] = event.holdings
        return self._maybe_plan(now)

    def _maybe_plan(self, now: float) -> list[Action]:
        epoch = self.epoch
        if epoch is None or epoch.fresh or self._planned:
            return []
        if epoch.lost:
            return self._maybe_shrink(epoch, now)
        if len(self._ready) < epoch.world_size or set(self._held) < set(epoch.slots):
            return []
        nodes = [epoch.node_of(rank) for rank in range(epoch.world_size)]
        try:
            plan = plan_restore(epoch.number, nodes, [h for held in self._held.values() for h in held])
        except StateError as error:
            if self.stepped:
                return self._stop(exits.FAILED, str(error))
            return self._again("nothing was protected yet, everyone starts again", fresh=True)
        self._planned = True
        return [SendPlan(plan), Note("plan", {"epoch": plan.epoch, "generation": plan.generation})]

    def _rank_joined(self, event: RankJoined, now: float) -> list[Action]:
        if self._of_switch(event.epoch):
            assert self.switch is not None
            return self._take_next(now) if self.switch.join(event.rank) else []
        if not self._is_current(event.epoch):
            return []
        assert self.epoch is not None
        self._joined.add(event.rank)
        self.replicas, self.saves, self.exclusive = event.replicas, event.saves, event.exclusive
        if len(self._joined) < self.epoch.world_size:
            return []
        self.phase = Phase.RUNNING
        self._down.clear()
        # Ranks that are new have not heard it.
        leave: list[Action] = [Leave(self.leaving)] if self.leaving else []
        actions: list[Action] = [Note("running", {"epoch": event.epoch, "generation": event.generation}), *leave]
        return actions + self._leave_ailing() + self._wished(now)

    def first_step(self) -> None:
        """Notes that a step was completed: from now on start-up state is history."""
        self.stepped = True
        self.fruitless = 0

    def recovered(self, record: dict[str, Any]) -> None:
        """Keeps the summary of a recovery (a JSON object), for whoever asks and for a successor."""
        self.recovery = record

    def _rank_broken(self, event: RankBroken, now: float) -> list[Action]:
        if self._of_switch(event.epoch):
            return self._abandon(f"rank {event.rank} of the new layout lost its connections: {event.error}")
        if not self._is_current(event.epoch):
            return []
        assert self.epoch is not None
        self._broken.add(event.rank)
        if self._broken_at is None:
            self._broken_at, self._broken_why = now, f"rank {event.rank}: {event.error}"
        # When everybody is out there is nothing to wait for.
        return self._renew() if len(self._broken) == self.epoch.world_size else []

    def _renew(self) -> list[Action]:
        return self._again(f"connections broke though nobody died ({self._broken_why})")

    def _rank_finished(self, event: RankFinished, now: float) -> list[Action]:
        if not self._is_current(event.epoch):
            return []
        assert self.epoch is not None
        self._finished.add(event.rank)
        if len(self._finished) < self.epoch.world_size:
            return []
        self.phase = Phase.FINISHING
        self._broken_at = None
        return [*self._abandon("training has ended"), Note("finishing", {})]

    def _rank_fatal(self, event: RankFatal, now: float) -> list[Action]:
        return self._abandon(event.error) if self._of_switch(event.epoch) else self._stop(exits.FAILED, event.error)

    def _tick(self, event: Tick, now: float) -> list[Action]:
        grace = self.settings.join_grace_s
        if self.phase is Phase.FORMING and self._complete_at is not None and now - self._complete_at > grace:
            return self._start(
                f"{len(self.alive)} of {self.settings.nnodes} nodes are there, the rest may join as spares"
            )
        if self._broken_at is not None and now - self._broken_at > self.settings.broken_grace_s:
            return self._renew()
        if self.switch is not None and (late := self.switch.overdue(now)):
            return self._abandon(late)
        return self._maybe_grow(now)
