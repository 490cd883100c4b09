"""Regions: fragments that one set of replicas holds and one set of owners needs, so that one choice serves them all."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from megatron_resilience.routing.problem import Problem
from megatron_resilience.vps.pieces import Boxes, concatenate


class Shard(NamedTuple):
    """Names a set of ranks that hold the same boxes: the arguments of `StateSpace.replicas`."""

    base: int
    tensor_class: int
    span: int


@dataclass(frozen=True)
class Region:
    """What a source shard and a target shard have in common.

    Attributes:
        source, target: the shards.
        boxes: fragments sorted by tensor, copy and position; ``copy`` is the target's, ``base`` without meaning.
        bytes: int64 (n,), bytes of state in each.
    """

    source: Shard
    target: Shard
    boxes: Boxes
    bytes: np.ndarray

    def holders(self, problem: Problem) -> np.ndarray:
        """Endpoints (sorted) that hold the region; empty when all are lost."""
        return problem.holders(problem.source.replicas(*self.source))

    def owners(self, problem: Problem) -> np.ndarray:
        """Endpoints that must own the region, in the order of target ranks."""
        return problem.target_at[problem.target.replicas(*self.target)]


def incoming(problem: Problem, rank: int) -> list[Region]:
    """Regions that make up what target rank ``rank`` must own, as far as the source layout has it."""
    wanted = problem.target.boxes_of(rank)
    copy = problem.source_copy[wanted.copy, wanted.tensor]
    row, found = problem.source.owners_of(wanted, copy)
    return list(_group(problem, found, wanted.take(row)))


def outgoing(problem: Problem, rank: int, only: Shard | None = None) -> list[Region]:
    """Regions of what source rank ``rank`` holds that target ranks must own; those of one shard with ``only``."""
    held = problem.source.boxes_of(rank)
    if only is not None:
        mine = (held.base == only.base) & (held.span == only.span)
        held = held.take(mine & (problem.source.tensor_class[held.tensor] == only.tensor_class))
    inst = problem.target.instances
    sides: list[tuple[Boxes, Boxes]] = []
    for copy in (0, 1):
        # Target copies that are fed from the copy that a box belongs to.
        exists = (inst.second if copy else inst.first)[held.tensor] >= 0
        fed = exists & (problem.source_copy[copy, held.tensor] == held.copy)
        row, found = problem.target.owners_of(held, np.where(fed, copy, -1))
        sides.append((held.take(row), found))
    # One region may have fragments of both copies: the last stage's own and its output layer's.
    return list(_group(problem, *(concatenate(list(side)) for side in zip(*sides, strict=True))))


def _group(problem: Problem, at_source: Boxes, at_target: Boxes) -> Iterator[Region]:
    """Group fragments by (source shard, target shard); one of the two has their bounds, the other is cut to them."""
    if not len(at_source):
        return
    source, target = problem.source, problem.target
    fragments = _intersection(at_source, at_target)
    source_class, target_class = source.tensor_class[fragments.tensor], target.tensor_class[fragments.tensor]
    shards = ((at_source.base * target.layout.world + at_target.base) * 32 + source_class) * 32 + target_class
    spans = at_source.span * (int(at_target.span.max()) + 1) + at_target.span
    order = np.lexsort(
        (fragments.i0, fragments.c0, fragments.o0, fragments.copy, fragments.tensor, spans, shards),
    )
    shards, spans = shards[order], spans[order]
    changes = np.flatnonzero(np.diff(shards) | np.diff(spans)) + 1
    size = fragments.numel * source.catalogue.columns.bytes_per_element[fragments.tensor]
    for low, high in itertools.pairwise([0, *changes.tolist(), len(order)]):
        rows = order[low:high]
        one = rows[0]
        yield Region(
            Shard(int(at_source.base[one]), int(source_class[one]), int(at_source.span[one])),
            Shard(int(at_target.base[one]), int(target_class[one]), int(at_target.span[one])),
            fragments.take(rows),
            size[rows],
        )


def _intersection(a: Boxes, b: Boxes) -> Boxes:
    """Common part of rows that overlap; ``copy`` of ``b``."""
    low = {name: np.maximum(getattr(a, name), getattr(b, name)) for name in ("o0", "c0", "i0")}
    high = {name: np.minimum(getattr(a, name), getattr(b, name)) for name in ("o1", "c1", "i1")}
    return Boxes(tensor=a.tensor, copy=b.copy, block=a.block, base=b.base, span=b.span, **low, **high)
