"""Who takes part in a switch: the ranks of the new world, and a courier on each node that only the old one uses. Pure.

Endpoints are numbered node by node, those of the new world's nodes first, so a rank of the new world is the endpoint of
its own number.
"""

from __future__ import annotations

from megatron_resilience.topology.epoch import Epoch


def nodes(epoch: Epoch) -> list[str]:
    """Nodes of both worlds, in the order of endpoints."""
    assert epoch.before is not None
    return [*epoch.slots, *(n for n in epoch.before.slots if n not in epoch.slots)]


def places(epoch: Epoch) -> list[int]:
    """By rank of the old world, an endpoint number on the node where its state lies."""
    assert epoch.before is not None
    order, per_node = nodes(epoch), epoch.nproc_per_node
    return [order.index(epoch.giver_of(rank)) * per_node + rank % per_node for rank in range(epoch.before.world_size)]


def couriers(epoch: Epoch) -> dict[str, int]:
    """Endpoint by node that has state to give and owns nothing in the new world."""
    assert epoch.before is not None
    order = nodes(epoch)
    used = {epoch.node_of(rank) for rank in range(epoch.world_size)}
    giving = {epoch.giver_of(rank) for rank in range(epoch.before.world_size)}
    return {node: order.index(node) * epoch.nproc_per_node for node in order if node in giving - used}


def peers(epoch: Epoch) -> list[int]:
    """All endpoints, ascending."""
    return sorted([*range(epoch.world_size), *couriers(epoch).values()])
