"""What the rest of the package asks of a device: CUDA, or the CPU stand-in.

A rank's code never names ``torch.cuda``; it asks the accelerator for a device, for host memory that
copies can reach asynchronously, for a stream off the critical path, and for the raw random streams.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import ClassVar, Protocol

import torch


class CopyEvent(Protocol):
    """Marks a point of the copy stream."""

    def wait(self) -> None:
        """Makes the current compute stream wait for the point; the host goes on."""

    def synchronize(self) -> None:
        """Blocks the host until the point is reached."""

    def query(self) -> bool:
        """True once the point is reached."""


class Accelerator(ABC):
    """One kind of device. Instances hold no tensors; one per process, see ``select``."""

    name: ClassVar[str]
    """``"cuda"`` or ``"cpu"``."""

    distributed_backend: ClassVar[str]
    """Value for Megatron's ``--distributed-backend``: ``"nccl"`` or ``"gloo"``."""

    @abstractmethod
    def install(self) -> None:
        """Prepares this process so that Megatron can train on the device; idempotent.

        Starts no threads and runs no parallel torch operator, so that ranks may be forked afterwards.

        Raises:
            UnsupportedMegatron: the installed Megatron is not a release that the patches know.
        """

    @abstractmethod
    def torch_device(self) -> torch.device:
        """The device that this rank's parameters live on."""

    @abstractmethod
    def synchronize(self) -> None:
        """Blocks the host until all work queued on the device is done."""

    @abstractmethod
    def release_cached(self) -> None:
        """Gives memory that no tensor uses back to the device, for other processes."""

    @abstractmethod
    def pinned_empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised host tensor of ``shape`` that the device can copy into asynchronously."""

    @abstractmethod
    def pin(self, tensor: torch.Tensor) -> None:
        """Page-locks existing host memory in place (a shared-memory segment, say).

        Raises:
            RuntimeError: the driver refused; the memory is usable, but copies to it block.
        """

    @abstractmethod
    def unpin(self, tensor: torch.Tensor) -> None:
        """Undoes ``pin``; must run before the memory is unmapped."""

    @abstractmethod
    def copy_stream(self):
        """Context in which copies are queued off the critical path, ordered after the compute so far.

        Yields nothing. Leaving it does not wait: call ``record_copy_event`` inside, wait on the event.
        """

    @abstractmethod
    def record_copy_event(self) -> CopyEvent:
        """An event after everything queued on the current stream so far."""

    @abstractmethod
    def rng_streams(self) -> dict[str, torch.Tensor]:
        """States of the raw generators, as uint8 tensors on the host, by name.

        ``"device"`` is what dropout and weight initialisation draw from, ``"host"`` what data loading
        draws from. Python's, numpy's and Megatron's tracker's streams are not included.
        """

    @abstractmethod
    def set_rng_streams(self, states: Mapping[str, torch.Tensor]) -> None:
        """Restores what ``rng_streams`` returned.

        Raises:
            ValueError: the names are not exactly those of ``rng_streams``.
        """

    @contextmanager
    def data_rng(self) -> Iterator[None]:
        """Context for whatever on a GPU machine draws from the host generator (loaders, samplers).

        Such code runs on some tensor-parallel ranks only, so it must not touch the device's stream. With
        a real GPU the two are apart by nature, and nothing is done.
        """
        yield

    @staticmethod
    def check_rng_names(states: Mapping[str, torch.Tensor]) -> None:
        """Raises ``ValueError`` unless ``states`` has exactly the streams ``device`` and ``host``."""
        if set(states) != {"device", "host"}:
            raise ValueError(
                f"random streams found: {sorted(states)}; wanted exactly ['device', 'host'] as returned by "
                "rng_streams()"
            )
