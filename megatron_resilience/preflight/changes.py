"""What changes of layout will take: while one is under way, both layouts' state is there. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, replace

from megatron_resilience.preflight.estimate import estimate
from megatron_resilience.preflight.job import GIB, Job
from megatron_resilience.preflight.rules import Finding
from megatron_resilience.vps.layout import Layout

KEPT = GIB // 2
"""Bytes that a process of a kept world takes: of host memory (measured with the tests' models), and for its context on a
device (some hundred MiB, by NVIDIA's documents; not measured)."""


@dataclass(frozen=True)
class Change:
    """From one layout to the next.

    Attributes:
        before, after: the layouts.
        nodes: that the larger of them trains on.
        device_bytes: both layouts' parameters, gradients and optimizer on a device; with ``--hotswap-exclusive-memory`` the
            larger ones alone. Contexts of processes of worlds that were kept before come on top.
        host_bytes: of a node, for the generations and copies of both, and for processes of kept worlds.
    """

    before: Layout
    after: Layout
    nodes: int
    device_bytes: int
    host_bytes: int


def changes(job: Job) -> list[Change]:
    """The changes of ``job.changes``, one after the other, beginning with ``job.layout``.

    Raises:
        ValueError: a layout cannot carry the model.
        ConfigurationError: a layout has too few failure domains for the copies.
    """
    found = []
    waiting: list[Layout] = []
    for before, after in itertools.pairwise([job.layout, *job.changes]):
        others = [layout for layout in waiting if layout != after]
        waiting = [*others, before][-job.keep_worlds :] if job.keep_worlds else []
        kept = KEPT * len(others)
        jobs = [_under(job, layout) for layout in (before, after)]
        taken = [estimate(part) for part in jobs]
        device = [part.device_bytes for part in taken]
        found.append(
            Change(
                before,
                after,
                max(part.nodes for part in jobs),
                (max(device) if job.exclusive_memory else sum(device)) + kept,
                sum(part.host_bytes for part in taken) + kept * job.ranks_per_node,
            )
        )
    return found


def change_rules(job: Job, planned: Iterable[Change]) -> list[Finding]:
    """What is refused of them."""
    found = []
    for change in planned:
        which = f"the change from {change.before} to {change.after}"
        device, host = job.hardware.device_memory_gib, job.hardware.host_memory_gib
        if change.nodes > job.nodes + job.spares:
            found.append(
                f"{which} takes {change.nodes} nodes, {job.nodes} train and {job.spares} wait: more --nnodes and --spares, or "
                "start agents on further nodes before it is due"
            )
        if device is not None and change.device_bytes > device * GIB:
            remedy = "more TP, PP or nodes" if job.exclusive_memory else "--hotswap-exclusive-memory lets one wait"
            remedy += f", or a smaller --hotswap-keep-worlds ({job.keep_worlds} now)" if job.keep_worlds else ""
            found.append(
                f"{which} takes {change.device_bytes / GIB:.1f} GiB of device memory for parameters, gradients and "
                f"optimizer, of {device:g}: {remedy}"
            )
        if host is not None and change.host_bytes > host * GIB:
            found.append(
                f"{which} takes {change.host_bytes / GIB:.1f} GiB of host memory per node for the copies of both layouts, of "
                f"{host:g}: fewer --deadpool-replicas ({job.deadpool.replicas} now) or --hotswap-keep-worlds "
                f"({job.keep_worlds} now), or more nodes"
            )
    return [Finding(True, text) for text in found]


def _under(job: Job, layout: Layout) -> Job:
    nodes = -(-layout.world // job.ranks_per_node)
    # Racks of nodes that wait are not known.
    domains = job.domains if nodes == job.nodes else ()
    return replace(job, layout=layout, nodes=nodes, domains=domains)
