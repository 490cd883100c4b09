"""Whatever a bench starts is gone when it ends, however it ends: processes, their memory, temporary files.

    front (what the user started) ── keeper ── worker (the bench) ── launchers, agents, ranks

Front and keeper are subreapers: what loses its parent becomes theirs. Each of the two cleans up when the other has
been killed, so only SIGKILL to both at once leaves anything, and then only the folder.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import psutil

from megatron_resilience.control.zygote import die_with_parent
from megatron_resilience.errors import ResilienceError

_PR_SET_CHILD_SUBREAPER = 36
_PATIENCE_S = 30.0
_REAP_MS = 500
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def contained(work: Callable[[Path], int], parent: Path | None = None) -> int:
    """Runs ``work(folder)`` in a process of its own and returns its exit status, or 128 + the signal that ended it.

    Args:
        work: gets a new temporary folder, which is also ``$TMPDIR`` of everything it starts.
        parent: where to make that; default: where temporary files go.
    """
    _become_subreaper()
    folder = Path(tempfile.mkdtemp(prefix="megatron-resilience-bench-", dir=parent))
    watched, held = os.pipe()
    keeper = os.fork()
    if keeper == 0:
        os.close(held)
        _keep(work, folder, watched)
    os.close(watched)
    ended_by = 0

    def end(signum: int, _: object) -> None:
        nonlocal ended_by
        if not ended_by:
            ended_by = signum
            # The keeper sees the end of the pipe.
            os.close(held)

    for signum in _ENDING:
        signal.signal(signum, end)
    status = os.waitstatus_to_exitcode(os.waitpid(keeper, 0)[1])
    _clean_up(folder)
    if ended_by:
        return 128 + ended_by
    return status if status >= 0 else 128 - status


def _keep(work: Callable[[Path], int], folder: Path, watched: int) -> NoReturn:
    status = 1
    try:
        # Ctrl-C goes to the front alone, which decides.
        os.setsid()
        _become_subreaper()
        keeper = os.getpid()
        worker = os.fork()
        if worker == 0:
            _work(work, folder, keeper)
        pidfd = os.pidfd_open(worker)
        poll = select.poll()
        poll.register(watched, select.POLLIN)
        poll.register(pidfd, select.POLLIN)
        while not (ready := dict(poll.poll(_REAP_MS))):
            _reap(but=worker)
        if pidfd in ready:
            status = os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1])
            status = status if status >= 0 else 128 - status
        _clean_up(folder)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def _work(work: Callable[[Path], int], folder: Path, keeper: int) -> NoReturn:
    status = 1
    try:
        die_with_parent(keeper)
        for signum in _ENDING:
            signal.signal(signum, signal.SIG_DFL)
        os.environ["TMPDIR"] = tempfile.tempdir = str(folder)
        status = work(folder)
    except ResilienceError as error:
        print(f"megatron_resilience.bench: {error}", file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _become_subreaper() -> None:
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _clean_up(folder: Path) -> None:
    """Kills every descendant, waits until the kernel has taken all of them down, and removes the folder."""
    deadline = time.monotonic() + _PATIENCE_S
    while (left := psutil.Process().children(recursive=True)) and time.monotonic() < deadline:
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        _reap()
        time.sleep(0.01)
    shutil.rmtree(folder, ignore_errors=True)


def _reap(but: int = 0) -> None:
    """Takes note of the ends of orphans that have become this process's children."""
    for child in psutil.Process().children():
        if child.pid != but:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(child.pid, os.WNOHANG)
