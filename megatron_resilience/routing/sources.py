"""Which replica sends which part to which owner: a rule that any two ranks evaluate alike without talking.

What an owner already has stays. An owner with a replica on its node is served from its node, any other from all
replicas. The demand on a set of replicas is laid out on a line, region by region and owner by owner, and the line is
cut into equal parts, one per replica: so the load is even whatever the regions and owners are. Regions are cut at
fragments, and fragments that are large for a replica's share are cut themselves.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from megatron_resilience.routing.fanout import Way, broadcast_from, broadcast_to, choose_way
from megatron_resilience.routing.problem import Problem
from megatron_resilience.routing.regions import Region, Shard, outgoing
from megatron_resilience.vps.pieces import Boxes, concatenate
from megatron_resilience.vps.split import split

FAR = -1
"""The pool of owners that no replica shares a node with."""
PIECES_PER_SHARE = 16
"""A replica's share is made of pieces of at most this fraction, so that it is even within 1/16."""


@dataclass(frozen=True)
class Leg:
    """Fragments that go from one endpoint to another in one phase."""

    boxes: Boxes
    source: int
    destination: int
    phase: int


@dataclass(frozen=True)
class Pool:
    """Owners served by one set of candidates.

    Attributes:
        owners: endpoints, in the order in which they are served.
        candidates: endpoints that hold the region and may serve them.
        way: how it gets to all of them.
    """

    owners: np.ndarray
    candidates: np.ndarray
    way: Way

    def served(self, size: int) -> int:
        """Bytes that the candidates send for a region of ``size`` bytes."""
        if self.way is Way.DIRECT:
            return size * len(self.owners)
        if self.way is Way.BROADCAST:
            return size * min(len(self.owners), len(self.candidates))
        return size


@dataclass(frozen=True)
class Demand:
    """The demand on the candidates of every pool of one source shard (bytes).

    Attributes:
        total: by pool.
        offset: by pool and target shard, where the region begins on the pool's line.
    """

    total: dict[int, int]
    offset: dict[tuple[int, Shard], int]


def pools(problem: Problem, region: Region, holders: np.ndarray) -> dict[int, Pool]:
    """Pools of a region by node, FAR for owners on nodes without a replica. Owners that hold it are in none."""
    pair = (region.source, region.target)
    found = problem.known.get(pair)
    if found is None:
        found = problem.known[pair] = _pools(problem, region, holders)
    return found


def _pools(problem: Problem, region: Region, holders: np.ndarray) -> dict[int, Pool]:
    owners = region.owners(problem)
    away = owners[~_among(owners, holders)]
    if not len(away):
        return {}
    cluster = problem.cluster
    node, holder_node = away // cluster.ranks_per_node, holders // cluster.ranks_per_node
    near = _among(node, holder_node)
    out = {}
    for number in np.unique(node[near]).tolist():
        out[number] = Pool(away[near & (node == number)], holders[holder_node == number], Way.DIRECT)
    far = away[~near]
    if len(far):
        way = choose_way(int(region.bytes.sum()), len(holders), len(far), cluster)
        if way is not Way.DIRECT:
            # One owner of each node first: whoever is served later finds a replica close by.
            far_node = far // cluster.ranks_per_node
            _, first, where = np.unique(far_node, return_index=True, return_inverse=True)
            far = far[np.lexsort((far_node, np.arange(len(far)) - first[where]))]
        out[FAR] = Pool(far, holders, way)
    return out


def _among(values: np.ndarray, ordered: np.ndarray) -> np.ndarray:
    """Which of ``values`` are in ``ordered``, which is sorted and not empty."""
    return ordered[np.minimum(np.searchsorted(ordered, values), len(ordered) - 1)] == values


def demand(problem: Problem, shard: Shard) -> Demand:
    """All that target ranks draw from ``shard``; the same on every rank, and kept with the problem."""
    known = problem.known.get(shard)
    if known is None:
        total: dict[int, int] = {}
        offset: dict[tuple[int, Shard], int] = {}
        for region in sorted(outgoing(problem, shard.base, shard), key=lambda r: r.target):
            size = int(region.bytes.sum())
            for number, pool in pools(problem, region, region.holders(problem)).items():
                offset[number, region.target] = total.get(number, 0)
                total[number] = total.get(number, 0) + pool.served(size)
        known = problem.known[shard] = Demand(total, offset)
    return known


