"""What this machine is like, as far as it says; nothing is imported that takes long."""

from __future__ import annotations

import resource
from importlib import metadata
from pathlib import Path

from megatron_resilience.preflight.rules import Machine
from megatron_resilience.state.memory import available_bytes


def look() -> Machine:
    """This machine, and what is installed."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return Machine(
        open_files=None if files == resource.RLIM_INFINITY else files,
        locked_memory_bytes=None if locked == resource.RLIM_INFINITY else locked,
        host_memory_bytes=available_bytes(),
        torch=_version("torch"),
        nccl=_version("nvidia-nccl-cu13") or _version("nvidia-nccl-cu12"),
        driver=_driver(),
    )


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _driver() -> str | None:
    try:
        first = Path("/proc/driver/nvidia/version").read_text().splitlines()[0].split()
    except (OSError, IndexError):
        return None
    return next((word for word in first if word[0].isdigit() and "." in word), None)
