"""The State Routing Planner: what one endpoint sends, receives and keeps (DynaTrain, section on the planner).

Rank-local: nothing is gathered. The receiving side intersects its target boxes with the source layout, the
sending side its source boxes with the target layout; both see the same fragments and evaluate the same
rule for replicas.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np

from megatron_resilience.routing.holders import NOWHERE
from megatron_resilience.routing.problem import Problem
from megatron_resilience.routing.sources import choose_sources
from megatron_resilience.vps.pieces import Boxes, concatenate
from megatron_resilience.vps.space import StateSpace


@dataclass(frozen=True)
class Moves:
    """Fragments between this endpoint and its peers, sorted by peer, then tensor, copy and position.

    Attributes:
        boxes: the fragments; ``base`` is without meaning here, ``copy`` the target's copy of a tied tensor.
        peer: int64 (n,), the other endpoint.
        bytes: int64 (n,), bytes of state in each fragment (all its fields).
    """

    boxes: Boxes
    peer: np.ndarray
    bytes: np.ndarray

    def __len__(self) -> int:
        return len(self.peer)

    @property
    def total_bytes(self) -> int:
        """Bytes of all fragments."""
        return int(self.bytes.sum())

    def per_peer(self) -> dict[int, int]:
        """Bytes by peer."""
        peers, where = np.unique(self.peer, return_inverse=True)
        return dict(zip(peers.tolist(), np.bincount(where, self.bytes).astype(int).tolist(), strict=True))


@dataclass(frozen=True)
class RankPlan:
    """Everything one endpoint does."""

    endpoint: int
    sends: Moves
    receives: Moves
    keeps: Moves


def plan_endpoint(problem: Problem, endpoint: int) -> RankPlan:
    """The plan of ``endpoint``, derived from the problem alone.

    Raises:
        ValueError: nobody holds something this endpoint must own.
    """
    received = _received(problem, endpoint)
    sent = _sent(problem, endpoint)
    own = received.peer == endpoint
    return RankPlan(endpoint, sent, _take(received, ~own), _take(received, own))


def _received(problem: Problem, endpoint: int) -> Moves:
    source, target = problem.source, problem.target
    parts, peers = [], []
    for rank in np.flatnonzero(problem.target_at == endpoint).tolist():
        wanted = target.boxes_of(rank)
        copy = problem.source_copy[wanted.copy, wanted.tensor]
        row, parts_found = source.owners_of(wanted, copy)
        peer = np.full(len(row), NOWHERE, np.int64)
        for src, dst, rows in _shard_pairs(source, parts_found, target, wanted.base[row]):
            owners = _ranks(target, *dst)
            chosen = choose_sources(
                problem.source_at[_ranks(source, *src)],
                problem.target_at[owners],
                problem.ranks_per_node,
                _turn(src, dst),
            )
            peer[rows] = chosen[np.searchsorted(owners, rank)]
        if (peer == NOWHERE).any():
            tensor = source.catalogue.tensors[int(parts_found.tensor[np.argmin(peer)])].name
            raise ValueError(f"nobody holds a part of {tensor} that target rank {rank} must own")
        parts.append(_with_copy(parts_found, wanted.copy[row]))
        peers.append(peer)
    return _moves(source, parts, peers)


def _sent(problem: Problem, endpoint: int) -> Moves:
    source, target = problem.source, problem.target
    parts, peers = [], []
    served = np.flatnonzero(problem.source_at == endpoint).tolist()
    seen: list[tuple[int, int]] = []
    for rank in served:
        held = source.boxes_of(rank)
        for copy in (0, 1):
            # Target copies that are fed from the copy that this box belongs to.
            exists = (copy == 0) | (target.instances.second[held.tensor] >= 0)
            fed = exists & (problem.source_copy[copy, held.tensor] == held.copy)
            row, found = target.owners_of(held, np.where(fed, copy, -1))
            for src, dst, rows in _shard_pairs(source, held.take(row), target, found.base):
                # An endpoint that serves several replicas of one shard sends it once.
                if any((other, src[0]) in seen for other in _ranks(source, *src).tolist() if other < rank):
                    continue
                owners = problem.target_at[_ranks(target, *dst)]
                chosen = choose_sources(
                    problem.source_at[_ranks(source, *src)], owners, problem.ranks_per_node, _turn(src, dst)
                )
                for peer in owners[(chosen == endpoint) & (owners != endpoint)].tolist():
                    parts.append(_with_copy(found.take(rows), copy))
                    peers.append(np.full(len(rows), peer, np.int64))
        seen += [(rank, base) for base in np.unique(held.base).tolist()]
    return _moves(source, parts, peers)


Shard = tuple[int, int]
"""(base rank, tensor class): names a set of replicas."""


def _ranks(space: StateSpace, base: int, number: int) -> np.ndarray:
    return base + space.replica_offsets[number]


def _turn(src: Shard, dst: Shard) -> int:
    return src[0] + dst[0]


def _shard_pairs(
    source: StateSpace, src: Boxes, target: StateSpace, dst_base: np.ndarray
) -> list[tuple[Shard, Shard, np.ndarray]]:
    """Group fragments by (source shard, target shard): the choice of a replica is the same in each group."""
    if not len(src):
        return []
    classes = source.tensor_class[src.tensor] * 8 + target.tensor_class[src.tensor]
    key = (src.base * target.layout.world + dst_base) * 64 + classes
    order = np.argsort(key, kind="stable")
    edges = np.flatnonzero(np.diff(key[order], prepend=-1, append=-1))
    out = []
    for low, high in itertools.pairwise(edges):
        rows = order[low:high]
        one = rows[0]
        pair = int(classes[one])
        out.append(((int(src.base[one]), pair // 8), (int(dst_base[one]), pair % 8), rows))
    return out


def _with_copy(boxes: Boxes, copy: np.ndarray | int) -> Boxes:
    fixed = np.broadcast_to(np.asarray(copy, np.int64), boxes.tensor.shape)
    return Boxes(
        boxes.tensor,
        fixed,
        boxes.block,
        boxes.o0,
        boxes.o1,
        boxes.c0,
        boxes.c1,
        boxes.i0,
        boxes.i1,
        boxes.base,
    )


def _moves(space: StateSpace, parts: list[Boxes], peers: list[np.ndarray]) -> Moves:
    if not parts:
        none = np.zeros(0, np.int64)
        return Moves(Boxes(*[none] * 10), none, none)
    boxes, peer = concatenate(parts), np.concatenate(peers)
    order = np.lexsort((boxes.i0, boxes.c0, boxes.o0, boxes.copy, boxes.tensor, peer))
    boxes = boxes.take(order)
    return Moves(boxes, peer[order], boxes.numel * space.catalogue.columns.bytes_per_element[boxes.tensor])


def _take(moves: Moves, mask: np.ndarray) -> Moves:
    return Moves(moves.boxes.take(mask), moves.peer[mask], moves.bytes[mask])
