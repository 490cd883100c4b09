"""Schedules: in which round two endpoints talk. Each is a proper edge colouring of the complete graph.

In a round an endpoint talks with at most one other, and all endpoints order their pairs by (round), so the
pair that is lowest among the unfinished ones can always proceed: no deadlock, whatever the buffering.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

LIST_UP_TO = 128
"""Endpoints up to which ranks may use the list schedule: planning as many takes a rank about 2 s, in the background."""

Round = Callable[[int, int], int]
"""The round of a pair of endpoints; the same whichever is asked."""


def xor_rounds(endpoints: int) -> Round:
    """Peer(i, s) = i XOR s (DynaTrain, State Transition Engine).

    For a number of endpoints that is no power of two, the rounds of the next power are kept and peers that
    do not exist are skipped. ``endpoints`` is not needed by the rule; it is there so that schedules look
    alike.
    """
    del endpoints
    return lambda a, b: a ^ b


def sum_rounds(endpoints: int) -> Round:
    """Round (i + j) mod n: at most n rounds for any n, where XOR has up to 2n."""
    return lambda a, b: (a + b) % endpoints


def list_rounds(traffic: Mapping[tuple[int, int], int]) -> Round:
    """Greedy list schedule: pairs by falling traffic, each in the first round where both are free.

    Needs everybody's bytes. They follow from the problem, so each rank can still work the schedule out alone, but has
    to plan all endpoints for it: that is done up to `LIST_UP_TO` of them, and only shown beyond.

    Args:
        traffic: bytes by (source, destination).
    """
    weight: dict[tuple[int, int], int] = {}
    for (a, b), size in traffic.items():
        pair = (min(a, b), max(a, b))
        weight[pair] = max(weight.get(pair, 0), size)
    busy: dict[int, set[int]] = {}
    rounds: dict[tuple[int, int], int] = {}
    for pair in sorted(weight, key=lambda p: (-weight[p], p)):
        taken = busy.setdefault(pair[0], set()) | busy.setdefault(pair[1], set())
        number = next(k for k in range(len(taken) + 1) if k not in taken)
        rounds[pair] = number
        busy[pair[0]].add(number)
        busy[pair[1]].add(number)
    return lambda a, b: rounds[(min(a, b), max(a, b))]


def order_of(endpoint: int, peers: np.ndarray, rounds: Round) -> list[int]:
    """The peers of ``endpoint`` in the order in which it talks with them."""
    return sorted(np.unique(peers).tolist(), key=lambda peer: rounds(endpoint, peer))
