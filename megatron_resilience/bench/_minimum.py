"""The least that a change of layout can send: counted element by element, without the planner."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from megatron_resilience.vps.catalogue import catalogue_from_json
from megatron_resilience.vps.layout import Layout
from megatron_resilience.vps.space import StateSpace

_Slices = tuple[slice, slice, slice]


def least_bytes(told: dict[str, Any]) -> tuple[int, int]:
    """Bytes of elements that ranks must own and no rank of their node had: in the order of nodes that there is, and in the
    order that needs least.

    Args:
        told: ``catalogue``, ``source``, ``target``, ``sharded``, ``ranks_per_node``, as rank 0 noted them. Rank r is on node
            r // ranks_per_node before, and after.
    """
    catalogue = catalogue_from_json(told["catalogue"])
    source, target = (StateSpace(catalogue, Layout(**told[side]), told["sharded"]) for side in ("source", "target"))
    per_node = told["ranks_per_node"]
    nodes = range(max(-(-space.layout.world // per_node) for space in (source, target)))
    held = [_held(source, _ranks(source, node, per_node)) for node in nodes]
    # By node: what the ranks of each place in the new world would lack there.
    lacking = [
        [sum(_lacking(target, rank, here) for rank in _ranks(target, place, per_node)) for place in nodes]
        for here in held
    ]
    best = min(sum(lacking[node][place] for node, place in enumerate(order)) for order in itertools.permutations(nodes))
    return sum(lacking[node][node] for node in nodes), best


def _ranks(space: StateSpace, node: int, per_node: int) -> range:
    return range(node * per_node, min((node + 1) * per_node, space.layout.world))


def _held(space: StateSpace, ranks: range) -> dict[int, np.ndarray]:
    """By tensor: which of its elements some of the ranks have. Copies of a tied embedding are the same bits."""
    masks: dict[int, np.ndarray] = {}
    shapes = space.catalogue.columns.canonical
    for rank in ranks:
        for tensor, boxes in _boxes(space, rank).items():
            mask = masks.setdefault(tensor, np.zeros(shapes[tensor], bool))
            for box in boxes:
                mask[box] = True
    return masks


def _lacking(space: StateSpace, rank: int, held: dict[int, np.ndarray]) -> int:
    """Bytes that a rank must own and that are not among ``held``."""
    width, total = space.catalogue.columns.bytes_per_element, 0
    for tensor, mask in _held(space, range(rank, rank + 1)).items():
        missing = mask & ~held[tensor] if tensor in held else mask
        total += int(missing.sum()) * int(width[tensor])
    return total


def _boxes(space: StateSpace, rank: int) -> dict[int, list[_Slices]]:
    boxes = space.boxes_of(rank)
    out: dict[int, list[_Slices]] = {}
    bounds = np.stack([boxes.o0, boxes.o1, boxes.c0, boxes.c1, boxes.i0, boxes.i1], axis=1).tolist()
    for tensor, (o0, o1, c0, c1, i0, i1) in zip(boxes.tensor.tolist(), bounds, strict=True):
        out.setdefault(tensor, []).append((slice(o0, o1), slice(c0, c1), slice(i0, i1)))
    return out
