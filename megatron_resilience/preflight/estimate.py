"""Bytes and seconds that protection will take. Pure; figures follow from sizes and links, nothing here is measured.

Device memory is that of the state: parameters, gradients and the optimizer's shard. Activations and what libraries keep come
on top.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_resilience.deadpool.placement import partners
from megatron_resilience.preflight.job import Job
from megatron_resilience.state.segment import Shape
from megatron_resilience.vps.space import StateSpace
from megatron_resilience.vps.state import complete_state
from megatron_resilience.vps.tensors import Kind


@dataclass(frozen=True)
class Estimate:
    """Of the fullest rank or node.

    Attributes:
        rank_bytes: one generation of a rank's state.
        device_bytes: parameters, gradients and optimizer of a rank on its device.
        host_bytes: shared memory of a node: two generations of its ranks and of those that it keeps copies for.
        sent_bytes: copies that a node sends to others, per step.
        copy_seconds: a rank's state from device to host; None without a link's rate.
        send_seconds: ``sent_bytes`` over the node's network; None without its rate. A newcomer's state takes as long.
        keepers: by node, the nodes that keep copies of its ranks.
    """

    rank_bytes: int
    device_bytes: int
    host_bytes: int
    sent_bytes: int
    copy_seconds: float | None
    send_seconds: float | None
    keepers: dict[int, tuple[int, ...]]


def estimate(job: Job) -> Estimate:
    """What a job will take.

    Raises:
        ValueError: the layout cannot carry the model.
        ConfigurationError: there are not enough failure domains for the copies.
    """
    catalogue = complete_state(job.catalogue, [job.layout])
    space = StateSpace(catalogue, job.layout, job.sharded_optimizer).check()
    whole = StateSpace(catalogue, job.layout, sharded_optimizer=False)
    is_parameter = np.array([t.kind is Kind.PARAMETER for t in catalogue.tensors])
    width = np.array([t.bytes_per_element for t in catalogue.tensors])
    rank_bytes = device_bytes = 0
    for rank in _examples(job):
        boxes = space.boxes_of(rank)
        mine = _elements(boxes)
        size = int((mine * width[boxes.tensor]).sum())
        local = whole.boxes_of(rank)
        parameters = int(_elements(local)[is_parameter[local.tensor]].sum())
        # Without mixed precision the optimizer's masters are the parameters themselves.
        masters = 12 if job.parameter_bytes < 4 else 8
        optimizer = int(mine[is_parameter[boxes.tensor]].sum()) * masters
        rank_bytes = max(rank_bytes, size)
        device_bytes = max(device_bytes, parameters * (job.parameter_bytes + job.gradient_bytes) + optimizer)
    chosen = keepers(job)
    nodes = [rank // job.ranks_per_node for rank in range(job.world_size)]
    segments = Counter(nodes)
    sent: Counter[int] = Counter()
    for rank, kept_by in enumerate(chosen):
        sent[nodes[rank]] += len(kept_by)
        segments.update(nodes[keeper] for keeper in kept_by)
    sent_bytes = max(sent.values(), default=0) * rank_bytes
    network, link = job.hardware.network_gbytes_s, job.hardware.host_link_gbytes_s
    by_node: dict[int, tuple[int, ...]] = {}
    for node in range(job.nodes):
        mine_ranks = range(node * job.ranks_per_node, (node + 1) * job.ranks_per_node)
        by_node[node] = tuple(sorted({nodes[keeper] for rank in mine_ranks for keeper in chosen[rank]}))
    return Estimate(
        rank_bytes,
        device_bytes,
        max(segments.values()) * Shape(rank_bytes, b"").segment_bytes,
        sent_bytes,
        None if link is None else rank_bytes / (link * 1e9),
        None if network is None else sent_bytes / (network * 1e9),
        by_node,
    )


def keepers(job: Job) -> Sequence[tuple[int, ...]]:
    """The ranks that keep each rank's copies.

    Raises:
        ConfigurationError: there are not enough failure domains.
    """
    nodes = [f"node {rank // job.ranks_per_node}" for rank in range(job.world_size)]
    domains = [job.domains[rank // job.ranks_per_node] for rank in range(job.world_size)] if job.domains else nodes
    return partners(nodes, domains, _dp_groups(job), job.deadpool.replicas)


def _dp_groups(job: Job) -> list[list[int]]:
    grid = job.layout.dense
    shards = np.arange(grid.shards)
    zero = np.zeros_like(shards)
    return [
        [int(rank) for rank in grid.ranks(zero + tp, zero, shards, zero + pp)]
        for pp in range(job.layout.pp)
        for tp in range(grid.tp)
    ]


def _examples(job: Job) -> list[int]:
    """Ranks among which the fullest is: of each stage the first and the last shard."""
    grid = job.layout.dense
    shards = np.array([0, grid.shards - 1])
    zero = np.zeros_like(shards)
    return sorted({int(r) for pp in range(job.layout.pp) for r in grid.ranks(zero, zero, shards, zero + pp)})


def _elements(boxes: object) -> np.ndarray:
    sides = ((getattr(boxes, f"{axis}1") - getattr(boxes, f"{axis}0")) for axis in "oci")
    first, second, third = sides
    return first * second * third
