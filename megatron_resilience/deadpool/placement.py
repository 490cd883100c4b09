"""Who keeps a copy of whose state. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from megatron_resilience.errors import ConfigurationError


def partners(
    nodes: Sequence[str], domains: Sequence[str], dp_groups: Sequence[Sequence[int]], replicas: int = 1
) -> list[tuple[int, ...]]:
    """The ranks that keep each rank's copies: its own failure domain and theirs are all different.

    Along the data-parallel ring where it leaves the domain for every rank (DeadPool's choice); where it does not
    (DP = 1, or DP within a domain), the same place on another node. Balanced: where domains have equally many nodes
    with equally many ranks and a rotation of the nodes exists, every rank keeps exactly ``replicas`` copies.

    Args:
        nodes: node of each rank, by global rank.
        domains: failure domain of each rank: its node, or what its node shares with others (a rack).
        dp_groups: data-parallel groups as global ranks, in ring order; each rank is in exactly one.
        replicas: copies of each rank's state, 0 or more.

    Returns:
        ``replicas`` keepers for each rank, in order of preference.

    Raises:
        ConfigurationError: there are not enough domains.
    """
    _check(nodes, domains, replicas)
    chosen: list[tuple[int, ...]] = [() for _ in nodes]

    def allowed(rank: int, keeper: int) -> bool:
        return domains[keeper] not in {domains[rank], *(domains[k] for k in chosen[rank])}

    for _ in range(replicas):
        step = _along_rings(dp_groups, allowed) or _rotated(nodes, domains, allowed)
        step = step or _least_loaded(nodes, domains, chosen, allowed)
        chosen = [(*kept, step[rank]) for rank, kept in enumerate(chosen)]
    return chosen


def _check(nodes: Sequence[str], domains: Sequence[str], replicas: int) -> None:
    found = len(set(domains))
    if found > replicas:
        return
    if len(set(nodes)) > replicas:
        raise ConfigurationError(
            f"--deadpool-replicas {replicas} needs nodes in {replicas + 1} failure domains, but those that train are in "
            f"{found}: see --failure-domains"
        )
    text = "a copy of every rank's state" if replicas == 1 else f"{replicas} copies of every rank's state"
    raise ConfigurationError(
        f"--deadpool keeps {text} on other nodes, but the job has ranks on {found} only: "
        f"use at least {replicas + 1} nodes besides the spares, or --deadpool-replicas {found - 1}"
        + (" to survive rank deaths only" if found == 1 else "")
    )


def _along_rings(dp_groups: Sequence[Sequence[int]], allowed: Callable[[int, int], bool]) -> list[int] | None:
    ring: dict[int, int] = {}
    for group in dp_groups:
        for index, rank in enumerate(group):
            away = next((p for p in [*group[index + 1 :], *group[:index]] if allowed(rank, p)), None)
            if away is None:
                return None
            ring[rank] = away
    return [ring[rank] for rank in range(len(ring))] if len(set(ring.values())) == len(ring) else None


def _rotated(nodes: Sequence[str], domains: Sequence[str], allowed: Callable[[int, int], bool]) -> list[int] | None:
    """The same place on the node so many further, domain after domain; the first distance that is allowed for all."""
    by_node = _ranks_by_node(nodes, domains)
    largest = max(Counter(domains[ranks[0]] for ranks in by_node).values())
    count = len(by_node)
    if len({len(ranks) for ranks in by_node}) > 1:
        return None
    for distance in [*range(largest, count), *range(1, largest)]:
        pairs = [
            pair for i, ranks in enumerate(by_node) for pair in zip(ranks, by_node[(i + distance) % count], strict=True)
        ]
        if all(allowed(rank, keeper) for rank, keeper in pairs):
            return [keeper for _, keeper in sorted(pairs)]
    return None


def _least_loaded(
    nodes: Sequence[str],
    domains: Sequence[str],
    chosen: Sequence[tuple[int, ...]],
    allowed: Callable[[int, int], bool],
) -> list[int]:
    load = Counter(keeper for kept in chosen for keeper in kept)
    crowd = Counter(domains)
    result = {}
    # Ranks with the fewest places to go choose first.
    for rank in sorted(range(len(nodes)), key=lambda r: (-crowd[domains[r]], r)):
        keeper = min(
            (k for k in range(len(nodes)) if allowed(rank, k)), key=lambda k: (load[k], (k - rank) % len(nodes))
        )
        load[keeper] += 1
        result[rank] = keeper
    return [result[rank] for rank in range(len(nodes))]


def _ranks_by_node(nodes: Sequence[str], domains: Sequence[str]) -> list[list[int]]:
    order = {domain: i for i, domain in enumerate(dict.fromkeys(domains))}
    ranks: dict[str, list[int]] = {}
    for rank, node in enumerate(nodes):
        ranks.setdefault(node, []).append(rank)
    return sorted(ranks.values(), key=lambda members: (order[domains[members[0]]], members[0]))
