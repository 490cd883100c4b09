"""Streams and events of a device that does everything at once, in order."""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import Any

import torch

from megatron_resilience.accelerator.cpu.patching import Patches


class Event:
    """``torch.cuda.Event``: reached when it is recorded; measures wall-clock time."""

    def __init__(self, enable_timing: bool = False, *args: Any, **kwargs: Any) -> None:
        self._seconds = 0.0

    def record(self, stream: Any = None) -> None:
        self._seconds = time.perf_counter()

    def wait(self, stream: Any = None) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True

    def elapsed_time(self, end_event: Event) -> float:
        """Milliseconds from this event to ``end_event``."""
        return (end_event._seconds - self._seconds) * 1e3


class Stream:
    """``torch.cuda.Stream``: work on it is done by the time it is issued."""

    cuda_stream = 0

    def __init__(self, device: Any = None, priority: int = 0, **kwargs: Any) -> None:
        self.device = torch.device("cpu")
        self.priority = priority

    @staticmethod
    def priority_range() -> tuple[int, int]:
        """Lowest and highest priority."""
        return 0, 0

    def wait_stream(self, stream: Any) -> None:
        pass

    def wait_event(self, event: Any) -> None:
        pass

    def record_event(self, event: Event | None = None) -> Event:
        event = Event() if event is None else event
        event.record(self)
        return event

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *exception: Any) -> None:
        return None


class ExternalStream(Stream):
    """``torch.cuda.ExternalStream``; exists for ``isinstance`` and annotations."""


class StreamContext:
    """``torch.cuda.stream(...)``."""

    def __init__(self, stream: Any = None) -> None:
        self.stream = stream

    def __enter__(self) -> None:
        return None

    def __exit__(self, *exception: Any) -> None:
        return None


_DEFAULT_STREAM = Stream()


@contextmanager
def _nvtx_range(message: str, *args: Any, **kwargs: Any):
    yield


def install(patches: Patches) -> None:
    """Maps streams, events and profiler ranges of ``torch.cuda``, and ``Tensor.record_stream``."""
    cuda = torch.cuda
    for owner in (cuda, cuda.streams):
        patches.replace(owner, "Stream", Stream)
        patches.replace(owner, "Event", Event)
        patches.replace(owner, "ExternalStream", ExternalStream)
    patches.replace(cuda, "StreamContext", StreamContext)
    patches.replace(cuda, "stream", lambda stream: StreamContext(stream))
    patches.replace(cuda, "current_stream", lambda device=None: _DEFAULT_STREAM)
    patches.replace(cuda, "default_stream", lambda device=None: _DEFAULT_STREAM)
    patches.replace(cuda, "set_stream", lambda stream: None)
    patches.replace(torch.Tensor, "record_stream", lambda self, stream: None)
    patches.replace(cuda.nvtx, "range_push", lambda message: 0)
    patches.replace(cuda.nvtx, "range_pop", lambda: 0)
    patches.replace(cuda.nvtx, "mark", lambda message: None)
    patches.replace(cuda.nvtx, "range", _nvtx_range)