def legs(problem: Problem, region: Region, holders: np.ndarray, endpoint: int) -> Iterator[Leg]:
    """The legs of ``region`` that begin or end at ``endpoint``."""
    for number, pool in pools(problem, region, holders).items():
        mine = np.flatnonzero(pool.owners == endpoint)
        if not len(mine) and endpoint not in pool.candidates:
            continue
        yield from _Serving(problem, region, number, pool).legs(endpoint, int(mine[0]) if len(mine) else None)


class _Serving:
    """One region served to one pool."""

    def __init__(self, problem: Problem, region: Region, number: int, pool: Pool) -> None:
        self._pool = pool
        self._region = region
        self._size = int(region.bytes.sum())
        self._candidates = pool.candidates
        self._offset, self._total = 0, pool.served(self._size)
        if len(pool.candidates) > 1:
            whole = demand(problem, region.source)
            self._offset, self._total = whole.offset[number, region.target], whole.total[number]
            # Small demands of many kinds of tensors must not all begin at the same replica.
            turn = (region.source.base + region.source.tensor_class) % len(pool.candidates)
            self._candidates = np.roll(pool.candidates, turn)
        self._width = problem.source.catalogue.columns.bytes_per_element
        self._grain = max(problem.grain, self._total // (PIECES_PER_SHARE * len(pool.candidates)), 1)

    def legs(self, endpoint: int, mine: int | None) -> Iterator[Leg]:
        if self._pool.way is Way.SCATTER:
            yield from self._scatter(endpoint, mine)
            return
        served = len(self._pool.owners)
        if self._pool.way is Way.BROADCAST:
            served = min(served, len(self._candidates))
        pieces = self._pieces(self._region.boxes)
        for item in self._items(endpoint, mine, served):
            yield from self._serve(endpoint, item, pieces, self._offset + item * self._size)
        if self._pool.way is Way.BROADCAST and mine is not None:
            owners = self._pool.owners.tolist()
            origin = broadcast_from(served, mine)
            if origin:
                yield Leg(self._region.boxes, owners[origin[0]], endpoint, origin[1])
            for other, phase in broadcast_to(served, len(owners), mine):
                yield Leg(self._region.boxes, endpoint, owners[other], phase)

    def _scatter(self, endpoint: int, mine: int | None) -> Iterator[Leg]:
        owners = self._pool.owners.tolist()
        row, number, pieces = split(self._region.boxes, np.full(len(self._region.boxes), len(owners)))
        # Boxes with fewer elements than owners start at different ones.
        part = (number + row) % len(owners)
        parts = {item: pieces.take(np.flatnonzero(part == item)) for item in np.unique(part).tolist()}
        begin = self._offset
        for item, boxes in parts.items():
            if mine == item or endpoint in self._candidates:
                yield from self._serve(endpoint, item, boxes, begin)
            begin += int(self._bytes(boxes).sum())
            if mine is not None and mine != item:
                yield Leg(boxes, owners[item], endpoint, 1)
        if mine in parts:
            for other in owners:
                if other != endpoint:
                    yield Leg(parts[mine], endpoint, other, 1)

    def _items(self, endpoint: int, mine: int | None, served: int) -> Iterator[int]:
        """Owners (by position) whom ``endpoint`` may serve, or itself."""
        if mine is not None:
            if mine < served:
                yield mine
            return
        share = int(np.flatnonzero(self._candidates == endpoint)[0])
        count = len(self._candidates)
        first = (share * self._total // count - self._offset) // self._size
        last = ((share + 1) * self._total // count + 1 - self._offset) // self._size
        yield from range(max(0, first), min(served, last + 1))

    def _serve(self, endpoint: int, item: int, pieces: Boxes, begin: int) -> Iterator[Leg]:
        size = self._bytes(pieces)
        middle = begin + np.cumsum(size) - size + size // 2
        share = np.minimum(middle * len(self._candidates) // max(1, self._total), len(self._candidates) - 1)
        owner = int(self._pool.owners[item])
        for number in np.unique(share).tolist():
            source = int(self._candidates[number])
            if endpoint in (source, owner):
                yield Leg(pieces.take(np.flatnonzero(share == number)), source, owner, 0)

    def _pieces(self, boxes: Boxes) -> Boxes:
        if len(self._candidates) == 1:
            return boxes
        return split(boxes, -(-self._bytes(boxes) // self._grain))[2]

    def _bytes(self, boxes: Boxes) -> np.ndarray:
        return boxes.numel * self._width[boxes.tensor]


def joined(parts: list[Boxes]) -> Boxes:
    """All rows of ``parts``; none when there are no parts."""
    return concatenate(parts) if parts else Boxes(*[np.zeros(0, np.int64)] * 11)
