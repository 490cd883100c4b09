"""Boxes cut into parts of about equal size along their longest dimension."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from megatron_resilience.vps.pieces import Boxes, repeat_ranges

_AXES = (("o0", "o1"), ("c0", "c1"), ("i0", "i1"))


def split(boxes: Boxes, parts: np.ndarray) -> tuple[np.ndarray, np.ndarray, Boxes]:
    """Cut box i into ``parts[i]`` slabs of its longest dimension, or as many as that has elements.

    Args:
        parts: int64 (n,), at least 1.

    Returns:
        (row, number, pieces): ``row`` the box and ``number`` the position (from 0) of each piece; in the order of
        boxes, then of positions.
    """
    extents = np.stack([getattr(boxes, high) - getattr(boxes, low) for low, high in _AXES])
    axis = extents.argmax(axis=0)
    extent = extents.max(axis=0)
    count = np.minimum(parts, extent)
    row, number = repeat_ranges(np.zeros(len(boxes), np.int64), count)
    pieces = boxes.take(row)
    low = number * extent[row] // count[row]
    high = (number + 1) * extent[row] // count[row]
    bounds = {}
    for k, (start, stop) in enumerate(_AXES):
        own, begin = axis[row] == k, getattr(pieces, start)
        bounds[stop] = np.where(own, begin + high, getattr(pieces, stop))
        bounds[start] = np.where(own, begin + low, begin)
    return row, number, replace(pieces, **bounds)
