"""One change of layout, from the request to its end: who has said what, and what follows from it. Pure.

::

    asked → preparing (training goes on) → parked at an agreed generation → moving → done
                 any loss, or too long a wait: given up, and the old world goes on

Where a device has no room for both worlds' tensors, the old world parks first, and the new one is prepared then.

The generation is agreed without stopping anybody: each rank names the first generation that it will not train beyond
without further word (the end of the step that it is in); the largest of these, or the wanted one if that is later, is
where all stop. Nobody can have entered that step, and nobody waits for a step that nobody takes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self

from megatron_resilience.deadpool.recovery import RestorePlan, Source
from megatron_resilience.errors import ConfigurationError
from megatron_resilience.hotswap.endpoints import peers
from megatron_resilience.topology.epoch import Epoch

PREPARE_LIMIT_S = 900.0
"""Nobody waits longer for the new world, whether parked or training."""
MOVE_LIMIT_S = 300.0
"""From the plan to the last rank's word that it is through."""


@dataclass(frozen=True)
class Wish:
    """A change of layout that somebody asked for.

    Attributes:
        layout: as text (``vps.layout.parse_layout``), every dimension given.
        ranks: that it has.
        nodes: to train on, in order; empty: those that train now, then spares.
        at: generation at which to change; 0: as soon as the new world is ready.
        order: where ``nodes`` is empty, the places of those that train now in which the least state moves.
    """

    layout: str
    ranks: int
    nodes: tuple[str, ...] = ()
    at: int = 0
    order: tuple[int, ...] = ()

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Self:
        """From an object of the fields."""
        return cls(**(data | {"nodes": tuple(data["nodes"]), "order": tuple(data["order"])}))


@dataclass(frozen=True)
class Fallback:
    """A layout to go on in when nodes are lost and no spare is left.

    Attributes:
        layout: as text.
        ranks: that it has.
    """

    layout: str
    ranks: int


def target_of(
    wish: Wish, now: Epoch, spares: list[str], number: int, domains: Mapping[str, str], replicas: int
) -> Epoch:
    """The first epoch of the wished world.

    Args:
        now: the epoch that trains.
        spares: nodes that wait, in order.
        number: for the epoch.
        domains: failure domain by node.
        replicas: copies of each rank's state in other domains.

    Raises:
        ConfigurationError: there are not enough nodes or failure domains, a node is not there, or nothing would change.
    """
    needed = -(-wish.ranks // now.nproc_per_node)
    there = [*now.slots, *spares]
    if wish.nodes:
        absent = [node for node in wish.nodes if node not in there]
        if absent:
            raise ConfigurationError(f"{', '.join(absent)} is not among the nodes of the job: {', '.join(there)}")
        there = list(wish.nodes)
    elif sorted(wish.order) == list(range(needed)) and needed <= len(now.slots):
        there = [now.slots[place] for place in wish.order]
    if len(there) < needed:
        raise ConfigurationError(
            f"layout {wish.layout} has {wish.ranks} ranks, which takes {needed} nodes of {now.nproc_per_node}, "
            f"but only {len(there)} are there"
        )
    slots = tuple(there[:needed])
    if (wish.layout, slots) == (now.layout, now.slots):
        raise ConfigurationError(f"the layout is {wish.layout} already, on {', '.join(slots)}")
    if len({domains[node] for node in slots}) <= replicas:
        raise ConfigurationError(
            f"layout {wish.layout} would train on {', '.join(slots)} alone, and --deadpool-replicas {replicas} needs nodes in "
            f"{replicas + 1} failure domains"
        )
    cause = f"the layout changes from {now.layout or 'the one of the command line'} to {wish.layout}"
    return replace(
        now,
        number=number,
        cause=cause,
        slots=slots,
        fresh=False,
        newcomers=tuple(range(wish.ranks)),
        domains=tuple(domains[node] for node in slots),
        world=number,
        layout=wish.layout,
        ranks=wish.ranks,
        before=replace(now, before=None),
    )


@dataclass
class Switch:
    """The state of one change.

    Attributes:
        target: first epoch of the new world; ``target.before`` is the epoch that trains.
        at: wanted generation.
        stop_at: agreed generation.
        moving: the plan is out.
        since: when the present wait began.
        exclusive: the old world parks before the new one is prepared.
    """

    target: Epoch
    at: int
    since: float
    exclusive: bool = False
    stop_at: int | None = None
    moving: bool = False
    limits: dict[int, int] = field(default_factory=dict)
    prepared: set[int] = field(default_factory=set)
    parked: dict[int, tuple[int, int]] = field(default_factory=dict)
    joined: set[int] = field(default_factory=set)
    _sources: tuple[Source, ...] = ()

    @classmethod
    def of_survivors(cls, target: Epoch, plan: RestorePlan, now: float) -> Switch:
        """The change to a smaller layout after a loss: the old world stands already."""
        switch = cls(target, plan.generation, now, stop_at=plan.generation)
        switch._sources = plan.sources
        return switch

    @property
    def before(self) -> Epoch:
        """The epoch that trains."""
        assert self.target.before is not None
        return self.target.before

    @property
    def asap(self) -> bool:
        """Whether the stop is agreed only when the new world is ready."""
        return self.at == 0 and not self._sources and not self.exclusive

    def held(self, rank: int, limit: int) -> int | None:
        """A rank named the generation that it will not pass; returns the agreed one when all have."""
        self.limits[rank] = limit
        if len(self.limits) < self.before.world_size or self.stop_at is not None:
            return None
        self.stop_at = max(self.at, *self.limits.values())
        return self.stop_at

    def ready(self, rank: int) -> bool:
        """An endpoint is prepared; whether it was the last."""
        self.prepared.add(rank)
        return self._all_prepared

    def park(self, rank: int, generation: int, slot: int) -> bool:
        """A rank of the old world stands still, its state sealed; whether it was the last."""
        self.parked[rank] = (generation, slot)
        return self._all_parked

    def plan(self) -> RestorePlan | None:
        """What moves, once all old ranks are parked and all new ones are prepared; once."""
        whole = (self._sources or self._all_parked) and self._all_prepared
        if self.moving or not whole:
            return None
        if self._sources:
            self.moving = True
            return RestorePlan(self.target.number, self.stop_at or 0, self._sources)
        assert {generation for generation, _ in self.parked.values()} == {self.stop_at}
        self.moving = True
        sources = tuple(Source(rank, self.parked[rank][1]) for rank in range(self.before.world_size))
        return RestorePlan(self.target.number, self.stop_at or 0, sources)

    def join(self, rank: int) -> bool:
        """A rank of the new world holds its state and a copy of it elsewhere; whether it was the last."""
        self.joined.add(rank)
        return len(self.joined) == self.target.world_size

    @property
    def _all_parked(self) -> bool:
        return len(self.parked) == self.before.world_size

    @property
    def _all_prepared(self) -> bool:
        return len(self.prepared) == len(peers(self.target))

    def overdue(self, now: float) -> str:
        """Why the switch has taken too long, or an empty text."""
        if self.moving:
            return f"moving took more than {MOVE_LIMIT_S:.0f} s" if now - self.since > MOVE_LIMIT_S else ""
        preparing = not self._all_prepared and (self._all_parked or not self.exclusive)
        if preparing and now - self.since > PREPARE_LIMIT_S:
            return f"the new world was not ready after {PREPARE_LIMIT_S:.0f} s"
        return ""
