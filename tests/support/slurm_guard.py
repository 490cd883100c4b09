"""Runs the daemons of a virtual Slurm, and takes everything down that they started when its standard input closes.

Not imported by tests; ``slurm.Cluster`` starts it as ``python slurm_guard.py FOLDER`` and writes one JSON object a line,
``{"argv": [...], "env": {...}, "log": file}``, each a daemon to start. It is a subreaper: whatever a daemon leaves behind
(a slurmstepd is nobody's child) becomes its own. The kernel closes its input however pytest ends. The folder is removed at last.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

_PR_SET_CHILD_SUBREAPER = 36


def main() -> None:
    os.setsid()
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    signal.signal(signal.SIGCHLD, lambda *_: reap())
    for line in sys.stdin:
        order = json.loads(line)
        with Path(order["log"]).open("ab") as log:
            started = subprocess.Popen(
                order["argv"], env=order["env"], stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd="/"
            )
        print(started.pid, flush=True)
    end_all()
    shutil.rmtree(sys.argv[1], ignore_errors=True)


def end_all() -> None:
    """Kills every descendant until there is none: those that were being started turn up in the next round."""
    deadline = time.monotonic() + 30
    while (left := psutil.Process().children(recursive=True)) and time.monotonic() < deadline:
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        reap()
        time.sleep(0.02)


def reap() -> None:
    """Buries who has died."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


if __name__ == "__main__":
    main()
