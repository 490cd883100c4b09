"""A CPU that unmodified Megatron takes for its GPU, with gloo for NCCL.

It is a real backend: the same numbers of processes, the same collectives, the same training loop. What
it changes is listed by the files of this folder, each named after what it maps.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from megatron_resilience.accelerator.base import Accelerator, CopyEvent
from megatron_resilience.accelerator.cpu import collectives, devices, megatron, rng, streams, tensors
from megatron_resilience.accelerator.cpu.patching import Patches


class CpuAccelerator(Accelerator):
    """The host's processor. Copies are synchronous, so that every event is reached when it is made."""

    name = "cpu"
    distributed_backend = "gloo"

    def __init__(self) -> None:
        self._patches = Patches()
        self._installed = False

    def install(self) -> None:
        if self._installed:
            return
        # Megatron refuses an unknown release before anything is patched.
        megatron.check_version()
        _disable_compilation()
        for part in (devices, streams, rng, tensors, collectives):
            part.install(self._patches)
        megatron.install(self._patches)
        # Modules that were imported earlier and did `from torch.x import y` hold the originals.
        self._patches.sweep("megatron.")
        self._installed = True

    def torch_device(self) -> torch.device:
        return torch.device("cpu")

    def synchronize(self) -> None:
        """Nothing is ever queued."""

    def release_cached(self) -> None:
        """Memory that is freed is the system's at once."""

    def pinned_empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(tuple(shape), dtype=dtype)

    def pin(self, tensor: torch.Tensor) -> None:
        """Host memory is the device's memory."""

    def unpin(self, tensor: torch.Tensor) -> None:
        """See ``pin``."""

    @contextmanager
    def copy_stream(self) -> Iterator[None]:
        yield

    def record_copy_event(self) -> CopyEvent:
        return _Reached()

    def rng_streams(self) -> dict[str, torch.Tensor]:
        return rng.streams()

    def set_rng_streams(self, states: Mapping[str, torch.Tensor]) -> None:
        self.check_rng_names(states)
        rng.set_streams(states)

    @contextmanager
    def data_rng(self) -> Iterator[None]:
        with rng.data_rng():
            yield


class _Reached:
    """The event of a copy that was finished when it returned."""

    def wait(self) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True


def _disable_compilation() -> None:
    # Megatron's fused kernels go through torch.compile, which on a CPU needs a C++ compiler and half a
    # minute in every process. Whoever sets TORCH_COMPILE_DISABLE=0 gets it (and slightly different bits).
    if os.environ.setdefault("TORCH_COMPILE_DISABLE", "1") == "1":
        import torch._dynamo.config

        torch._dynamo.config.disable = True
