"""A process on a node that the new world does not use: gives what its old ranks hold, and ends with the switch.

Forked by the agent like a rank, with the environment of one; needs neither Megatron nor a device.
"""

from __future__ import annotations

import os
import time

from megatron_resilience.control.link import AgentLink
from megatron_resilience.control.node import ADDRESS, NODE
from megatron_resilience.hotswap.arrival import Shelves, problem_of, told
from megatron_resilience.hotswap.endpoints import peers
from megatron_resilience.hotswap.engine import Transfer
from megatron_resilience.transport.base import GroupKey
from megatron_resilience.transport.gloo import GlooFabric
from megatron_resilience.transport.store import StoreClient
from megatron_resilience.vps.space import StateSpace

TRANSFER_GROUP = "resilience-transfer"
_MEETING_S = 1800.0
_WORK_S = 600.0


def main() -> None:
    """Serves one switch."""
    link = AgentLink.from_environment()
    assert link is not None
    endpoint, node = int(os.environ["RANK"]), os.environ[NODE]
    epoch = link.wait_epoch(0)
    store = StoreClient(*epoch.store, epoch.token, _MEETING_S).store
    fabric = GlooFabric(store, endpoint, os.environ[ADDRESS], _WORK_S)
    backend = fabric.build(GroupKey(TRANSFER_GROUP, tuple(peers(epoch))))
    shelves = Shelves(link, epoch, node, store, speaks=True)
    catalogue, layout, sharded = told(store)
    problem = problem_of(epoch, StateSpace(catalogue, shelves.layout, sharded), StateSpace(catalogue, layout, sharded))
    transfer = Transfer(problem, endpoint, peers(epoch), None)
    link.send("prepared", rank=endpoint, epoch=epoch.number)
    plan = link.wait_plan(epoch.number)
    shelves.open(plan, transfer.read_from(), layout)
    transfer.run(shelves.storage, backend)
    # Its agent ends it when the switch is through, or given up.
    while True:
        time.sleep(3600)


if __name__ == "__main__":
    main()
