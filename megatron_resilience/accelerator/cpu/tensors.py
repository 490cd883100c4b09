"""Tensors asked for on a GPU are made on the CPU, and say of themselves that they are on a GPU."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch

from megatron_resilience.accelerator.cpu.patching import Patches

_FACTORIES = (
    "arange",
    "as_tensor",
    "asarray",
    "empty",
    "empty_like",
    "empty_strided",
    "eye",
    "full",
    "full_like",
    "linspace",
    "logspace",
    "normal",
    "ones",
    "ones_like",
    "rand",
    "rand_like",
    "randint",
    "randint_like",
    "randn",
    "randn_like",
    "randperm",
    "scalar_tensor",
    "tensor",
    "tril_indices",
    "triu_indices",
    "zeros",
    "zeros_like",
)
_METHOD_FACTORIES = ("new_empty", "new_full", "new_ones", "new_tensor", "new_zeros")


def map_device(device: Any) -> Any:
    """The CPU for whatever means a GPU (``"cuda..."``, an index, a CUDA device); the rest unchanged."""
    if isinstance(device, torch.device):
        return torch.device("cpu") if device.type == "cuda" else device
    if isinstance(device, str):
        return "cpu" if device.startswith("cuda") else device
    if isinstance(device, int) and not isinstance(device, bool):
        return "cpu"
    return device


def _factory(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs:
            kwargs["device"] = map_device(kwargs["device"])
        # Page-locking needs a driver.
        kwargs.pop("pin_memory", None)
        return original(*args, **kwargs)

    return wrapper


def _to(original: Callable[..., Any]) -> Callable[..., Any]:
    """For ``Tensor.to`` and ``Module.to``, whose first positional argument may be a device."""

    @functools.wraps(original)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        if args:
            args = (map_device(args[0]), *args[1:])
        if "device" in kwargs:
            kwargs["device"] = map_device(kwargs["device"])
        return original(self, *args, **kwargs)

    return wrapper


def _type(original: Callable[..., Any]) -> Callable[..., Any]:
    """``Tensor.type()``: Megatron's optimizers sort parameters by strings like torch.cuda.FloatTensor."""

    @functools.wraps(original)
    def wrapper(self: Any, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if dtype is None:
            return original(self).replace("torch.", "torch.cuda.", 1)
        if isinstance(dtype, str):
            dtype = dtype.replace("torch.cuda.", "torch.", 1)
        return original(self, dtype, *args, **kwargs)

    return wrapper


def install(patches: Patches) -> None:
    """Maps factory functions, moves between devices, type strings and page-locking."""
    for name in _FACTORIES:
        patches.replace(torch, name, _factory(getattr(torch, name)))
    for name in _METHOD_FACTORIES:
        patches.replace(torch.Tensor, name, _factory(getattr(torch.Tensor, name)))
    patches.replace(torch.Tensor, "to", _to(torch.Tensor.to))
    patches.replace(torch.Tensor, "cuda", lambda self, *args, **kwargs: self)
    patches.replace(torch.Tensor, "type", _type(torch.Tensor.type))
    patches.replace(torch.Tensor, "pin_memory", lambda self, *args, **kwargs: self)
    patches.replace(torch.nn.Module, "to", _to(torch.nn.Module.to))
    patches.replace(torch.nn.Module, "cuda", lambda self, *args, **kwargs: self)
    # Megatron's loaders always ask for pinned batches.
    warnings.filterwarnings("ignore", message="'pin_memory' argument is set as true but no accelerator")
