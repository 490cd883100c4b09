"""One device, the CPU: ``torch.cuda``'s questions about devices and their memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import psutil
import torch

from megatron_resilience.accelerator.cpu.patching import Patches

# From Blackwell on, Megatron does not insist on CUDA_DEVICE_MAX_CONNECTIONS=1 for tensor parallelism.
_CAPABILITY = (10, 0)


def _returning(value: Any) -> Callable[..., Any]:
    # A function of its own for each name: torch._dynamo refuses one object under two names.
    return lambda *args, **kwargs: value


def _device_properties(device: Any = None) -> SimpleNamespace:
    memory = psutil.virtual_memory().total
    major, minor = _CAPABILITY
    return SimpleNamespace(
        name="cpu", major=major, minor=minor, total_memory=memory, multi_processor_count=1, warp_size=1
    )


def _mem_get_info(device: Any = None) -> tuple[int, int]:
    memory = psutil.virtual_memory()
    return memory.available, memory.total


class DeviceContext:
    """``torch.cuda.device(...)``: there is only one device to be on."""

    def __init__(self, device: Any = None) -> None:
        self.idx = 0
        self.prev_idx = 0

    def __enter__(self) -> None:
        return None

    def __exit__(self, *exception: Any) -> None:
        return None


def install(patches: Patches) -> None:
    """Maps devices, memory statistics and synchronisation of ``torch.cuda``."""
    cuda = torch.cuda
    # Megatron passes the current device to factory functions; a torch.device serves all of them.
    patches.replace(cuda, "current_device", lambda: torch.device("cpu"))
    # Not 0: the count gates Megatron's set-up of model parallelism and of its random streams.
    patches.replace(cuda, "device_count", lambda: 1)
    patches.replace(cuda, "is_available", lambda: False)
    patches.replace(cuda, "is_current_stream_capturing", lambda: False)
    patches.replace(cuda, "get_device_name", lambda device=None: "cpu")
    patches.replace(cuda, "get_device_capability", lambda device=None: _CAPABILITY)
    patches.replace(cuda, "get_device_properties", _device_properties)
    patches.replace(cuda, "device", DeviceContext)
    for name in ("set_device", "synchronize", "empty_cache", "ipc_collect", "init", "_lazy_init"):
        patches.replace(cuda, name, _returning(None))
    for owner in (cuda, cuda.memory):
        patches.replace(owner, "memory_stats", lambda device=None: defaultdict(int))
        patches.replace(owner, "mem_get_info", _mem_get_info)
        patches.replace(owner, "memory_summary", lambda *args, **kwargs: "no device memory: CPU accelerator")
        for name in (
            "memory_allocated",
            "max_memory_allocated",
            "memory_reserved",
            "max_memory_reserved",
        ):
            patches.replace(owner, name, _returning(0))
        for name in ("reset_peak_memory_stats", "reset_accumulated_memory_stats", "empty_cache"):
            patches.replace(owner, name, _returning(None))
    for name in (
        "device_memory_used",
        "memory_usage",
        "utilization",
        "temperature",
        "power_draw",
        "clock_rate",
    ):
        patches.replace_where_present(cuda, name, _returning(0))
