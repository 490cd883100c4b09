"""The cost model: link classes, and the time a schedule takes on a cluster."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path

import yaml

from megatron_resilience.routing.schedule import LIST_UP_TO, Round, list_rounds, sum_rounds, xor_rounds


@dataclass(frozen=True)
class Cluster:
    """Links between ranks.

    Attributes:
        ranks_per_node: ranks are numbered node by node.
        node_bandwidth, network_bandwidth: bytes per second, per rank and direction, within and between nodes.
        node_latency, network_latency: seconds per exchange.
    """

    ranks_per_node: int = 8
    node_bandwidth: float = 200e9
    network_bandwidth: float = 20e9
    node_latency: float = 10e-6
    network_latency: float = 30e-6

    def seconds(self, a: int, b: int, size: float, exchanges: int = 1) -> float:
        """Time of an exchange of ``size`` bytes between endpoints ``a`` and ``b`` (both ways at once)."""
        if a // self.ranks_per_node == b // self.ranks_per_node:
            return exchanges * self.node_latency + size / self.node_bandwidth
        return exchanges * self.network_latency + size / self.network_bandwidth


def load_cluster(path: str) -> Cluster:
    """Read a cluster from YAML or JSON.

    Raises:
        ValueError: an unknown field, naming the known ones.
    """
    data = yaml.safe_load(Path(path).read_text()) or {}
    known = {f.name for f in fields(Cluster)}
    if set(data) - known:
        raise ValueError(f"{path}: unknown fields {sorted(set(data) - known)}; known: {sorted(known)}")
    return Cluster(**data)


Traffic = Mapping[tuple[int, int], int]
"""Bytes by (source endpoint, destination endpoint)."""


Messages = Mapping[tuple[int, int, int], int]
"""Bytes by (phase, source endpoint, destination endpoint)."""


def schedule_seconds(messages: Messages, cluster: Cluster, rounds: Round, chunk: int) -> float:
    """Time until the last endpoint is done; a pair starts when both have done their earlier phases and rounds."""
    pairs: dict[tuple[int, int, int], int] = {}
    for (phase, a, b), size in messages.items():
        pair = (phase, min(a, b), max(a, b))
        pairs[pair] = max(pairs.get(pair, 0), size)
    free: dict[int, float] = {}
    for (_, a, b), size in sorted(pairs.items(), key=lambda item: (item[0][0], rounds(*item[0][1:]), item[0])):
        start = max(free.get(a, 0.0), free.get(b, 0.0))
        free[a] = free[b] = start + cluster.seconds(a, b, size, -(-size // chunk))
    return max(free.values(), default=0.0)


def bound_seconds(traffic: Traffic, cluster: Cluster) -> float:
    """No schedule is faster: the busiest endpoint's bytes, one way, over its links in turn."""
    out: dict[int, float] = {}
    back: dict[int, float] = {}
    for (a, b), size in traffic.items():
        seconds = cluster.seconds(a, b, size, 0)
        out[a] = out.get(a, 0.0) + seconds
        back[b] = back.get(b, 0.0) + seconds
    return max([*out.values(), *back.values()], default=0.0)


def compare_schedules(messages: Messages, cluster: Cluster, endpoints: int, chunk: int) -> dict[str, float]:
    """Predicted seconds of every schedule, the fastest first; `usable` says which of them ranks can follow."""
    traffic: dict[tuple[int, int], int] = {}
    for (_, a, b), size in messages.items():
        traffic[a, b] = traffic.get((a, b), 0) + size
    candidates = {"xor": xor_rounds(endpoints), "sum": sum_rounds(endpoints), "list": list_rounds(traffic)}
    times = {name: schedule_seconds(messages, cluster, rounds, chunk) for name, rounds in candidates.items()}
    return dict(sorted(times.items(), key=lambda item: (item[1], item[0])))


def usable(schedule: str, endpoints: int) -> bool:
    """Whether every rank can work out ``schedule`` by itself quickly enough (`schedule.list_rounds`)."""
    return schedule != "list" or endpoints <= LIST_UP_TO
