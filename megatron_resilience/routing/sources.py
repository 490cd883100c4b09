"""Which replica sends to which owner: a rule that any two ranks evaluate alike without talking.

In order: what the destination already has stays; then a replica on the same node, in turn; then all
replicas in turn, each pair of shards starting at another one so that the load evens out.
"""

from __future__ import annotations

import numpy as np

from megatron_resilience.routing.holders import NOWHERE


def choose_sources(replicas: np.ndarray, owners: np.ndarray, ranks_per_node: int, turn: int) -> np.ndarray:
    """Source endpoint for every owner of one region.

    Args:
        replicas: int64 (n,), endpoints that hold the region; NOWHERE where a replica is lost.
        owners: int64 (m,), endpoints that must own it.
        ranks_per_node: endpoints per node, numbered node by node.
        turn: where the rotation starts; the same on every rank.

    Returns:
        int64 (m,), NOWHERE where nobody holds the region. An owner that holds it is its own source.
    """
    live = np.unique(replicas[replicas != NOWHERE])
    out = np.full(len(owners), NOWHERE, np.int64)
    if not len(live):
        return out
    at_home = np.isin(owners, live)
    out[at_home] = owners[at_home]
    far = np.flatnonzero(~at_home)
    if not len(far):
        return out
    same = live[None, :] // ranks_per_node == owners[far, None] // ranks_per_node
    near = same.any(axis=1)
    for row in np.flatnonzero(near):
        candidates = live[same[row]]
        # Neighbours on the node take turns, by their position on it.
        out[far[row]] = candidates[(owners[far[row]] + turn) % len(candidates)]
    remote = far[~near]
    out[remote] = live[(np.arange(len(remote)) + turn) % len(live)]
    return out
