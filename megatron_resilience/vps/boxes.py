"""N-dimensional index boxes and their algebra (DynaTrain, arXiv 2605.18815, Virtual Parameter Space).

A box is the half-open product ``[start_0, stop_0) x ... x [start_k, stop_k)`` in the index space of one
logical tensor. These scalar functions are the readable definition; `megatron_resilience.vps.pieces` is the
same mathematics vectorised, and the tests hold one against the other.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Box:
    """A half-open box; ``start`` and ``stop`` have one entry per dimension (elements)."""

    start: tuple[int, ...]
    stop: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.start) != len(self.stop):
            raise ValueError(f"a box needs as many stops as starts, got {self.start} and {self.stop}")

    @property
    def shape(self) -> tuple[int, ...]:
        """Extent per dimension, never negative."""
        return tuple(max(0, b - a) for a, b in zip(self.start, self.stop, strict=True))

    @property
    def numel(self) -> int:
        """Number of elements; a box without dimensions (a scalar) has one."""
        return math.prod(self.shape)

    def slices(self) -> tuple[slice, ...]:
        """Index that selects this box from an array of the whole tensor."""
        return tuple(slice(a, b) for a, b in zip(self.start, self.stop, strict=True))


def whole(shape: Sequence[int]) -> Box:
    """The box that covers a tensor of ``shape``."""
    return Box((0,) * len(shape), tuple(shape))


def intersect(a: Box, b: Box) -> Box | None:
    """Common part of two boxes of one tensor, or None when they share no element.

    Raises:
        ValueError: the boxes differ in their number of dimensions.
    """
    if len(a.start) != len(b.start):
        raise ValueError(f"boxes of {len(a.start)} and {len(b.start)} dimensions belong to different tensors")
    start = tuple(map(max, a.start, b.start))
    stop = tuple(map(min, a.stop, b.stop))
    if any(lo >= hi for lo, hi in zip(start, stop, strict=True)):
        return None
    return Box(start, stop)


def subtract(a: Box, b: Box) -> list[Box]:
    """What of ``a`` is not in ``b``, as at most two boxes per dimension that do not overlap."""
    common = intersect(a, b)
    if common is None:
        return [a] if a.numel else []
    rest: list[Box] = []
    start, stop = list(a.start), list(a.stop)
    for dim in range(len(start)):
        if start[dim] < common.start[dim]:
            rest.append(Box(tuple(start), (*stop[:dim], common.start[dim], *stop[dim + 1 :])))
        if common.stop[dim] < stop[dim]:
            rest.append(Box((*start[:dim], common.stop[dim], *start[dim + 1 :]), tuple(stop)))
        start[dim], stop[dim] = common.start[dim], common.stop[dim]
    return rest


def boxes_of_range(low: int, high: int, shape: Sequence[int]) -> Iterator[Box]:
    """Cut the row-major range ``[low, high)`` of a tensor of ``shape`` into at most 2*ndim-1 boxes.

    This is how a flat ZeRO shard, which knows nothing of tensor boundaries, becomes geometry again.

    Raises:
        ValueError: the range leaves the tensor.
    """
    size = math.prod(shape)
    if not 0 <= low <= high <= size:
        raise ValueError(f"range [{low}, {high}) leaves a tensor of {size} elements (shape {tuple(shape)})")
    if low == high:
        return
    if len(shape) <= 1:
        yield Box((low,) if shape else (), (high,) if shape else ())
        return
    row = math.prod(shape[1:])
    first, last = low // row, high // row
    if low % row:
        yield from _in_row(first, low % row, min(row, high - first * row), shape)
        first += 1
    if first < last:
        yield Box((first,) + (0,) * (len(shape) - 1), (last, *shape[1:]))
    if high % row and first <= last:
        yield from _in_row(last, 0, high % row, shape)


def _in_row(row: int, low: int, high: int, shape: Sequence[int]) -> Iterator[Box]:
    for inner in boxes_of_range(low, high, shape[1:]):
        yield Box((row, *inner.start), (row + 1, *inner.stop))
