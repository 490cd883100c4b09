"""Where a box lies in a rank's own memory, and which logical element every local one stands for."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megatron_resilience.vps.pieces import Boxes
from megatron_resilience.vps.space import StateSpace


@dataclass(frozen=True)
class LocalViews:
    """One strided view per box, into one-dimensional storage; int64 columns, in elements.

    The storage of a PARAMETER is what the rank's optimizer has of it: the flat master shard, and alike each moment
    (``gbuf_ranges`` of Megatron). The storage of everything else is the rank's local tensor, row-major. So
    ``torch.as_strided(storage, sizes, strides, offset)`` is the box, with ``sizes`` and ``strides`` of one row.

    Attributes:
        offset: (n,)
        sizes: (n, 3), extent in the canonical shape (outer, cut, inner).
        strides: (n, 3)
    """

    offset: np.ndarray
    sizes: np.ndarray
    strides: np.ndarray


def local_views(space: StateSpace, rank: int, boxes: Boxes) -> LocalViews:
    """Views of ``boxes``, each inside what ``rank`` owns under ``space``; ``copy`` counts, ``base`` does not.

    Raises:
        ValueError: a box that ``rank`` does not own, naming its tensor.
    """
    rows, tp, shard = _instances(space, rank, boxes)
    t, block = boxes.tensor, boxes.block
    low, high = space.owned_range(rows, shard)
    begin = (
        space.global_start[t, block] + np.where(space.catalogue.columns.is_cut[t], tp, 0) * space.local_size[t, block]
    )
    k0 = boxes.c0 - begin + space.local_start[t, block]
    k1 = boxes.c1 - begin + space.local_start[t, block]
    row, inner = space.local_cut[t] * space.inner[t], space.inner[t]
    first = boxes.o0 * row + k0 * inner + boxes.i0
    last = (boxes.o1 - 1) * row + (k1 - 1) * inner + boxes.i1 - 1
    inside = (k0 >= space.local_start[t, block]) & (k1 <= space.local_start[t, block] + space.local_size[t, block])
    wrong = np.flatnonzero(~inside | (first < low) | (last >= high))
    if len(wrong):
        raise ValueError(f"rank {rank} of {space.layout} does not own all of {_named(space, boxes, int(wrong[0]))}")
    sizes = np.stack([boxes.o1 - boxes.o0, boxes.c1 - boxes.c0, boxes.i1 - boxes.i0], axis=1)
    return LocalViews(first - low, sizes, np.stack([row, inner, np.ones_like(row)], axis=1))


def storage_size(space: StateSpace, rank: int, tensor: int, copy: int) -> int:
    """Elements of ``rank``'s storage of a tensor, vocabulary padding included; 0 where it has none."""
    boxes = _whole(space, tensor, copy)
    try:
        rows, _, shard = _instances(space, rank, boxes)
    except ValueError:
        return 0
    low, high = space.owned_range(rows, shard)
    return int(high[0] - low[0])


def local_labels(space: StateSpace, rank: int, tensor: int) -> np.ndarray:
    """Logical row-major index of every element of ``rank``'s local tensor, -1 for padding.

    Returns:
        int64 in the local canonical shape (outer, cut, inner). A PARAMETER's storage is its part
        ``[low, high)`` of `StateSpace.owned_range` when flattened.
    """
    grid = space.layout.expert if space.is_expert[tensor] else space.layout.dense
    tp = space.layout.coordinates(grid, rank)[0] if space.tp[tensor] > 1 else 0
    outer, rows, inner = space.catalogue.tensors[tensor].canonical_shape
    parts = []
    for block in range(int(space.blocks[tensor])):
        size = int(space.local_size[tensor, block])
        row = int(space.global_start[tensor, block]) + tp * size + np.arange(size)
        parts.append(np.where(row < space.global_end[tensor, block], row, -1))
    cut = np.concatenate(parts)
    label = (np.arange(outer)[:, None, None] * rows + cut[None, :, None]) * inner + np.arange(inner)
    return np.where(cut[None, :, None] >= 0, label, -1)


def _instances(space: StateSpace, rank: int, boxes: Boxes) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Instance row, TP rank and shard of ``rank`` for each box."""
    inst, layout = space.instances, space.layout
    rows = np.where(boxes.copy == 1, inst.second[boxes.tensor], inst.first[boxes.tensor])
    expert = space.is_expert[boxes.tensor]
    d_tp, _, d_shard, pp = layout.coordinates(layout.dense, rank)
    e_tp, ep, e_shard, _ = layout.coordinates(layout.expert, rank)
    tp, shard = np.where(expert, e_tp, d_tp), np.where(expert, e_shard, d_shard)
    here = (rows >= 0) & ((inst.pp[rows] == pp) | space.on_all_stages[boxes.tensor])
    here &= ~expert | (inst.ep[rows] == ep)
    here &= (inst.tp[rows] < 0) | (inst.tp[rows] == tp)
    absent = np.flatnonzero(~here)
    if len(absent):
        raise ValueError(f"rank {rank} of {layout} does not hold {_named(space, boxes, int(absent[0]))}")
    return rows, tp, shard


def _whole(space: StateSpace, tensor: int, copy: int) -> Boxes:
    zero = np.zeros(1, np.int64)
    columns = dict.fromkeys(("block", "o0", "o1", "c0", "c1", "i0", "i1", "base", "span"), zero)
    return Boxes(tensor=zero + tensor, copy=zero + copy, **columns)


def _named(space: StateSpace, boxes: Boxes, i: int) -> str:
    bounds = ", ".join(f"{getattr(boxes, d + '0')[i]}:{getattr(boxes, d + '1')[i]}" for d in "oci")
    return f"{space.catalogue.tensors[int(boxes.tensor[i])].name}[{bounds}]"
