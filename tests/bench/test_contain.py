"""However a bench ends, nothing that it started outlives it."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.support.template import ROOT

WORK = """
import os, subprocess, sys, time
from pathlib import Path
from megatron_resilience.bench._contain import contained

def work(folder):
    notes = Path(sys.argv[1])
    (folder / "big").write_bytes(bytes(1000))
    # One that leaves its session and loses its parent at once, as a daemon would.
    script = "import os,sys,time\\nif os.fork(): os._exit(0)\\nos.setsid()\\nprint(os.getpid(), flush=True)\\ntime.sleep(600)"
    daemon = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    pids = [os.getppid(), os.getpid(), int(daemon.stdout.readline())]
    daemon.wait()
    (notes / "temporary").write_text(str(folder))
    (notes / "pids.part").write_text(" ".join(map(str, pids)))
    (notes / "pids.part").rename(notes / "pids")
    if sys.argv[2] == "raises":
        raise RuntimeError("on purpose")
    if sys.argv[2] == "returns":
        return 7
    time.sleep(600)

sys.exit(contained(work))
"""


@pytest.mark.parametrize(
    ("end", "status"),
    [
        ("returns", 7),
        ("raises", 1),
        ("SIGTERM", 143),
        ("SIGINT", 130),
        ("SIGKILL", -9),
        ("SIGKILL to the keeper", 137),
        ("SIGKILL to the worker", 137),
    ],
)
def test_nothing_is_left(tmp_path, end, status):
    command = [sys.executable, "-c", WORK, str(tmp_path), end]
    front = subprocess.Popen(command, env=os.environ | {"PYTHONPATH": str(ROOT)}, stderr=subprocess.PIPE)
    try:
        pids = tmp_path / "pids"
        wait_for(lambda: pids.exists() or front.poll() is not None)
        keeper, worker, daemon = map(int, pids.read_text().split())
        if end.startswith("SIG"):
            assert all(map(runs, (keeper, worker, daemon)))
            name, _, whom = end.partition(" to the ")
            os.kill({"": front.pid, "keeper": keeper, "worker": worker}[whom], signal.Signals[name])
        assert front.wait(30) == status
        wait_for(lambda: not any(map(runs, (keeper, worker, daemon))))
        folder = Path((tmp_path / "temporary").read_text())
        wait_for(lambda: not folder.exists())
    finally:
        front.kill()
        front.wait()
        front.stderr.close()


def wait_for(condition, timeout=30):
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


def runs(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
