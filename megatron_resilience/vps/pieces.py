"""Boxes in bulk: columns of numpy arrays, and the vectorised cut of flat ranges into boxes.

Every tensor is seen in its canonical shape (outer, cut, inner), see `LogicalTensor.canonical_shape`: whatever
its number of dimensions, tensor parallelism touches only the middle one.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np


@dataclass(frozen=True)
class Boxes:
    """Boxes of logical tensors; each column int64 of shape (n,).

    Attributes:
        tensor: number in the catalogue.
        copy: which instance of the tensor it belongs to (0, or 1 for a tied second copy).
        block: block of the cut axis in which the box lies.
        o0, o1, c0, c1, i0, i1: half-open bounds in the canonical shape, global indices.
        base: lowest-numbered rank of the shard that holds the box, see `StateSpace.replicas`.
        span: consecutive shards of the optimizer that hold it: more than 1 for a STEP only.
    """

    tensor: np.ndarray
    copy: np.ndarray
    block: np.ndarray
    o0: np.ndarray
    o1: np.ndarray
    c0: np.ndarray
    c1: np.ndarray
    i0: np.ndarray
    i1: np.ndarray
    base: np.ndarray
    span: np.ndarray

    def __len__(self) -> int:
        return len(self.tensor)

    @property
    def numel(self) -> np.ndarray:
        """Elements of each box."""
        return (self.o1 - self.o0) * (self.c1 - self.c0) * (self.i1 - self.i0)

    def take(self, index: np.ndarray) -> Boxes:
        """Rows chosen by an index or mask."""
        return Boxes(*(getattr(self, f.name)[index] for f in fields(self)))


def concatenate(parts: list[Boxes]) -> Boxes:
    """All rows of ``parts``, in order."""
    return Boxes(*(np.concatenate([getattr(p, f.name) for p in parts]) for f in fields(Boxes)))


def repeat_ranges(first: np.ndarray, count: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Expand row i into ``first[i], first[i]+1, ...`` (``count[i]`` of them): (row index, value)."""
    row = np.repeat(np.arange(len(count)), count)
    ends = np.cumsum(count)
    return row, np.repeat(first - (ends - count), count) + np.arange(len(row))


def ranges_to_local_boxes(
    low: np.ndarray, high: np.ndarray, cut: np.ndarray, inner: np.ndarray
) -> tuple[np.ndarray, ...]:
    """Cut row-major ranges [low, high) of local tensors (outer, cut, inner) into boxes.

    Returns:
        row, o0, o1, c0, c1, i0, i1: int64 arrays; ``row`` is the range each box came from. At most five
        boxes per range, at most three where outer or inner is 1. Empty ranges give none.
    """
    slab = cut * inner
    first, last = low // slab, (high - 1) // slab
    single = first == last
    one = np.ones_like(low)
    parts: list[tuple[np.ndarray, ...]] = []
    # A range inside one slab, or the partial slab at its head and the one at its tail.
    head_open = low % slab != 0
    tail_open = high % slab != 0
    head = (single & (head_open | tail_open)) | (~single & head_open)
    parts += _slab(head & (high > low), first, low - first * slab, np.minimum(high - first * slab, slab), inner)
    tail = ~single & tail_open
    parts += _slab(tail & (high > low), last, 0 * low, high - last * slab, inner)
    full_from = first + head
    full_to = last + np.where(single, ~head, ~tail_open)
    keep = np.flatnonzero((full_to > full_from) & (high > low))
    zero = 0 * one
    parts.append((keep, *(x[keep] for x in (full_from, full_to, zero, cut, zero, inner))))
    return tuple(np.concatenate([p[k] for p in parts]) for k in range(7))


def _slab(
    mask: np.ndarray, outer: np.ndarray, low: np.ndarray, high: np.ndarray, inner: np.ndarray
) -> list[tuple[np.ndarray, ...]]:
    """Boxes of ranges within one (cut, inner) slab: a partial first row, whole rows, a partial last row."""
    keep = np.flatnonzero(mask)
    outer, low, high, inner = outer[keep], low[keep], high[keep], inner[keep]
    first, last = low // inner, (high - 1) // inner
    within = first == last
    partial_head = (low % inner != 0) | (within & (high % inner != 0))
    partial_tail = ~within & (high % inner != 0)
    rows_from = first + partial_head
    rows_to = last + np.where(within, ~partial_head, ~partial_tail)
    zero = np.zeros_like(low)
    out = []
    for chosen, c0, c1, i0, i1 in (
        (partial_head, first, first + 1, low % inner, np.minimum(high - first * inner, inner)),
        (rows_to > rows_from, rows_from, rows_to, zero, inner),
        (partial_tail, last, last + 1, zero, high - last * inner),
    ):
        at = np.flatnonzero(chosen)
        out.append((keep[at], *(x[at] for x in (outer, outer + 1, c0, c1, i0, i1))))
    return out
