"""A rank's Python stacks, for its agent: written by a signal handler in C, so that a hung rank writes them too."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import faulthandler
import linecache
import os
import signal
import sys
import threading
import time
from types import FrameType

from megatron_resilience.control.hang import is_waiting

SIGNAL = signal.SIGUSR2
_PATIENCE_S = 0.5
_STEP_S = 0.02
_STILL = 5


class StackFile:
    """Unnamed memory that a rank writes its stacks to and its agent reads.

    Attributes:
        fd: to be handed to the rank.
    """

    def __init__(self) -> None:
        self.fd = os.memfd_create("stacks", os.MFD_CLOEXEC)

    async def take(self, pid: int) -> str:
        """The stacks of all threads of a rank, most recent call first; empty when it writes none in half a second.

        A stopped process is continued, or it could not answer: to be used on one that is about to be ended.
        """
        before = self._size()
        with contextlib.suppress(ProcessLookupError):
            _signal_main_thread(pid)
            os.kill(pid, signal.SIGCONT)
        deadline, size, still = time.monotonic() + _PATIENCE_S, before, 0
        while time.monotonic() < deadline and still < _STILL:
            await asyncio.sleep(_STEP_S)
            still = still + 1 if size == self._size() > before else 0
            size = self._size()
        return os.pread(self.fd, size - before, before).decode(errors="replace")

    def close(self) -> None:
        """Gives the memory back."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def _size(self) -> int:
        return os.fstat(self.fd).st_size


def _signal_main_thread(pid: int) -> None:
    """To the main thread itself: when it was stopped it shows where, before it does anything else.

    A signal to the process goes to whichever thread wakes first, and the main thread runs on meanwhile.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    try:
        tgkill = libc.tgkill
    except AttributeError:  # a C library from before 2020
        os.kill(pid, SIGNAL)
        return
    if tgkill(pid, pid, int(SIGNAL)) != 0:
        raise OSError(number := ctypes.get_errno(), os.strerror(number))


def write_on_signal(fd: int) -> None:
    """In a rank: from now on its stacks go to ``fd`` whenever the agent asks."""
    faulthandler.register(SIGNAL, file=fd, all_threads=True)


def main_thread_waits() -> bool:
    """Whether this process's main thread waits for communication or the device (:func:`hang.is_waiting`)."""
    frames = sys._current_frames()
    main = threading.main_thread().ident
    if main is None or main not in frames:
        return False
    if "run_backward(" not in _line(frames[main])[1]:
        return _waits(frames[main])
    # Hooks of a backward pass on a device run on that device's thread.
    return any(_waits(frame) for ident, frame in frames.items() if ident not in (main, threading.get_ident()))


def _waits(frame: FrameType) -> bool:
    # A condition or an event says nothing by itself: it is its user's.
    while frame.f_code.co_filename == threading.__file__ and frame.f_back is not None:
        frame = frame.f_back
    return is_waiting(*_line(frame))


def _line(frame: FrameType) -> tuple[str, str]:
    return frame.f_code.co_filename, linecache.getline(frame.f_code.co_filename, frame.f_lineno)
