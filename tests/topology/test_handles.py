"""Backends taken out of a living group end, with their threads."""

import os
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from megatron_resilience.topology.groups import GroupSwitch, Handle
from megatron_resilience.topology.handles import release
from megatron_resilience.transport.base import GroupKey


@pytest.fixture
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def threads():
    return len(os.listdir("/proc/self/task"))


def gloo(name):
    return dist.ProcessGroupGloo(dist.PrefixStore(name, dist.HashStore()), 0, 1, timedelta(seconds=20))


def test_exchanges_leave_no_threads(group):
    switch, handle, seen = GroupSwitch(), Handle(group, GroupKey("WORLD", (0,)), ("cpu",)), []
    for exchange in range(5):
        switch.install([(handle, "cpu", gloo(str(exchange)))])
        value = torch.ones(3)
        dist.all_reduce(value)
        assert value.tolist() == [1.0, 1.0, 1.0]
        assert dist.get_backend(group) == group.name() == "gloo"
        deadline = time.monotonic() + 10
        while seen and threads() > seen[0] and time.monotonic() < deadline:
            time.sleep(0.01)
        seen.append(threads())
    assert seen[-1] <= seen[0]


def test_what_is_no_plain_group_is_left_alone():
    class Mine(dist.ProcessGroup):
        pass

    assert not release(object())
    assert not release(Mine(0, 1))
