"""A rank's Python stacks, for its agent: written by a signal handler in C, so that a hung rank writes them too."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import faulthandler
import functools
import linecache
import os
import re
import signal
import threading
import time

from megatron_resilience.control.hang import is_waiting

SIGNAL = signal.SIGUSR2
_PATIENCE_S = 0.5
_STEP_S = 0.02
_STILL = 5
_THREAD = re.compile(r"(?:Current thread|Thread) 0x([0-9a-f]+)")
_FRAME = re.compile(r'  File "(.*)", line (\d+) in ')


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
    """Whether this process's main thread waits for communication or the device (:func:`hang.is_waiting`).

    Reads the stacks as text. A reference to a frame that runs (``sys._current_frames``) would keep its locals alive beyond its
    end, and let them end on the thread that asks: on a loaded machine gradients of a bf16 VPP model came out wrong that way.
    """
    stacks = _stacks()
    main = threading.main_thread().ident
    if main is None or not stacks.get(main):
        return False
    if "run_backward(" not in linecache.getline(*stacks[main][0]):
        return _waits(stacks[main])
    # Hooks of a backward pass on a device run on that device's thread.
    return any(_waits(stack) for ident, stack in stacks.items() if ident not in (main, threading.get_ident()))


def _stacks() -> dict[int, list[tuple[str, int]]]:
    """``(file, line)`` of the frames of every thread, most recent call first, by the thread's ident."""
    fd = _scratch()
    os.ftruncate(fd, 0)
    os.lseek(fd, 0, os.SEEK_SET)
    faulthandler.dump_traceback(file=fd, all_threads=True)
    text = os.pread(fd, os.fstat(fd).st_size, 0).decode(errors="replace")
    stacks: dict[int, list[tuple[str, int]]] = {}
    stack: list[tuple[str, int]] = []
    for line in text.splitlines():
        if thread := _THREAD.match(line):
            stack = stacks[int(thread.group(1), 16)] = []
        elif frame := _FRAME.match(line):
            stack.append((frame.group(1), int(frame.group(2))))
    return stacks


@functools.cache
def _scratch() -> int:
    """Unnamed memory, made once: where descriptors run out later, a rank can still say whether it waits."""
    return os.memfd_create("frames", os.MFD_CLOEXEC)


def _waits(stack: list[tuple[str, int]]) -> bool:
    # A condition or an event says nothing by itself: it is its user's.
    users = [place for place in stack if place[0] != threading.__file__]
    return bool(users) and is_waiting(users[0][0], linecache.getline(*users[0]))
