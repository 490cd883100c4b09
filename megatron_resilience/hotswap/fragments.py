"""Fragments of logical tensors as views of one-dimensional storage, and as packed bytes."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from megatron_resilience.vps.local import local_views
from megatron_resilience.vps.pieces import Boxes
from megatron_resilience.vps.space import StateSpace

Storage = dict[tuple[int, int], dict[str, torch.Tensor]]
"""By (number in the catalogue, copy): fields of the tensor on this rank, each 1-D and a view of live memory.

A PARAMETER has ``master``, ``exp_avg`` and ``exp_avg_sq`` in fp32; everything else has ``value``."""

Fields = dict[str, torch.Tensor]
"""One fragment: every field's part, of shape (outer, cut, inner)."""


def fragments(space: StateSpace, rank: int, boxes: Boxes, storage: Storage) -> Iterator[Fields]:
    """Per box, every field's part as a live view of shape (outer, cut, inner): read it to send, write it to receive.

    Args:
        boxes: owned by ``rank`` under ``space``; ``copy`` says which copy's storage.
    """
    at = local_views(space, rank, boxes)
    sizes, strides, offsets = at.sizes.tolist(), at.strides.tolist(), at.offset.tolist()
    for i, key in enumerate(zip(boxes.tensor.tolist(), boxes.copy.tolist(), strict=True)):
        yield {
            f: torch.as_strided(t, sizes[i], strides[i], t.storage_offset() + offsets[i])
            for f, t in storage[key].items()
        }


def pack(fragment: Fields, out: torch.Tensor, begin: int) -> None:
    """Bytes of a fragment from ``begin`` on, its fields one after the other in order of name, until ``out`` is full.

    Args:
        out: uint8, host. No other memory of its size is taken.
    """
    for view, low, high, part in _fields(fragment, out, begin):
        size = view.element_size()
        if low % size or high % size or part.storage_offset() % size:
            first, last = low // size, -(-high // size)
            whole = torch.cat([block.reshape(-1) for block in _blocks(view, first, last)]).view(torch.uint8)
            part.copy_(whole[low - first * size : high - first * size])
            continue
        elements, at = part.view(view.dtype), 0
        for block in _blocks(view, low // size, high // size):
            elements[at : at + block.numel()].view(block.shape).copy_(block)
            at += block.numel()


def unpack(fragment: Fields, data: torch.Tensor, begin: int) -> None:
    """The inverse: ``data`` (uint8, host, of any alignment) becomes the fragment's bytes from ``begin`` on."""
    for view, low, high, part in _fields(fragment, data, begin):
        size = view.element_size()
        first, last = low // size, -(-high // size)
        if low % size or high % size:
            # The cut is within an element: the rest of it is there already, or comes with the next part.
            whole = torch.cat([block.reshape(-1) for block in _blocks(view, first, last)]).cpu().view(torch.uint8)
            whole[low - first * size : high - first * size] = part
            part = whole
        elif part.storage_offset() % size:
            part = part.clone()
        elements, at = part.view(view.dtype), 0
        for block in _blocks(view, first, last):
            block.copy_(elements[at : at + block.numel()].view(block.shape))
            at += block.numel()


def _fields(fragment: Fields, data: torch.Tensor, begin: int) -> Iterator[tuple[torch.Tensor, int, int, torch.Tensor]]:
    """(view, first byte, last byte, part of ``data``) of every field that ``data`` has something of."""
    at, end = 0, begin + len(data)
    for _, view in sorted(fragment.items()):
        size = view.numel() * view.element_size()
        low, high = max(begin, at), min(end, at + size)
        if low < high:
            yield view, low - at, high - at, data[low - begin : high - begin]
        at += size


def _blocks(view: torch.Tensor, first: int, last: int) -> Iterator[torch.Tensor]:
    """Elements ``first`` to ``last`` of a tensor, in order, as few blocks of it."""
    if first == 0 and last == view.numel():
        yield view
        return
    if view.dim() == 1:
        yield view[first:last]
        return
    row = view[0].numel()
    begin, end = -(-first // row), last // row
    if begin > end:
        yield from _blocks(view[end], first - end * row, last - end * row)
        return
    if first < begin * row:
        yield from _blocks(view[begin - 1], first - (begin - 1) * row, row)
    if begin < end:
        yield view[begin:end]
    if end * row < last:
        yield from _blocks(view[end], 0, last - end * row)


def same_bits(a: Fields, b: Fields) -> bool:
    """Whether two fragments are equal to the bit, wherever they lie."""
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return a.keys() == b.keys() and all(
        torch.equal(_as_integers(a[f], kinds), _as_integers(b[f], kinds).to(a[f].device)) for f in a
    )


def _as_integers(tensor: torch.Tensor, kinds: dict[int, torch.dtype]) -> torch.Tensor:
    return tensor.view(kinds[tensor.element_size()])
