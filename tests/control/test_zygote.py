"""What a rank has forked does not outlive it."""

import os
import signal
import time
from pathlib import Path

import psutil
import pytest

from megatron_resilience.control.channel import Channel
from megatron_resilience.control.zygote import _end_group, _serve


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


LISTENS = """
import multiprocessing.connection, os, sys, time
listener = multiprocessing.connection.Listener(family="AF_UNIX")
print(listener.address, file=open(sys.argv[1] + ".part", "w"))
os.rename(sys.argv[1] + ".part", sys.argv[1])
time.sleep(600)
"""


@pytest.mark.parametrize("who", ["rank", "agent"])
def test_sockets_of_a_killed_rank_are_removed(tmp_path, monkeypatch, who):
    """Also where the agent lets go of all of them."""
    monkeypatch.setattr("megatron_resilience.control.zygote.preload", lambda: None)
    (tmp_path / "rank.py").write_text(LISTENS)
    ours, theirs = Channel.pair()
    zygote = os.fork()
    if zygote == 0:
        ours.close()
        _serve(theirs)
    theirs.close()
    assert ours.receive()[0] == {"kind": "loaded"}
    told, stacks, channel = tmp_path / "address", os.memfd_create("stacks"), os.memfd_create("channel")
    argv = [str(tmp_path / "rank.py"), str(told)]
    ours.send({"ticket": 1, "argv": argv, "env": dict(os.environ)}, [channel, stacks])
    rank = ours.receive()[0]["pid"]
    try:
        while not told.exists():
            time.sleep(0.01)
        address = Path(told.read_text().strip())
        assert address.is_socket()
        if who == "rank":
            os.kill(rank, signal.SIGKILL)
            assert ours.receive()[0] == {"kind": "exited", "pid": rank, "status": -signal.SIGKILL}
            assert not address.parent.exists()
    finally:
        ours.close()
        os.waitpid(zygote, 0)
        for descriptor in (stacks, channel):
            os.close(descriptor)
    assert not address.parent.exists()
