"""The least that a change of layout can send: counted element by element, without the planner."""

from __future__ import annotations

from typing import Any

import numpy as np

from megatron_resilience.vps.catalogue import catalogue_from_json
from megatron_resilience.vps.layout import Layout
from megatron_resilience.vps.space import StateSpace


def least_bytes(told: dict[str, Any]) -> int:
    """Bytes of elements that ranks must own and no rank of their node had.

    Args:
        told: ``catalogue``, ``source``, ``target``, ``sharded``, ``ranks_per_node``, as rank 0 noted them. Rank r is on node
            r // ranks_per_node before and after.
    """
    catalogue = catalogue_from_json(told["catalogue"])
    spaces = [StateSpace(catalogue, Layout(**told[side]), told["sharded"]) for side in ("source", "target")]
    target = spaces[1]
    per_node, width = told["ranks_per_node"], catalogue.columns.bytes_per_element
    total = 0
    for node in range(-(-target.layout.world // per_node)):
        before, after = (
            [boxes for rank in _ranks(space, node, per_node) for boxes in _by_tensor(space, rank).items()]
            for space in spaces
        )
        held: dict[int, np.ndarray] = {}
        for tensor, boxes in before:
            mask = held.setdefault(tensor, np.zeros(catalogue.columns.canonical[tensor], bool))
            for box in boxes:
                mask[box] = True
        for tensor, boxes in after:
            # Both copies of a tied embedding are the same bits: one of them is enough to have.
            wanted = np.zeros(catalogue.columns.canonical[tensor], bool)
            for box in boxes:
                wanted[box] = True
            if tensor in held:
                wanted &= ~held[tensor]
            total += int(wanted.sum()) * int(width[tensor])
    return total


def _ranks(space: StateSpace, node: int, per_node: int) -> range:
    return range(node * per_node, min((node + 1) * per_node, space.layout.world))


def _by_tensor(space: StateSpace, rank: int) -> dict[int, list[tuple[slice, slice, slice]]]:
    boxes = space.boxes_of(rank)
    out: dict[int, list[tuple[slice, slice, slice]]] = {}
    bounds = np.stack([boxes.o0, boxes.o1, boxes.c0, boxes.c1, boxes.i0, boxes.i1], axis=1).tolist()
    for tensor, (o0, o1, c0, c1, i0, i1) in zip(boxes.tensor.tolist(), bounds, strict=True):
        out.setdefault(tensor, []).append((slice(o0, o1), slice(c0, c1), slice(i0, i1)))
    return out
