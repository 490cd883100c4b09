"""Changes of layout: asked for, prepared while the job trains, agreed, carried out or given up. Pure.

Nothing of the job changes before :meth:`Layouts._take_next`; :mod:`switching` has the state of one change.
"""

from __future__ import annotations

from dataclasses import replace

from megatron_resilience import exits
from megatron_resilience.control.epochs import Epochs
from megatron_resilience.control.events import (
    Abandon,
    Action,
    Answer,
    FallbacksKnown,
    Hold,
    Note,
    Prepare,
    RankHeld,
    RankParked,
    RankPrepared,
    SendPlan,
    StopAt,
    SwitchAsked,
    Switched,
)
from megatron_resilience.control.record import Phase
from megatron_resilience.control.switching import Fallback, Switch, Wish, target_of
from megatron_resilience.deadpool.recovery import plan_restore
from megatron_resilience.errors import ConfigurationError, StateError
from megatron_resilience.topology.epoch import Epoch

GROW_AGAIN_S = 60.0
"""Between two attempts to go back to a larger layout."""


class Layouts(Epochs):
    """Decides on worlds."""

    def _switch_asked(self, event: SwitchAsked, now: float) -> list[Action]:
        wish = event.wish

        def refused(why: str) -> list[Action]:
            answer: list[Action] = [Answer(event.ticket, False, why)] if event.ticket else []
            return [Note("switch_refused", {"layout": wish.layout, "why": why}), *answer]

        if self.switch is not None and event.world == self.switch.target.world:
            # The next entry of a schedule, said before the world that asks has begun: it must not come too late.
            self.wish = wish
            return []
        if event.world and self.epoch is not None and event.world != self.epoch.world:
            # That world never began, or is over.
            return []
        if self.switch is not None:
            return refused("another change is under way")
        if self.leaving or self.phase in (Phase.FINISHING, Phase.FORMING):
            return refused("the job ends" if self.leaving else f"the job is {self.phase}")
        if self.phase is not Phase.RUNNING:
            if event.ticket:
                return refused("the job recovers: ask again when it trains")
            self.wish = wish
            return []
        assert self.epoch is not None
        try:
            target = target_of(wish, self.epoch, self.waiting_spares, self._next_number(), self.domains, self.replicas)
        except ConfigurationError as error:
            return refused(str(error))
        self.switch = Switch(target, wish.at, now, self.exclusive)
        actions: list[Action] = [] if self.exclusive else self._prepare()
        if event.ticket:
            actions.append(Answer(event.ticket, True, target.cause, target.number))
        return actions if self.switch.asap else [*actions, Hold()]

    def _prepare(self) -> list[Action]:
        assert self.switch is not None
        target = self.switch.target
        return [Prepare(target), Note("preparing", {"epoch": target.number, "layout": target.layout})]

    def _rank_held(self, event: RankHeld, now: float) -> list[Action]:
        if self.switch is None or event.epoch != self.switch.before.number:
            return []
        agreed = self.switch.held(event.rank, event.limit)
        return [] if agreed is None else [StopAt(agreed), Note("switch_agreed", {"generation": agreed})]

    def _rank_prepared(self, event: RankPrepared, now: float) -> list[Action]:
        if not self._of_switch(event.epoch):
            return []
        assert self.switch is not None
        if not self.switch.ready(event.rank):
            return []
        actions: list[Action] = [Note("prepared", {"epoch": event.epoch})]
        return actions + ([Hold()] if self.switch.asap else self._maybe_move(now))

    def _rank_parked(self, event: RankParked, now: float) -> list[Action]:
        if self.switch is None or event.epoch != self.switch.before.number:
            return []
        last = self.switch.park(event.rank, event.generation, event.slot)
        self.switch.since = now
        return self._prepare() if last and self.switch.exclusive else self._maybe_move(now)

    def _maybe_move(self, now: float) -> list[Action]:
        assert self.switch is not None
        plan = self.switch.plan()
        if plan is None:
            return []
        self.switch.since = now
        return [SendPlan(plan), Note("moving", {"epoch": plan.epoch, "generation": plan.generation})]

    def _take_next(self, now: float) -> list[Action]:
        """The point of no return: the new world holds everything, and copies of it on other nodes."""
        assert self.switch is not None
        target, self.switch = self.switch.target, None
        if self.grow_to is not None and self.grow_to.layout == target.layout:
            self.grow_to = None
        self.phase, self.fallbacks = Phase.RUNNING, {}
        self.epoch = replace(target, before=None, sources=())
        self._joined = set(range(target.world_size))
        self._ready, self._finished, self._exited, self._down = set(), set(), set(), set()
        self._broken_at, self._broken, self._planned = None, set(), True
        note = Note("switched", {"epoch": target.number, "layout": target.layout})
        return [Switched(self.epoch), note, *self._wished(now)]

    def _wished(self, now: float) -> list[Action]:
        """What was asked for before the job could do it, now that it trains."""
        wish, self.wish = self.wish, None
        return self._switch_asked(SwitchAsked(wish), now) if wish else []

    def _abandon(self, why: str) -> list[Action]:
        if self.switch is None:
            return []
        layout, self.switch, self.wish = self.switch.target.layout, None, None
        actions: list[Action] = [Abandon(why), Note("switch_abandoned", {"layout": layout, "why": why})]
        if self.epoch is not None and self.epoch.lost and why != self.epoch.cause:
            # There is no old layout to go on in: once more.
            return actions + self._suspend(why, set(self.epoch.lost))
        return actions

    def _epoch_begins(self, epoch: Epoch) -> list[Action]:
        return self._abandon(epoch.cause)

    def _of_switch(self, epoch: int) -> bool:
        return self.switch is not None and epoch == self.switch.target.number

    # -- smaller, for want of nodes, and larger again ----------------------------------------------

    def _fallbacks_known(self, event: FallbacksKnown, now: float) -> list[Action]:
        if self._is_current(event.epoch):
            self.fallbacks = dict(event.layouts)
        return []

    def _smaller(self, lost: set[str]) -> Fallback | None:
        """The layout for the nodes that are left."""
        assert self.epoch is not None
        left = len([n for n in self.alive if n not in lost and n not in self.drained])
        known = [count for count in self.fallbacks if count <= left]
        return self.fallbacks[max(known)] if known else None

    @property
    def smaller_by_one(self) -> str | None:
        """The layout after the loss of a node that nobody replaces; None where that is the end."""
        known = [count for count in self.fallbacks if count < len(self.epoch.slots if self.epoch else ())]
        return self.fallbacks[max(known)].layout if known else None

    def _suspend(self, cause: str, lost: set[str]) -> list[Action]:
        """Stops the survivors, to go on with them in a smaller layout."""
        return self._again(cause, lost=tuple(sorted(lost)))

    def _maybe_shrink(self, epoch: Epoch, now: float) -> list[Action]:
        """When the survivors have stopped: the smaller world is started, from what they and the copies they keep hold."""
        if set(self._held) < {node for node in epoch.slots if node not in epoch.lost}:
            return []
        nodes = [epoch.node_of(rank) for rank in range(epoch.world_size)]
        fallback = self._smaller(set(epoch.lost))
        try:
            plan = plan_restore(epoch.number, nodes, [h for held in self._held.values() for h in held])
            if fallback is None:
                raise ConfigurationError("no smaller layout is known for the nodes that are left")
            left = tuple(n for n in self.alive if n not in self.drained)
            wish = Wish(fallback.layout, fallback.ranks, left, plan.generation)
            target = target_of(wish, epoch, [], self._next_number(), self.domains, self.replicas)
        except (StateError, ConfigurationError) as error:
            return self._stop(exits.FAILED, f"{epoch.cause}: {error}")
        self._planned = True
        target = replace(target, lost=(), sources=tuple(source.holder for source in plan.sources))
        self.switch = Switch.of_survivors(target, plan, now)
        self.grow_to = self.grow_to or self.fallbacks.get(len(epoch.slots))
        return self._prepare()

    def _maybe_grow(self, now: float) -> list[Action]:
        """Back to the layout that a loss made smaller, when there are nodes for it again."""
        if self.grow_to is None or self.phase is not Phase.RUNNING or self.switch is not None or self.epoch is None:
            return []
        nodes = -(-self.grow_to.ranks // self.settings.nproc_per_node)
        if now < self.grow_not_before or len(self.epoch.slots) + len(self.waiting_spares) < nodes:
            return []
        self.grow_not_before = now + GROW_AGAIN_S
        return self._switch_asked(SwitchAsked(Wish(self.grow_to.layout, self.grow_to.ranks)), now)
