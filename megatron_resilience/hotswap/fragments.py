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


def pack(fragment: Fields, out: torch.Tensor, begin: int, end: int) -> None:
    """Bytes [begin, end) of a fragment, its fields one after the other in order of name, into ``out`` (uint8, host)."""
    at = 0
    for _, view in sorted(fragment.items()):
        size = view.numel() * view.element_size()
        low, high = max(begin, at), min(end, at + size)
        if low < high:
            flat = view.reshape(-1).contiguous().view(torch.uint8)
            out[low - begin : high - begin].copy_(flat[low - at : high - at])
        at += size


def unpack(fragment: Fields, data: torch.Tensor) -> None:
    """The whole fragment out of ``data`` (uint8, host, of any alignment), as :func:`pack` made it."""
    at = 0
    for _, view in sorted(fragment.items()):
        size = view.numel() * view.element_size()
        part = data[at : at + size]
        if part.storage_offset() % view.element_size():
            part = part.clone()
        view.copy_(part.view(view.dtype).view(view.shape))
        at += size


def same_bits(a: Fields, b: Fields) -> bool:
    """Whether two fragments are equal to the bit, wherever they lie."""
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return a.keys() == b.keys() and all(
        torch.equal(_as_integers(a[f], kinds), _as_integers(b[f], kinds).to(a[f].device)) for f in a
    )


def _as_integers(tensor: torch.Tensor, kinds: dict[int, torch.dtype]) -> torch.Tensor:
    return tensor.view(kinds[tensor.element_size()])
