"""Who keeps a copy of whose state. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_resilience.errors import ConfigurationError


def partners(nodes: Sequence[str], dp_groups: Sequence[Sequence[int]]) -> list[int]:
    """The rank that keeps each rank's copy, always on another node.

    Along the data-parallel ring where it leaves the node (DeadPool's choice: a DP peer needs the same bytes
    again for nothing else); where it does not (DP = 1, or DP within a node), the same place on the next node.
    Balanced: on equal nodes every rank keeps exactly one copy.

    Args:
        nodes: node of each rank, by global rank; every node has the same number of ranks.
        dp_groups: data-parallel groups as global ranks, in ring order; each rank is in exactly one.

    Raises:
        ConfigurationError: there is only one node.
    """
    order = list(dict.fromkeys(nodes))
    if len(order) < 2:
        raise ConfigurationError(
            "--deadpool keeps a copy of every rank's state on another node, but the job has ranks on one node only: "
            "use at least 2 nodes besides the spares, or --deadpool-replicas 0 to survive rank deaths only"
        )
    ring: dict[int, int] = {}
    for group in dp_groups:
        for index, rank in enumerate(group):
            others = [*group[index + 1 :], *group[:index]]
            away = next((peer for peer in others if nodes[peer] != nodes[rank]), None)
            if away is not None:
                ring[rank] = away
    balanced = len(ring) == len(nodes) and len(set(ring.values())) == len(nodes)
    if balanced:
        return [ring[rank] for rank in range(len(nodes))]
    by_node = {node: [r for r, n in enumerate(nodes) if n == node] for node in order}
    result = []
    for rank, node in enumerate(nodes):
        following = by_node[order[(order.index(node) + 1) % len(order)]]
        result.append(following[by_node[node].index(rank) % len(following)])
    return result
