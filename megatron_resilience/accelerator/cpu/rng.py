"""CUDA's random stream is the CPU's default generator; the host's is a generator of its own.

On a GPU machine the default CPU generator serves data loading, CUDA's serves dropout and weight
initialisation. Here the default generator must play CUDA's, because CPU operators draw from nothing else.
A DataLoader (they exist on tensor-parallel rank 0 only) would then advance the "device" stream of some
ranks: with dropout, their replicated weights drift apart while two identical runs still agree. So loaders
run under ``data_rng``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from megatron_resilience.accelerator.cpu.patching import Patches

# The state in here is the host stream's while nobody is inside data_rng(). A Generator rather than a
# tensor, so that torch.manual_seed can seed it too.
_host = torch.Generator()
_depth = 0


@contextmanager
def data_rng() -> Iterator[None]:
    """The default generator plays the host's inside; nests. Not for two threads at once."""
    global _depth
    if _depth:
        yield
        return
    device_state = torch.default_generator.get_state()
    torch.default_generator.set_state(_host.get_state())
    _depth = 1
    try:
        yield
    finally:
        _depth = 0
        _host.set_state(torch.default_generator.get_state())
        torch.default_generator.set_state(device_state)


def streams() -> dict[str, torch.Tensor]:
    """States of both streams, uint8 tensors.

    Raises:
        RuntimeError: called inside ``data_rng``, where the two are exchanged.
    """
    _refuse_inside_data_rng()
    return {"device": torch.default_generator.get_state(), "host": _host.get_state()}


def set_streams(states: Mapping[str, torch.Tensor]) -> None:
    """Restores both streams; raises as ``streams``."""
    _refuse_inside_data_rng()
    torch.default_generator.set_state(states["device"])
    _host.set_state(states["host"])


def _refuse_inside_data_rng() -> None:
    if _depth:
        raise RuntimeError("random streams were asked for inside data_rng(); leave that context first")


def _under_data_rng(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        with data_rng():
            return function(*args, **kwargs)

    return wrapper


def _get_rng_state(device: Any = "cuda") -> torch.Tensor:
    return torch.default_generator.get_state()


def _set_rng_state(new_state: torch.Tensor, device: Any = "cuda") -> None:
    torch.default_generator.set_state(new_state)


# torch._dynamo refuses one function under two names, hence the twins.
def _device_manual_seed(seed: int) -> None:
    torch.default_generator.manual_seed(int(seed))


def _device_manual_seed_all(seed: int) -> None:
    torch.default_generator.manual_seed(int(seed))


def _device_initial_seed() -> int:
    return torch.default_generator.initial_seed()


def _manual_seed(seed: int) -> torch.Generator:
    """``torch.manual_seed`` seeds the host's and the device's stream."""
    _host.manual_seed(int(seed))
    return torch.default_generator.manual_seed(int(seed))


def install(patches: Patches) -> None:
    """Maps ``torch.cuda``'s random functions and puts DataLoader iterators under ``data_rng``."""
    for owner in (torch.cuda, torch.cuda.random):
        patches.replace(owner, "get_rng_state", _get_rng_state)
        patches.replace(owner, "set_rng_state", _set_rng_state)
        patches.replace(owner, "get_rng_state_all", lambda: [_get_rng_state()])
        patches.replace(owner, "set_rng_state_all", lambda new_states: _set_rng_state(new_states[0]))
        patches.replace(owner, "manual_seed", _device_manual_seed)
        patches.replace(owner, "manual_seed_all", _device_manual_seed_all)
        patches.replace(owner, "initial_seed", _device_initial_seed)
    torch.cuda.default_generators = (torch.default_generator,)
    for owner in (torch, torch.random):
        patches.replace(owner, "manual_seed", _manual_seed)

    from torch.utils.data import dataloader

    iterator = dataloader._BaseDataLoaderIter
    for name in ("__init__", "_reset", "__next__"):
        setattr(iterator, name, _under_data_rng(getattr(iterator, name)))
