"""Megatron's bucket groups: where gradients and parameters of the distributed optimizer are communicated."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any


def chained(optimizer: Any) -> list[Any]:
    """The optimizers of a ``ChainedOptimizer``, or the one there is."""
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))


def reset(model: list[Any], optimizer: Any) -> None:
    """Forgets what an interrupted step left half-way. Before parameters are gathered anew: a gather would wait for the
    old one first, whose transport is gone."""
    for group in bucket_groups(model, optimizer):
        _bucket_group(group)


def bucket_groups(model: list[Any], optimizer: Any) -> Iterator[Any]:
    """Both sets that Megatron keeps: DDP's, and the distributed optimizer's own partition of the same buffers."""
    for chunk in model:
        yield from chunk.bucket_groups
        yield from chunk.expert_parallel_bucket_groups
    for part in chained(optimizer):
        for groups in getattr(part, "per_model_bucket_groups", {}).values():
            yield from groups


def _bucket_group(group: Any) -> None:
    for name in ("param_gather_handle", "grad_reduce_handle"):
        handle = getattr(group, name, None)
        if handle is not None:
            # Its transport was shut: it ends at once, with an error that is no news.
            with contextlib.suppress(Exception):
                handle.wait()
        setattr(group, name, None)
    group.param_gather_dispatched = False
    group.grad_reduce_finished = False
    group.is_last_microbatch = True
    # A newcomer learns the order of gradients in its first step, and reduces all buckets at its end: everyone
    # does the same, or collectives would be matched with others' of another bucket.
    group.is_first_batch = True
    group.per_param_grad_ready_counts = {}
    group.golden_per_param_grad_ready_counts = {}
