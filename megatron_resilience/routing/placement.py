"""Which endpoint becomes which target rank: the numbering that leaves the most bytes where they are.

Ranks that talk much (TP, EP) are neighbours in the target's numbering, so whole nodes are given to whole runs of ranks,
and ranks change places within a node only. Whoever decides on a change (the coordinator, the ``plan`` command) does
this once and publishes it as ``Problem.target_at``; it takes one plan per target rank.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from megatron_resilience.routing.problem import Problem
from megatron_resilience.routing.regions import incoming

WORTHWHILE_UP_TO = 2048
"""Target ranks up to which callers should bother: some milliseconds are spent on each."""


def keep_in_place(problem: Problem) -> Problem:
    """``problem`` with its target endpoints permuted so that fewer bytes travel; never more than before."""
    overlap = _overlap(problem)
    better = _assign(overlap, problem.target_at, problem.cluster.ranks_per_node)
    ranks = np.arange(len(better))
    column = {endpoint: i for i, endpoint in enumerate(problem.target_at.tolist())}
    moved = overlap[ranks, [column[e] for e in better.tolist()]].sum()
    if moved <= np.trace(overlap):
        return problem
    return replace(problem, target_at=better)


def _overlap(problem: Problem) -> np.ndarray:
    """float64 (ranks, ranks): bytes of what target rank i owns that the endpoint of target rank j holds."""
    count = len(problem.target_at)
    column = np.full(int(max(problem.target_at.max(), problem.source_at.max())) + 1, -1)
    column[problem.target_at] = np.arange(count)
    out = np.zeros((count, count))
    for rank in range(count):
        for region in incoming(problem, rank):
            at = column[region.holders(problem)]
            out[rank, at[at >= 0]] += region.bytes.sum()
    return out


def _assign(overlap: np.ndarray, endpoints: np.ndarray, per_node: int) -> np.ndarray:
    """Endpoint by target rank: nodes to runs of ranks, then endpoints to ranks, each time the largest overlap first."""
    count = len(endpoints)
    nodes = endpoints // per_node
    width = per_node
    runs = nodes.reshape(-1, width) if count % width == 0 else None
    if runs is None or (runs != runs[:, :1]).any():
        # The endpoints are no whole nodes: there is no run of ranks to move as one.
        return endpoints
    blocks = count // width
    whole = overlap.reshape(blocks, width, blocks, width).max(axis=3).sum(axis=1)
    out = endpoints.copy()
    for run, node in _largest_first(whole):
        rows = slice(run * width, (run + 1) * width)
        columns = slice(node * width, (node + 1) * width)
        for i, j in _largest_first(overlap[rows, columns]):
            out[run * width + i] = endpoints[node * width + j]
    return out


def _largest_first(weights: np.ndarray) -> list[tuple[int, int]]:
    """A row for every column, the heaviest pair first; of equal ones a pair on the diagonal, then the lowest."""
    size = len(weights)
    rows, columns = np.divmod(np.arange(size * size), size)
    order = np.lexsort((columns, rows, rows != columns, -weights.ravel()))
    free_row, free_column = np.ones(size, bool), np.ones(size, bool)
    out = []
    for i, j in zip(rows[order].tolist(), columns[order].tolist(), strict=True):
        if free_row[i] and free_column[j]:
            free_row[i] = free_column[j] = False
            out.append((i, j))
    return out
