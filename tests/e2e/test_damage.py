"""Nothing corrupt is ever trusted: a copy with a flipped byte is rejected, the next best generation is used."""

import contextlib
import os
import signal
import time
from pathlib import Path

import psutil
import pytest

from megatron_resilience.state.segment import PAGE, sealed_generations
from tests.e2e.test_hot_swap import assert_swapped, longer
from tests.support.job import job, kill_node

pytestmark = pytest.mark.e2e


SEGMENTS = ("mr-0-0", "mr-1-1", "mr-0-2", "mr-1-3")
"""On node 0: the own ones of ranks 0 and 1, and the copies they keep of ranks 2 and 3."""


def memory_of(agent: psutil.Process, label: str) -> Path:
    """The segment of that name (holder, owner) in an agent."""
    for fd in Path(f"/proc/{agent.pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            if os.readlink(fd).startswith(f"/memfd:{label} "):
                return fd
    raise AssertionError(f"the node has no segment {label}")


def generations(agent: psutil.Process, label: str) -> list[int]:
    """The sealed generation of each slot, -1 where there is none."""
    headers = sealed_generations(memoryview(bytearray(memory_of(agent, label).read_bytes())))
    return [-1 if header is None else header.generation for header in headers]


def complete(agent: psutil.Process) -> list[int]:
    """Generations that node 0 alone could restore everybody from, oldest first."""
    return sorted(set.intersection(*(set(generations(agent, label)) for label in SEGMENTS)) - {-1})


def flip(agent: psutil.Process, label: str, generation: int) -> None:
    """Flips a byte of a sealed generation."""
    slot = generations(agent, label).index(generation)
    with memory_of(agent, label).open("r+b") as memory:
        size = memory.seek(0, os.SEEK_END)
        memory.seek(slot * (size // 2) + PAGE + 1000)
        (byte,) = memory.read(1)
        memory.seek(-1, os.SEEK_CUR)
        memory.write(bytes([byte ^ 1]))


@contextlib.contextmanager
def stopped_with_two_generations(running):
    """All ranks suspended at a moment at which two generations are complete; node 0's go on afterwards."""
    ranks = [rank for node in (0, 1) for rank in running.ranks(node)]
    keeper = running.agents()[0]
    while True:
        for rank in ranks:
            rank.suspend()
        time.sleep(0.05)
        if len(complete(keeper)) == 2:
            break
        for rank in ranks:
            rank.resume()
        time.sleep(0.01)
    yield keeper
    for rank in ranks[:2]:
        os.kill(rank.pid, signal.SIGCONT)


def test_a_damaged_replica_is_rejected_and_an_older_generation_used(template, tmp_path, oracle):
    configuration = longer("tp2_dp2_fp32", 20)
    with job(template, tmp_path, configuration) as running:
        running.wait_for_step(5)
        with stopped_with_two_generations(running) as keeper:
            older, newer = complete(keeper)
            flip(keeper, "mr-0-2", newer)
            kill_node(running.agents()[1])
        running.finish()
        assert [event["rank"] for event in running.of_kind("damaged")] == [2]
        assert [event["generation"] for event in running.of_kind("plan")] == [newer, older]
        assert_swapped(running, oracle(configuration))


def test_no_copy_left_is_one_clear_message(template, tmp_path):
    with job(template, tmp_path, longer("tp2_dp2_fp32", 200)) as running:
        running.wait_for_step(5)
        with stopped_with_two_generations(running) as keeper:
            for generation in complete(keeper):
                flip(keeper, "mr-0-2", generation)
            kill_node(running.agents()[1])
        assert running.child.wait(60) == 1
        assert "no generation is complete in memory any more" in running.child.output
        assert "lacks rank 2" in running.child.output
