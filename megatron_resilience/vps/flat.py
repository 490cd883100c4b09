"""Flat distributed-optimizer buffers: where each parameter starts, where buckets end, who owns what.

Mirrors ``DistributedOptimizer._compute_per_buffer_param_layout``
(megatron/core/optimizer/distrib_optimizer.py), ``param_layout.py`` and ``resolve_ddp_bucket_size``
(megatron/training/training.py) of megatron-core 0.19.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_resilience.vps.layout import Layout

ALIGNMENT = 64
"""Elements to which a parameter's start is rounded up."""


@dataclass(frozen=True)
class FlatBuffer:
    """One contiguous buffer.

    Attributes:
        start: int64 (parameters,), offset of each parameter in elements, in the order given.
        bucket: int64 (parameters,), number of its bucket.
        buckets: int64 (buckets, 2), [start, end) of each bucket, padding included.
    """

    start: np.ndarray
    bucket: np.ndarray
    buckets: np.ndarray

    @property
    def size(self) -> int:
        """Elements of the buffer, padding included."""
        return int(self.buckets[-1, 1]) if len(self.buckets) else 0


def flat_buffer(
    sizes: Sequence[int],
    own_bucket: Sequence[bool],
    shards: int,
    bucket_size: int | None,
    pad_for_busbw: bool = False,
) -> FlatBuffer:
    """Lay out parameters of ``sizes`` elements, given in the order of ``named_parameters()``.

    Args:
        own_bucket: per parameter, whether it must have a bucket of its own (``shared_embedding``).
        shards: size of the group over which the optimizer shards.
        bucket_size: elements after which a bucket closes; None for one bucket.
        pad_for_busbw: pad bucket ends to 2**16 too.
    """
    divisor = math.lcm(shards, 128, 2**16) if pad_for_busbw else math.lcm(shards, 128)
    starts, numbers = [0] * len(sizes), [0] * len(sizes)
    buckets: list[tuple[int, int]] = []
    bucket_start = end = 0
    empty = True
    for i in range(len(sizes) - 1, -1, -1):
        start = -(-end // ALIGNMENT) * ALIGNMENT
        if own_bucket[i] and not empty:
            bucket_end = -(-start // divisor) * divisor
            buckets.append((bucket_start, bucket_end))
            bucket_start = start = bucket_end
        starts[i], numbers[i] = start, len(buckets)
        end, empty = start + sizes[i], False
        if own_bucket[i] or (bucket_size is not None and end - bucket_start >= bucket_size):
            bucket_end = -(-end // divisor) * divisor
            buckets.append((bucket_start, bucket_end))
            bucket_start, end, empty = bucket_end, bucket_end, True
    if not empty:
        buckets.append((bucket_start, -(-end // divisor) * divisor))
    return FlatBuffer(
        np.array(starts, np.int64), np.array(numbers, np.int64), np.array(buckets, np.int64).reshape(-1, 2)
    )


def bucket_size(layout: Layout, pp: int, chunk: int, rank_parameters: int) -> int | None:
    """Elements after which a bucket closes on a pipeline rank and model chunk, or None for one bucket.

    Args:
        rank_parameters: parameters of all model chunks of the rank, for ``num_buckets``.
    """
    if not layout.overlap_grad_reduce or pp > 0 or chunk > 0:
        return None
    if layout.num_buckets is not None:
        return rank_parameters // layout.num_buckets
    if layout.bucket_size is not None:
        return layout.bucket_size
    return max(40_000_000, 1_000_000 * layout.dp * layout.cp)
