"""Stages: a plan cut into exchanges that fit a memory budget, and the peak that results.

Every message (all fragments from one endpoint to another in one phase) is one packed byte stream, cut at multiples of
a chunk size that follows from the problem and the budget alone, so both sides cut alike. One exchange holds at most
one chunk outgoing and one incoming.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from megatron_resilience.routing.plan import Moves, RankPlan
from megatron_resilience.routing.problem import Problem
from megatron_resilience.vps.space import StateSpace

SMALLEST_CHUNK = 1 << 20
"""Bytes below which latency, not bandwidth, would rule every exchange."""
LARGEST_CHUNK = 1 << 28
"""Bytes above which a larger buffer no longer helps."""


class DoesNotFit(ValueError):
    """The budget cannot hold what a switch needs; the message has the figures."""


@dataclass(frozen=True)
class Budget:
    """How a rank's memory is used during the switch (bytes).

    Attributes:
        limit: what may be used.
        old, new: largest state of any rank in the two layouts (masters, moments, buffers, padding included).
        old_on_device: whether the old state stays beside the new one until commit; otherwise it lies in host
            snapshots, from which it is sent.
        chunk: size of one staging buffer; there are two, outgoing and incoming.
    """

    limit: int
    old: int
    new: int
    old_on_device: bool
    chunk: int

    @property
    def peak(self) -> int:
        """Highest use of any rank."""
        return self.new + (self.old if self.old_on_device else 0) + 2 * self.chunk


@dataclass(frozen=True)
class Chunk:
    """A piece of a message.

    Attributes:
        peer: the other endpoint.
        phase: phase of the message.
        number: position in the message.
        size: bytes.
        fragment, begin, end: int64 arrays: fragments in the chunk (rows of `Moves`), bytes of each.
    """

    peer: int
    phase: int
    number: int
    size: int
    fragment: np.ndarray
    begin: np.ndarray
    end: np.ndarray


def largest_state(space: StateSpace) -> int:
    """Bytes of the largest rank's state, as Megatron allocates it: flat shards with padding, and buffers."""
    inst, columns, layout = space.instances, space.catalogue.columns, space.layout
    per_stage = np.zeros(layout.pp)
    whole = ~space.flat[inst.tensor] & ((inst.ep == 0) | ~space.is_expert[inst.tensor])
    size = inst.numel * columns.bytes_per_element[inst.tensor]
    np.add.at(per_stage, inst.pp[whole], size[whole])
    if space.flat.any():
        for buffer in inst.buffers:
            shards = (layout.expert if buffer.expert else layout.dense).shards
            per_stage[buffer.pp] += buffer.flat.size // shards * 12
    return int(per_stage.max())


def fit_budget(problem: Problem, limit: int) -> Budget:
    """Choose where the old state waits and how large the staging buffers are.

    Raises:
        DoesNotFit: not even with the old state on the host; says what would be needed.
    """
    old, new = largest_state(problem.source), largest_state(problem.target)
    for old_on_device in (True, False):
        room = limit - new - (old if old_on_device else 0)
        chunk = min(LARGEST_CHUNK, room // 2) // 64 * 64
        if chunk >= SMALLEST_CHUNK:
            return Budget(limit, old, new, old_on_device, chunk)
    need = new + 2 * SMALLEST_CHUNK
    raise DoesNotFit(
        f"{limit / 2**30:.2f} GiB per rank cannot hold the new state under {problem.target.layout} "
        f"({new / 2**30:.2f} GiB) and two staging buffers: {need / 2**30:.2f} GiB are needed; "
        f"use a larger DP, TP or PP, or more memory"
    )


def chunks(moves: Moves, size: int) -> Iterator[Chunk]:
    """Cut every message of ``moves`` at multiples of ``size`` bytes, in the order of phases and peers."""
    change = (np.diff(moves.peer, prepend=-1, append=-1) != 0) | (np.diff(moves.phase, prepend=-1, append=-1) != 0)
    edges = np.flatnonzero(change)
    for low, high in itertools.pairwise(edges):
        stop = np.cumsum(moves.bytes[low:high])
        start = stop - moves.bytes[low:high]
        total = int(stop[-1])
        for number in range(-(-total // size)):
            begin, end = number * size, min(total, (number + 1) * size)
            first, last = np.searchsorted(stop, begin, "right"), np.searchsorted(start, end, "left")
            rows = np.arange(first, last)
            yield Chunk(
                int(moves.peer[low]),
                int(moves.phase[low]),
                number,
                end - begin,
                low + rows,
                np.maximum(start[rows], begin) - start[rows],
                np.minimum(stop[rows], end) - start[rows],
            )


def exchange_count(plan: RankPlan, size: int) -> int:
    """Number of exchanges that ``plan`` takes with staging buffers of ``size`` bytes."""
    out, back = plan.sends.per_message(), plan.receives.per_message()
    return sum(-(-max(out.get(p, 0), back.get(p, 0)) // size) for p in out.keys() | back.keys())
