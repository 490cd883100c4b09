"""Which device this process trains on.

``select("auto")`` is CUDA wherever torch sees a GPU, and the CPU stand-in elsewhere. The environment
variable ``MEGATRON_RESILIENCE_ACCELERATOR`` (``auto``, ``cpu``, ``cuda``, ``none``) is what
``install_from_environment`` obeys; ``none`` leaves the process alone.
"""

from __future__ import annotations

import os

from megatron_resilience.accelerator.base import Accelerator, CopyEvent

ENVIRONMENT_VARIABLE = "MEGATRON_RESILIENCE_ACCELERATOR"
CHOICES = ("auto", "cpu", "cuda")

_selected: dict[str, Accelerator] = {}


def select(name: str = "auto") -> Accelerator:
    """The process's accelerator of that name; the same object at every call. Installs nothing.

    Args:
        name: ``"cuda"``, ``"cpu"``, or ``"auto"``: CUDA if torch sees a GPU, else the CPU.

    Raises:
        ValueError: another name.
        RuntimeError: ``"cuda"`` where torch sees no GPU, or after the CPU stand-in was installed.
    """
    import torch

    if name not in CHOICES:
        raise ValueError(f"accelerator {name!r} is unknown; use one of {', '.join(CHOICES)}")
    if name == "auto":
        # Where the CPU stand-in is installed, torch.cuda.is_available() already answers False.
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise RuntimeError("accelerator 'cuda' was asked for, but torch sees no GPU; use 'cpu' or 'auto'")
    if name not in _selected:
        if name == "cuda":
            from megatron_resilience.accelerator.cuda import CudaAccelerator

            _selected[name] = CudaAccelerator()
        else:
            from megatron_resilience.accelerator.cpu import CpuAccelerator

            _selected[name] = CpuAccelerator()
    return _selected[name]


def install_from_environment() -> Accelerator | None:
    """Selects and installs what ``MEGATRON_RESILIENCE_ACCELERATOR`` says (default ``auto``).

    Returns:
        the installed accelerator, or None where the variable says ``none``.

    Raises:
        ValueError, RuntimeError: as ``select``.
    """
    choice = os.environ.get(ENVIRONMENT_VARIABLE, "auto")
    if choice == "none":
        return None
    if choice not in CHOICES:
        raise ValueError(f"{ENVIRONMENT_VARIABLE}={choice!r} is unknown; use auto, cpu, cuda or none")
    accelerator = select(choice)
    accelerator.install()
    return accelerator


__all__ = ["ENVIRONMENT_VARIABLE", "Accelerator", "CopyEvent", "install_from_environment", "select"]
