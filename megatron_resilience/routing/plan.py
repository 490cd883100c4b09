"""The State Routing Planner: what one endpoint sends, receives and keeps (DynaTrain, section on the planner).

Rank-local: nothing is gathered. The receiving side intersects its target boxes with the source layout, the sending
side its source boxes with the target layout; both see the same regions and evaluate the same rule for replicas.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from megatron_resilience.routing.problem import Problem
from megatron_resilience.routing.regions import incoming, outgoing
from megatron_resilience.routing.sources import joined, legs
from megatron_resilience.vps.pieces import Boxes


@dataclass(frozen=True)
class Moves:
    """Fragments between this endpoint and its peers, sorted by phase, peer, tensor, copy and position.

    Attributes:
        boxes: the fragments; ``base`` and ``span`` are without meaning here, ``copy`` is the target's copy of an
            embedding that has two.
        peer: int64 (n,), the other endpoint.
        phase: int64 (n,); everything of a phase is received before anything of a later one is sent. All is 0 but
            what owners pass on among themselves (`routing.fanout`).
        rank: int64 (n,), whose storage here the fragment is read from or written to (`vps.local.local_views`): a
            rank of the source layout for what is kept and for what is sent in phase 0, of the target layout else.
        bytes: int64 (n,), bytes of state in each fragment (all its fields).
    """

    boxes: Boxes
    peer: np.ndarray
    phase: np.ndarray
    rank: np.ndarray
    bytes: np.ndarray

    def __len__(self) -> int:
        return len(self.peer)

    @property
    def total_bytes(self) -> int:
        """Bytes of all fragments."""
        return int(self.bytes.sum())

    def per_message(self) -> dict[tuple[int, int], int]:
        """Bytes by (phase, peer)."""
        keys, where = np.unique(np.stack([self.phase, self.peer], axis=1), axis=0, return_inverse=True)
        sizes = np.bincount(where.reshape(-1), self.bytes, len(keys)).astype(int).tolist()
        return {(phase, peer): size for (phase, peer), size in zip(keys.tolist(), sizes, strict=True)}


@dataclass(frozen=True)
class RankPlan:
    """Everything one endpoint does.

    Attributes:
        endpoint: whose plan it is.
        sends, receives: fragments to and from peers.
        keeps: fragments that it holds already; ``peer`` is the endpoint itself.
        creates: tensors (numbers in the catalogue) that it must own and the source layout has not: random streams
            of ranks that did not exist.
    """

    endpoint: int
    sends: Moves
    receives: Moves
    keeps: Moves
    creates: tuple[int, ...] = ()


def plan_endpoint(problem: Problem, endpoint: int) -> RankPlan:
    """The plan of ``endpoint``, derived from the problem alone.

    Raises:
        ValueError: nobody holds something this endpoint must own.
    """
    sends: list[_Part] = []
    receives: list[_Part] = []
    keeps: list[_Part] = []
    creates: tuple[int, ...] = ()
    readable = problem.readable(endpoint)
    for rank in np.flatnonzero(problem.target_at == endpoint).tolist():
        for region in incoming(problem, rank):
            holders = region.holders(problem)
            if not len(holders):
                name = problem.source.catalogue.tensors[int(region.boxes.tensor[0])].name
                raise ValueError(f"nobody holds a part of {name} that target rank {rank} must own")
            if endpoint in holders:
                replicas = problem.source.replicas(*region.source)
                mine = int(replicas[np.isin(replicas, readable)][0])
                keeps.append(_Part(region.boxes, endpoint, 0, mine))
                continue
            for leg in legs(problem, region, holders, endpoint):
                if leg.source == endpoint:
                    sends.append(_Part(leg.boxes, leg.destination, leg.phase, rank))
                else:
                    receives.append(_Part(leg.boxes, leg.source, leg.phase, rank))
        wanted = problem.target.boxes_of(rank).tensor
        creates = tuple(np.unique(wanted[problem.source.instances.first[wanted] < 0]).tolist())
    done = set()
    for rank in readable.tolist():
        for region in outgoing(problem, rank):
            # An endpoint that serves several replicas of one shard sends it once.
            if (region.source, region.target) not in done:
                done.add((region.source, region.target))
                for leg in legs(problem, region, region.holders(problem), endpoint):
                    sends.append(_Part(leg.boxes, leg.destination, leg.phase, rank))
    return RankPlan(endpoint, _moves(problem, sends), _moves(problem, receives), _moves(problem, keeps), creates)


class _Part(NamedTuple):
    boxes: Boxes
    peer: int
    phase: int
    rank: int


def _moves(problem: Problem, parts: list[_Part]) -> Moves:
    boxes = joined([part.boxes for part in parts])
    counts = [len(part.boxes) for part in parts]
    numbers = np.array([(part.peer, part.phase, part.rank) for part in parts], np.int64).reshape(-1, 3)
    peer, phase, rank = np.repeat(numbers, counts, axis=0).T
    order = np.lexsort((boxes.i0, boxes.c0, boxes.o0, boxes.copy, boxes.tensor, peer, phase))
    boxes = boxes.take(order)
    size = boxes.numel * problem.source.catalogue.columns.bytes_per_element[boxes.tensor]
    return Moves(boxes, peer[order], phase[order], rank[order], size)
