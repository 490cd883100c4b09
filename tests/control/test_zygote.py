"""What a rank has forked does not outlive it."""

import os
import signal
import time

import psutil

from megatron_resilience.control.zygote import _end_group


def test_a_dead_ranks_own_processes_are_ended():
    reader, writer = os.pipe()
    rank = os.fork()
    if rank == 0:
        os.setpgid(0, 0)
        if (writers := os.fork()) == 0:
            time.sleep(600)
        os.write(writer, str(writers).encode())
        time.sleep(600)
    orphan = psutil.Process(int(os.read(reader, 100)))
    os.kill(rank, signal.SIGKILL)
    assert orphan.is_running()
    _end_group(rank)
    os.waitpid(rank, 0)
    _, alive = psutil.wait_procs([orphan], timeout=10)
    assert all(process.status() == psutil.STATUS_ZOMBIE for process in alive)
    for descriptor in (reader, writer):
        os.close(descriptor)
