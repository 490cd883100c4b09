"""One routing problem, the same on every rank: two state spaces, and where each shard lies or must lie."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from megatron_resilience.routing.cost import Cluster
from megatron_resilience.routing.holders import NOWHERE, missing_regions
from megatron_resilience.vps.space import StateSpace


@dataclass(frozen=True, eq=False)
class Problem:
    """From ``source`` to ``target``.

    Attributes:
        source, target: the same catalogue under two layouts.
        source_at: int64 (source world,), endpoint that serves each source rank's shard, NOWHERE if lost.
        target_at: int64 (target world,), endpoint that becomes each target rank.
        cluster: the links, by which fan-out is decided; endpoints are numbered node by node.
        shelves: shards lie in memory that all endpoints of a node read (host snapshots): whoever is on the node of
            ``source_at`` holds the shard, and nothing is sent within a node.
        couriers: endpoints that only serve, of nodes that own nothing in the target layout.
        grain: bytes below which no fragment is cut to even out the load of replicas.
    """

    source: StateSpace
    target: StateSpace
    source_at: np.ndarray
    target_at: np.ndarray
    cluster: Cluster = field(default_factory=Cluster)
    grain: int = 1 << 16
    shelves: bool = False
    couriers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for space, at, side in (
            (self.source, self.source_at, "source"),
            (self.target, self.target_at, "target"),
        ):
            if len(at) != space.layout.world:
                raise ValueError(f"{side} layout {space.layout} has {space.layout.world} ranks, not {len(at)}")
        if len(np.unique(self.target_at)) != len(self.target_at):
            raise ValueError("two target ranks share an endpoint")

    @cached_property
    def known(self) -> dict[Any, Any]:
        """What has been derived about source shards and pairs of shards, kept by `routing.sources`."""
        return {}

    def holders(self, ranks: np.ndarray) -> np.ndarray:
        """Endpoints (sorted) that can read the shard of one of these source ranks."""
        at = np.unique(self.source_at[ranks])
        at = at[at != NOWHERE]
        if not self.shelves:
            return at
        nodes = np.unique(at // self.cluster.ranks_per_node)
        return self._readers[np.isin(self._readers // self.cluster.ranks_per_node, nodes)]

    def readable(self, endpoint: int) -> np.ndarray:
        """Source ranks (sorted) whose shards an endpoint can read."""
        if not self.shelves:
            return np.flatnonzero(self.source_at == endpoint)
        per_node = self.cluster.ranks_per_node
        here = (self.source_at != NOWHERE) & (self.source_at // per_node == endpoint // per_node)
        return np.flatnonzero(here & bool(np.isin(endpoint, self._readers)))

    @cached_property
    def _readers(self) -> np.ndarray:
        return np.unique(np.array([*self.target_at.tolist(), *self.couriers], np.int64))

    @cached_property
    def source_copy(self) -> np.ndarray:
        """int64 (2, tensors): copy of each tensor from which target copy 0 or 1 is fed.

        A copy feeds its like, so that nothing moves where nothing changes; where it is not held completely,
        the other copy does.
        """
        inst = self.source.instances
        tied = np.flatnonzero(inst.second >= 0)
        out = np.zeros((2, len(inst.first)), np.int64)
        out[1, tied] = 1
        if (self.source_at >= 0).all():
            return out
        for tensor in tied.tolist():
            whole = [self._stage_held(int(inst.pp[r])) for r in (inst.first[tensor], inst.second[tensor])]
            for copy in (0, 1):
                if not whole[copy] and whole[1 - copy]:
                    out[copy, tensor] = 1 - copy
        return out

    def _stage_held(self, pp: int) -> bool:
        grid, layout = self.source.layout.dense, self.source.layout
        ranks = np.arange(layout.world)
        return bool((self.source_at[ranks[ranks // grid.stride_pp % layout.pp == pp]] >= 0).all())

    def check_covered(self) -> None:
        """Refuse a problem whose sources do not hold everything.

        Raises:
            ValueError: naming regions nobody holds.
        """
        if (self.source_at == NOWHERE).any():
            missing = missing_regions(self.source, self.source_at)
            if missing:
                more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
                raise ValueError(f"nobody holds {'; '.join(missing[:5])}{more}")


def relayout(
    source: StateSpace, target: StateSpace, lost: tuple[int, ...] = (), cluster: Cluster | None = None
) -> Problem:
    """A change of layout on the survivors of ``lost``: endpoints are the source's ranks, then new ones.

    Target ranks are the survivors in the order of their numbers, then new endpoints; see
    `routing.placement.keep_in_place` for a numbering that moves less. The shard of a lost rank is served by its
    replica one node further on (on one node: by the next rank), which stands for the product's placement in another
    failure domain; when that endpoint is lost too, the shard is, unless another rank has the same boxes.

    Raises:
        ValueError: a lost rank that the source layout does not have.
    """
    cluster = cluster or Cluster()
    world, ranks_per_node = source.layout.world, cluster.ranks_per_node
    source_at = np.arange(world)
    dead = set(lost)
    if dead - set(range(world)):
        raise ValueError(f"lost ranks {sorted(dead - set(range(world)))} are not in a layout of {world} ranks")
    for rank in sorted(dead):
        partner = (rank + (ranks_per_node if world > ranks_per_node else 1)) % world
        source_at[rank] = NOWHERE if partner in dead else partner
    alive = [r for r in range(world) if r not in dead]
    extra = range(world, world + max(0, target.layout.world - len(alive)))
    target_at = np.array([*alive, *extra][: target.layout.world], np.int64)
    return Problem(source, target, source_at, target_at, cluster)
