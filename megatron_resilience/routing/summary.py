"""The whole of a change in figures, for a person who decides: traffic, stages, memory, predicted pause."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from megatron_resilience.routing.cost import Cluster, bound_seconds, compare_schedules, usable
from megatron_resilience.routing.plan import plan_endpoint
from megatron_resilience.routing.problem import Problem
from megatron_resilience.routing.schedule import LIST_UP_TO
from megatron_resilience.routing.staging import Budget, exchange_count


@dataclass(frozen=True)
class Summary:
    """What a change of layout moves and costs.

    Attributes:
        endpoints: endpoints that take part.
        kept_bytes, node_bytes, network_bytes: state that stays, and that crosses each class of link.
        exchanges: most exchanges (stages) of any endpoint.
        seconds: predicted seconds by schedule, fastest first.
        bound_seconds: no schedule can be faster.
        traffic: bytes by (source, destination).
    """

    endpoints: int
    kept_bytes: int
    node_bytes: int
    network_bytes: int
    exchanges: int
    seconds: dict[str, float]
    bound_seconds: float
    budget: Budget
    traffic: dict[tuple[int, int], int] = field(repr=False)

    @property
    def schedule(self) -> str:
        """Name of the schedule predicted to be fastest, of those that ranks can follow."""
        return next(name for name in self.seconds if usable(name, self.endpoints))

    def to_json(self) -> dict[str, Any]:
        """All figures but the traffic matrix."""
        out = {k: v for k, v in vars(self).items() if k not in ("traffic", "budget")}
        return out | {
            "schedule": self.schedule,
            "peak_bytes": self.budget.peak,
            "chunk_bytes": self.budget.chunk,
            "old_state": "device" if self.budget.old_on_device else "host snapshot",
        }


def summarise(problem: Problem, budget: Budget, cluster: Cluster) -> Summary:
    """Plan every endpoint and add up; exact, not sampled.

    Raises:
        ValueError: the sources do not hold everything.
    """
    problem.check_covered()
    traffic: dict[tuple[int, int], int] = {}
    messages: dict[tuple[int, int, int], int] = {}
    kept = exchanges = 0
    sources = problem.source_at[problem.source_at >= 0]
    endpoints = np.unique(np.concatenate([sources, problem.target_at])).tolist()
    for endpoint in endpoints:
        plan = plan_endpoint(problem, endpoint)
        kept += plan.keeps.total_bytes
        exchanges = max(exchanges, exchange_count(plan, budget.chunk))
        for (phase, peer), size in plan.receives.per_message().items():
            messages[phase, peer, endpoint] = size
            traffic[peer, endpoint] = traffic.get((peer, endpoint), 0) + size
    node = sum(s for (a, b), s in traffic.items() if a // cluster.ranks_per_node == b // cluster.ranks_per_node)
    network = sum(traffic.values()) - node
    seconds = compare_schedules(messages, cluster, max(endpoints) + 1, budget.chunk)
    bound = bound_seconds(traffic, cluster)
    return Summary(len(endpoints), kept, node, network, exchanges, seconds, bound, budget, traffic)


def render(summary: Summary) -> str:
    """The summary as lines of text."""
    gib = 2.0**30
    budget = summary.budget
    where = "on the device until commit" if budget.old_on_device else "in host snapshots until commit"
    lines = [
        f"endpoints          {summary.endpoints}",
        f"stays in place     {summary.kept_bytes / gib:10.2f} GiB",
        f"within nodes       {summary.node_bytes / gib:10.2f} GiB",
        f"between nodes      {summary.network_bytes / gib:10.2f} GiB",
        f"stages             {summary.exchanges} exchanges of at most {budget.chunk / 2**20:.0f} MiB, busiest rank",
        f"old state          waits {where} ({budget.old / gib:.2f} GiB at the largest rank)",
        f"peak memory        {budget.peak / gib:10.2f} GiB of {budget.limit / gib:.2f} GiB per rank",
    ]
    for name, seconds in summary.seconds.items():
        chosen = "  <- chosen, the fastest predicted" if name == summary.schedule else ""
        if not usable(name, summary.endpoints):
            chosen = f"  (not used above {LIST_UP_TO} endpoints: each rank would have to plan all of them)"
        lines.append(f"transfer by {name:<6} {seconds:10.3f} s{chosen}")
    lines.append(f"lower bound        {summary.bound_seconds:10.3f} s (busiest rank's links)")
    return "\n".join(lines)


def draw_traffic(summary: Summary, path: str, title: str) -> None:
    """Write a picture of the traffic matrix, sources down and destinations across (needs matplotlib).

    Above 512 endpoints neighbouring ones share a cell, which then shows their sum.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.colors import LogNorm

    size = max(max(pair) for pair in summary.traffic) + 1 if summary.traffic else 1
    step = -(-size // 512)
    matrix = np.zeros((-(-size // step), -(-size // step)))
    for (a, b), moved in summary.traffic.items():
        matrix[a // step, b // step] += moved / 2**20
    figure, axes = pyplot.subplots(figsize=(7, 6))
    norm = LogNorm() if summary.traffic else None
    image = axes.imshow(np.ma.masked_equal(matrix, 0), norm=norm, cmap="viridis", interpolation="nearest")
    unit = f" (cells of {step} ranks)" if step > 1 else ""
    axes.set(xlabel=f"receiving rank{unit}", ylabel=f"sending rank{unit}", title=title)
    figure.colorbar(image, label="MiB")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
