"""However a job ends, nothing of it is left: no process, no shared memory, no port."""

import contextlib
import os
import signal
import socket
import time
from pathlib import Path

import psutil
import pytest

from tests.e2e.test_hot_swap import longer
from tests.support.job import job, kill_node
from tests.support.template import free_port

pytestmark = pytest.mark.e2e


def gone(pids: list[int], patience: float = 15) -> list[int]:
    """Those of the processes that are still there when the patience ends."""
    deadline = time.monotonic() + patience
    left = pids
    while left and time.monotonic() < deadline:
        left = [pid for pid in left if _is_there(pid)]
        time.sleep(0.02)
    return left


def _is_there(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize("end", ["SIGTERM", "SIGINT", "SIGKILL", "agents killed", "by itself"])
def test_nothing_is_left(template, tmp_path, end):
    port, shared = free_port(), set(os.listdir("/dev/shm"))
    iterations = 6 if end == "by itself" else 500
    launch = ["--rdzv-endpoint", f"127.0.0.1:{port}"]
    with job(template, tmp_path, longer("tp2_dp2_fp32", iterations), launch=launch) as running:
        running.wait_for_step(3)
        launcher = psutil.Process(running.child.pid)
        pids = [running.child.pid, *(p.pid for p in launcher.children(recursive=True))]
        assert len(pids) >= 1 + 3 * 2 + 4
        if end == "agents killed":
            for agent in running.agents():
                with contextlib.suppress(psutil.NoSuchProcess):
                    agent.kill()
        elif end != "by itself":
            running.child.signal(signal.Signals[end])
        running.child.wait(30)
        assert gone(pids) == []
    assert set(os.listdir("/dev/shm")) == shared
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", port))
    assert (tmp_path / "events.jsonl").stat().st_mode & 0o777 == 0o600
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "trace").iterdir()} == {0o600}


def test_a_dead_nodes_memory_is_gone_with_it(template, tmp_path):
    """Its segments have no name, and no process that lives on maps them."""
    with job(template, tmp_path, longer("tp2_dp2_fp32", 14)) as running:
        running.wait_for_step(4)
        victim = running.agents()[1]
        inodes = segments(victim.pid)
        assert inodes
        kill_node(victim)
        running.wait_for(lambda: running.of_kind("recovered"))
        for process in psutil.Process(running.child.pid).children(recursive=True):
            with contextlib.suppress(FileNotFoundError, PermissionError):
                assert not inodes & segments(process.pid), f"process {process.pid} holds memory of the dead node"
        running.finish()


def segments(pid: int) -> set[int]:
    """Inodes of the segments that a process has open or mapped."""
    found = set()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            if os.readlink(fd).startswith("/memfd:mr-"):
                found.add(fd.stat().st_ino)
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        if "/memfd:mr-" in line:
            found.add(int(line.split()[4]))
    return found
