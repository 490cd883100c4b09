"""Fan-out: how a region gets to several owners that all lack it, directly or with owners passing it on.

Every owner receives every element once whichever way is taken; what differs is who sends it, and when.

* direct: every owner gets the whole region from a source.
* broadcast: as many owners as there are sources get it in phase 0; in each later phase every owner that has it passes
  it to one that does not (a binomial tree).
* scatter: owner j gets part j of m in phase 0; in phase 1 all owners exchange their parts (scatter and all-gather).
"""

from __future__ import annotations

from enum import Enum

from megatron_resilience.routing.cost import Cluster


class Way(Enum):
    """How a region gets to several owners."""

    DIRECT = "direct"
    BROADCAST = "broadcast"
    SCATTER = "scatter"


def seconds(way: Way, size: float, sources: int, owners: int, cluster: Cluster) -> float:
    """Predicted seconds over the network until the last owner has ``size`` bytes (the source's or an owner's links
    are the bottleneck)."""
    hop = cluster.network_latency + size / cluster.network_bandwidth
    if way is Way.DIRECT:
        return -(-owners // sources) * hop
    if way is Way.BROADCAST:
        return (1 + broadcast_phases(sources, owners)) * hop
    part = cluster.network_latency + size / owners / cluster.network_bandwidth
    return (-(-owners // sources) + owners - 1) * part


def choose_way(size: float, sources: int, owners: int, cluster: Cluster) -> Way:
    """The fastest way by the cost model; the simpler one when two are alike.

    Args:
        size: bytes of the region.
        sources: endpoints that hold it.
        owners: endpoints that need it from another node.
    """
    if owners <= sources:
        return Way.DIRECT
    return min(Way, key=lambda way: seconds(way, size, sources, owners, cluster))


def broadcast_phases(sources: int, owners: int) -> int:
    """Phases after the first until everybody has it, the number of those who have it doubling in each."""
    have, phases = min(sources, owners), 0
    while have < owners:
        have, phases = 2 * have, phases + 1
    return phases


def broadcast_from(sources: int, owner: int) -> tuple[int, int] | None:
    """(owner that passes it on, phase) for owner number ``owner``; None for those that a source serves."""
    have, phase = sources, 1
    if owner < have:
        return None
    while owner >= 2 * have:
        have, phase = 2 * have, phase + 1
    return owner - have, phase


def broadcast_to(sources: int, owners: int, owner: int) -> list[tuple[int, int]]:
    """(owner, phase) of all to which owner number ``owner`` passes the region on."""
    got = broadcast_from(sources, owner)
    have, phase = sources, 1
    out = []
    while have < owners:
        if phase > (got[1] if got else 0) and owner < have and owner + have < owners:
            out.append((owner + have, phase))
        have, phase = 2 * have, phase + 1
    return out
