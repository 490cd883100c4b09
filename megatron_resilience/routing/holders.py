"""Holders: who has a verified copy of which shard, at which generation, and the newest one covered.

A holder keeps what one rank of some layout owns (its boxes): the live rank itself, its host snapshot, a
replica on another node, a checkpoint on disk. Dead ranks are simply not holders.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from megatron_resilience.vps.pieces import Boxes
from megatron_resilience.vps.space import StateSpace

NOWHERE = -1


class Source(IntEnum):
    """Where a copy lies; lower is preferred."""

    DEVICE = 0
    SNAPSHOT = 1
    REPLICA = 2
    DISK = 3


@dataclass(frozen=True)
class Holder:
    """One verified copy.

    Attributes:
        shard_of: rank, in the source layout, whose boxes these are.
        endpoint: process that can send it.
        generation: completed optimizer steps.
        source: where it lies.
    """

    shard_of: int
    endpoint: int
    generation: int
    source: Source = Source.DEVICE


class Uncovered(ValueError):
    """No generation is covered; ``missing`` names the regions of the newest."""

    def __init__(self, generation: int | None, missing: list[str]) -> None:
        self.generation, self.missing = generation, missing
        shown = "; ".join(missing[:8]) + (f"; and {len(missing) - 8} more" if len(missing) > 8 else "")
        super().__init__(
            f"no generation is held completely; the newest, {generation}, lacks {shown or 'everything'}; "
            f"resume from the persistent checkpoint"
        )


@dataclass(frozen=True)
class Coverage:
    """A generation that is held completely.

    Attributes:
        generation: completed optimizer steps.
        chosen: per source rank the copy to use, None where nobody has one and none is needed.
    """

    generation: int
    chosen: tuple[Holder | None, ...]

    @property
    def at(self) -> np.ndarray:
        """int64 (world,): endpoint per source rank, NOWHERE for None; `Problem.source_at`."""
        return np.array([NOWHERE if h is None else h.endpoint for h in self.chosen], np.int64)


def choose_copies(world: int, holders: Iterable[Holder], generation: int) -> tuple[Holder | None, ...]:
    """The copy of each source rank's shard at ``generation`` to use, None where nobody holds one.

    Deterministic: the most direct kind of source wins, then the endpoint that serves the fewest shards so
    far, then the lowest.

    Raises:
        ValueError: a holder of a rank that the layout does not have.
    """
    chosen: list[Holder | None] = [None] * world
    offers: dict[int, list[Holder]] = {}
    for holder in holders:
        if not 0 <= holder.shard_of < world:
            raise ValueError(f"endpoint {holder.endpoint} holds rank {holder.shard_of} of a layout of {world} ranks")
        if holder.generation == generation:
            offers.setdefault(holder.shard_of, []).append(holder)
    load: dict[int, int] = {}
    # Shards with one holder first: they have no choice, the others then avoid those endpoints.
    for shard in sorted(offers, key=lambda s: (len(offers[s]), s)):
        best = min(offers[shard], key=lambda h: (h.source, load.get(h.endpoint, 0), h.endpoint))
        chosen[shard] = best
        load[best.endpoint] = load.get(best.endpoint, 0) + 1
    return tuple(chosen)


def missing_regions(space: StateSpace, at: np.ndarray) -> list[str]:
    """Names of what no holder covers, given the endpoint per source rank; empty when all is covered.

    A name is that of the tensor, the bounds in its canonical shape (outer, cut, inner), and the first rank that had it.

    A region is lost only when every replica of it is: replicas over TP (norms, routers), over DP (frozen
    parameters, buffers) and the second copy of a tied embedding count.
    """
    lost_ranks = np.flatnonzero(at < 0)
    lost: dict[tuple[int, ...], str] = {}
    for rank in lost_ranks.tolist():
        boxes = space.boxes_of(rank)
        gone = _all_replicas_gone(space, boxes, at)
        boxes = boxes.take(np.flatnonzero(gone))
        other = np.where(space.instances.second[boxes.tensor] >= 0, 1 - boxes.copy, -1)
        row, parts = space.owners_of(boxes, other)
        held = ~_all_replicas_gone(space, parts, at)
        saved = np.zeros(len(boxes), np.int64)
        np.add.at(saved, row[held], parts.numel[held])
        for i in np.flatnonzero(saved < boxes.numel).tolist():
            tensor = space.catalogue.tensors[int(boxes.tensor[i])]
            key = tuple(int(getattr(boxes, k)[i]) for k in ("tensor", "o0", "c0", "i0"))
            span = f"[{boxes.o0[i]}:{boxes.o1[i]}, {boxes.c0[i]}:{boxes.c1[i]}, {boxes.i0[i]}:{boxes.i1[i]}]"
            lost.setdefault(key, "")
            lost[key] = lost[key] or f"{tensor.name}{span} of rank {rank}"
    return [lost[key] for key in sorted(lost)]


def _all_replicas_gone(space: StateSpace, boxes: Boxes, at: np.ndarray) -> np.ndarray:
    shards = np.stack([boxes.base, space.tensor_class[boxes.tensor], boxes.span], axis=1)
    distinct, where = np.unique(shards, axis=0, return_inverse=True)
    gone = np.array([(at[space.replicas(*shard)] < 0).all() for shard in distinct.tolist()], bool)
    return gone[where.reshape(-1)]


def newest_covered(space: StateSpace, holders: Iterable[Holder]) -> Coverage:
    """The newest generation that ``holders`` cover completely.

    Args:
        space: the layout in whose ranks the holders count; every copy holds all of one rank's boxes.
        holders: copies of living endpoints only: the dead are no holders.

    Raises:
        Uncovered: no generation is; carries the regions that the newest one lacks.
    """
    holders = list(holders)
    newest: Uncovered | None = None
    for generation in sorted({h.generation for h in holders}, reverse=True):
        coverage = Coverage(generation, choose_copies(space.layout.world, holders, generation))
        missing = missing_regions(space, coverage.at)
        if not missing:
            return coverage
        newest = newest or Uncovered(generation, missing)
    raise newest or Uncovered(None, [])
