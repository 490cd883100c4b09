"""Instances: every place where a layout keeps a logical tensor, with its flat offset, as arrays.

A tensor has one instance (a stage, and for experts an EP rank); an embedding that the last stage needs too has two
when PP > 1. All TP and DP ranks of the place share the row: local shapes and offsets do not depend on them. What
the layout has no ranks for (a random stream of a TP rank that it lacks) has none.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np

from megatron_resilience.vps.catalogue import Catalogue
from megatron_resilience.vps.flat import FlatBuffer, bucket_size, flat_buffer
from megatron_resilience.vps.layout import Layout
from megatron_resilience.vps.stages import stage_of_layers
from megatron_resilience.vps.tensors import TWICE, Coordinate, Place, nearest_divisors


@dataclass(frozen=True)
class BufferOf:
    """A flat buffer of one (pipeline rank, model chunk) and the instances in it for EP rank 0.

    Attributes:
        instances: int64, rows of `Instances` in the order of ``named_parameters()``.
    """

    pp: int
    chunk: int
    expert: bool
    dtype: str
    instances: np.ndarray
    flat: FlatBuffer


@dataclass(frozen=True)
class Instances:
    """All instances of a layout; int64 arrays of one length unless said otherwise.

    Attributes:
        tensor: number in the catalogue.
        copy: 0, or 1 for the second copy of an embedding.
        pp, chunk, ep: place; pp 0 where it is on all stages.
        tp: TP rank of what only one has, -1 otherwise.
        numel: elements of the local tensor, vocabulary padding included.
        start: offset in the flat buffer; 0 where the tensor is not in one.
        bucket_start, shard: start of the bucket and elements of it per shard.
        first_shard, shards: which shards have a part of the parameter (for a STEP: of its parameter), padding
            counted, for Megatron's optimizer keeps state there too.
        first, second: per catalogue tensor, its row; -1 where there is none.
        buffers: every flat buffer, for the comparison with Megatron.
    """

    tensor: np.ndarray
    copy: np.ndarray
    pp: np.ndarray
    chunk: np.ndarray
    ep: np.ndarray
    tp: np.ndarray
    numel: np.ndarray
    start: np.ndarray
    bucket_start: np.ndarray
    shard: np.ndarray
    first_shard: np.ndarray
    shards: np.ndarray
    first: np.ndarray
    second: np.ndarray
    buffers: tuple[BufferOf, ...]


def build_instances(catalogue: Catalogue, layout: Layout, numel: np.ndarray) -> Instances:
    """Place every tensor of ``catalogue`` under ``layout``.

    Args:
        numel: int64 (tensors,), elements of one rank's local tensor.

    Raises:
        ValueError: layers do not fit the stages, or experts are not divisible by EP.
    """
    if layout.ep > 1 and (catalogue.experts == 0 or catalogue.experts % layout.ep):
        raise ValueError(
            f"EP={layout.ep} does not divide the {catalogue.experts} experts of {catalogue.name}; nearest EP "
            f"that do: {nearest_divisors(max(1, catalogue.experts), layout.ep)}"
        )
    tensor, copy, pp, chunk = _places(catalogue, layout)
    expert = catalogue.columns.expert[tensor]
    per_ep = max(1, catalogue.experts // layout.ep)
    fixed = catalogue.columns.coordinate[tensor]
    ep = np.where(expert >= 0, expert // per_ep, np.maximum(fixed[:, 1], 0))
    count = len(tensor)
    first = np.full(len(catalogue.tensors), -1, np.int64)
    second = first.copy()
    first[tensor[copy == 0]] = np.flatnonzero(copy == 0)
    second[tensor[copy == 1]] = np.flatnonzero(copy == 1)
    start, bucket_start, shard = (np.zeros(count, np.int64) for _ in range(3))
    buffers = _fill_buffers(catalogue, layout, (tensor, pp, chunk, ep, numel), (start, bucket_start, shard))
    owner = _parameter_rows(catalogue, tensor, copy, (first, second))
    begin, size = start[owner] - bucket_start[owner], np.maximum(shard[owner], 1)
    first_shard = begin // size
    shards = (begin + numel[tensor[owner]] - 1) // size - first_shard + 1
    return Instances(
        tensor, copy, pp, chunk, ep, fixed[:, 0], numel[tensor], start, bucket_start, shard, first_shard, shards,
        first, second, buffers,
    )  # fmt: skip


def _parameter_rows(
    catalogue: Catalogue, tensor: np.ndarray, copy: np.ndarray, rows: tuple[np.ndarray, np.ndarray]
) -> np.ndarray:
    """Per instance the row of the parameter that a STEP counts for; of everything else its own row."""
    owner = np.arange(len(tensor))
    is_step = catalogue.columns.is_step[tensor]
    for row in np.flatnonzero(is_step).tolist():
        parameter = catalogue.number_of[catalogue.tensors[int(tensor[row])].of]
        owner[row] = rows[int(copy[row])][parameter]
    return owner


def _places(catalogue: Catalogue, layout: Layout) -> tuple[np.ndarray, ...]:
    """tensor, copy, pp, chunk of every instance, in the order of named_parameters() within a chunk."""
    stages = stage_of_layers(catalogue.layers, layout)
    last = (layout.pp - 1, layout.vpp - 1)
    rows: list[tuple[int, int, int, int]] = []
    tied: list[tuple[int, int, int, int]] = []
    embeds: list[tuple[int, int, int, int]] = []
    for number, tensor in enumerate(catalogue.tensors):
        if tensor.place is Place.LAYER:
            rows.append((number, 0, *stages[tensor.layer]))
        elif tensor.place is Place.LAST:
            rows.append((number, 0, *last))
        elif tensor.coordinate is not None:
            if _exists(tensor.coordinate, layout):
                rows.append((number, 0, max(0, tensor.coordinate.pp), 0))
        else:
            rows.append((number, 0, 0, 0))
            if layout.pp > 1 and tensor.place in TWICE:
                # Megatron registers the output layer last in its chunk, the embedding first.
                (tied if tensor.place is Place.TIED else embeds).append((number, 1, *last))
    table = np.array(embeds + rows + tied, np.int64).reshape(-1, 4)
    return table[:, 0], table[:, 1], table[:, 2], table[:, 3]


def _exists(coordinate: Coordinate, layout: Layout) -> bool:
    grid = layout.dense if coordinate.ep < 0 else layout.expert
    return coordinate.tp < grid.tp and coordinate.ep < grid.ep and coordinate.pp < layout.pp


def _fill_buffers(
    catalogue: Catalogue,
    layout: Layout,
    places: tuple[np.ndarray, ...],
    out: tuple[np.ndarray, ...],
) -> tuple[BufferOf, ...]:
    tensor, pp, chunk, ep, local = places
    start, bucket_start, shard = out
    columns = catalogue.columns
    own_buffer = (columns.expert[tensor] >= 0) & layout.separate_experts
    trainable = columns.is_flat[tensor]
    is_model = columns.is_model[tensor]
    shared = columns.is_twice[tensor] & (layout.pp > 1)
    dtype_names, dtype = columns.dtype_names, columns.dtype[tensor]
    buffers = []
    # One pass over the instances, not one per stage: stages x instances would grow with PP.
    group = ((pp * layout.vpp + chunk) * 2 + own_buffer) * len(dtype_names) + dtype
    order = np.argsort(group, kind="stable")
    order = order[trainable[order]]
    edges = np.flatnonzero(np.diff(group[order], prepend=-1, append=-1))
    per_rank = np.bincount(
        pp[is_model & ((ep == 0) | ~own_buffer)],
        weights=local[tensor][is_model & ((ep == 0) | ~own_buffer)],
        minlength=layout.pp,
    )
    for low, high in itertools.pairwise(edges):
        members = order[low:high]
        stage, part, expert = int(pp[members[0]]), int(chunk[members[0]]), bool(own_buffer[members[0]])
        grid = layout.expert if expert else layout.dense
        sample = members[ep[members] == 0] if expert else members
        limit = bucket_size(layout, stage, part, int(per_rank[stage]))
        flat = flat_buffer(
            local[tensor[sample]].tolist(), shared[sample].tolist(), grid.shards, limit, layout.pad_for_busbw
        )
        bounds = flat.buckets[flat.bucket]
        for rank in range(grid.ep):
            mine = members[ep[members] == rank] if expert else members
            start[mine], bucket_start[mine] = flat.start, bounds[:, 0]
            shard[mine] = (bounds[:, 1] - bounds[:, 0]) // grid.shards
        buffers.append(BufferOf(stage, part, expert, str(dtype_names[dtype[sample[0]]]), sample, flat))
    return tuple(buffers)
