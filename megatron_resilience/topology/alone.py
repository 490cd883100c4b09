"""Start-up without anybody else: torch's ``fake`` backend in place of real groups.

A newcomer runs Megatron's whole start-up by itself, under the identity of one rank, long before it is needed. Its
collectives complete at once with whatever was in the tensors; all that start-up would have received from others is
routed in later, with the state.
"""

from __future__ import annotations

import os
from typing import Any

import torch.distributed as dist

requested: dict[Any, str | None] = {}
"""The backend that each fake group was asked for: its own claims every device."""


def force_fake_backend() -> None:
    """Makes ``init_process_group`` and ``new_group`` build fake groups from now on, whatever is asked for.

    Rank and world size are the environment's (``RANK``, ``WORLD_SIZE``).
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    real_init, real_new = dist.init_process_group, dist.new_group

    def init_process_group(backend: str | None = None, **_: Any) -> None:
        real_init(backend="fake", store=FakeStore(), rank=rank, world_size=world_size)
        requested[dist.group.WORLD] = backend

    def new_group(
        ranks: list[int] | None = None,
        timeout: Any = None,
        backend: str | None = None,
        pg_options: Any = None,
        use_local_synchronization: bool = False,
        group_desc: str | None = None,
        device_id: Any = None,
    ) -> Any:
        group = real_new(ranks, backend="fake", group_desc=group_desc)
        if group is not dist.GroupMember.NON_GROUP_MEMBER:
            requested[group] = backend or requested[dist.group.WORLD]
        return group

    for module in (dist, dist.distributed_c10d):
        module.init_process_group = init_process_group
        module.new_group = new_group


def name_real_backends() -> None:
    """Makes ``get_backend()`` of groups that were fake tell what was asked for: code that asks (Megatron's
    ``print_rank_last``, for one) behaves differently on ``fake``. Called when real transports are beneath them."""
    known = dist.distributed_c10d._world.pg_map
    for group, backend in requested.items():
        known[group] = (backend or "gloo", known[group][1])
