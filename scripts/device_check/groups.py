"""Process groups of one rank, aborted and made again beneath a ProcessGroup that stays, as in every recovery."""

from __future__ import annotations

import os
import threading
import time

import torch
import torch.distributed as dist

from megatron_resilience.accelerator import Accelerator
from megatron_resilience.topology.groups import GroupSwitch, live_handles
from megatron_resilience.transport.base import Fabric
from megatron_resilience.transport.environment import ENVIRONMENT
from megatron_resilience.transport.gloo import GlooFabric
from scripts.device_check.report import Check

_GROUPS, _EPOCHS, _TIMEOUT_S = 8, 12, 60.0
_MAX_GROWTH_MIB = 64


def check(device: Accelerator) -> list[Check]:
    """All of this module."""
    os.environ.update(ENVIRONMENT)
    store = dist.HashStore()
    dist.init_process_group(device.distributed_backend, store=dist.PrefixStore("0", store), rank=0, world_size=1)
    groups = [dist.new_group([0], group_desc=f"G{i}") for i in range(_GROUPS)]
    switch, builds, aborts, wrong, used = GroupSwitch(), [], [], 0, []
    for epoch in range(1, _EPOCHS + 1):
        fabric = _fabric(device, dist.PrefixStore(str(epoch), store))
        started = time.perf_counter()
        switch.install(switch.build(live_handles(), {device.torch_device().type: fabric}))
        fabric.built()
        wrong += sum(not _adds(device, group, epoch) for group in groups)
        device.synchronize()
        builds.append(time.perf_counter() - started)
        started = time.perf_counter()
        fabric.abort()
        _wait_for_aborts()
        aborts.append(time.perf_counter() - started)
        fabric.bury()
        used.append(_device_bytes(device))
    growth = (used[-1] - used[1]) / (len(used) - 2) / 2**20
    count = f"{_GROUPS + 1} groups"
    return [
        Check("groups", f"{count} made, {_GROUPS} sums", f"{1000 * sorted(builds)[len(builds) // 2]:.1f} ms, median"),
        Check("groups", f"{count} aborted", f"{1000 * sorted(aborts)[len(aborts) // 2]:.1f} ms, median"),
        Check("groups", f"wrong sums in {_EPOCHS} epochs", str(wrong), "0", wrong == 0),
        Check(
            "groups",
            "device memory that an epoch leaves",
            f"{growth:.1f} MiB",
            f"<= {_MAX_GROWTH_MIB} MiB",
            growth <= _MAX_GROWTH_MIB if device.name == "cuda" else None,
        ),
    ]


def _fabric(device: Accelerator, store: dist.Store) -> Fabric:
    if device.name == "cuda":
        from megatron_resilience.transport.nccl import NcclFabric

        return NcclFabric(store, 0, _TIMEOUT_S)
    return GlooFabric(store, 0, "127.0.0.1", _TIMEOUT_S)


def _adds(device: Accelerator, group: dist.ProcessGroup, value: int) -> bool:
    tensor = torch.full((1024,), float(value), device=device.torch_device())
    dist.all_reduce(tensor, group=group)
    return bool((tensor == value).all())


def _wait_for_aborts() -> None:
    """NCCL's fabric aborts on threads, gloo's by closing sockets."""
    for thread in threading.enumerate():
        if thread is not threading.main_thread() and "abort" in thread.name:
            thread.join(_TIMEOUT_S)


def _device_bytes(device: Accelerator) -> int:
    if device.name != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info()
    return total - free
