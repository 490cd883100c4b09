"""Stable process-group handles: Megatron keeps its ProcessGroup objects, we exchange what is beneath them.

Over a hundred places in Megatron cache a group. None of them notices: the group is emptied and gets a new backend
(:mod:`handles`), or ``_register_backend`` with a backend type that the group has not seen before makes every later operation
use the new one (torch 2.9 to 2.14).
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megatron_resilience.errors import ResilienceError
from megatron_resilience.topology import alone, handles
from megatron_resilience.transport.base import Fabric, GroupKey
from megatron_resilience.transport.gloo import ESCALATE_S

_FIRST_FREE_TYPE = 16
_LAST_TYPE = 255


@dataclass(frozen=True)
class Handle:
    """A live ProcessGroup of this process, and the devices it carries tensors of."""

    group: Any
    key: GroupKey
    devices: tuple[str, ...]


def live_handles() -> list[Handle]:
    """All process groups that this rank is a member of, in their order of creation.

    Megatron creates its groups in the same order everywhere, so any two ranks list those they share alike.
    """
    world = dist.distributed_c10d._world
    seen: Counter[tuple[str, tuple[int, ...]]] = Counter()
    result = []
    for group in world.pg_map:
        members = world.pg_group_ranks[group]
        ranks = tuple(sorted(members, key=members.__getitem__))
        # A newcomer's groups were made on the `fake` backend, under other names: neither name nor backend
        # may enter the key. WORLD's description is torch's own.
        description = "WORLD" if group is dist.group.WORLD else (group.group_desc or "undefined")
        occurrence = seen[description, ranks]
        seen[description, ranks] += 1
        if group in alone.requested:
            devices = ("cpu",) if "gloo" in (alone.requested[group] or "") else ("cuda",)
        else:
            devices = tuple(sorted(d.type for d in group._device_types))
        result.append(Handle(group, GroupKey(description, ranks, occurrence), devices))
    return result


class GroupSwitch:
    """Exchanges the backends under all handles of this process, epoch after epoch."""

    def __init__(self) -> None:
        self._next_type = _FIRST_FREE_TYPE
        self._installed: list[tuple[Handle, str, Any]] = []

    @property
    def remains(self) -> int:
        """How many exchanges have left idle threads and descriptors behind; torch ends them at about 240."""
        return self._next_type - _FIRST_FREE_TYPE

    def build(self, live: list[Handle], fabrics: dict[str, Fabric]) -> list[tuple[Handle, str, Any]]:
        """New backends for all handles; nothing is installed yet.

        Args:
            fabrics: by device type, ``"cpu"`` or ``"cuda"``.

        Returns:
            ``(handle, device, backend)`` for :meth:`install`.
        """
        return [(h, device, fabrics[device].build(h.key)) for h in live for device in _devices(h, fabrics)]

    def install(self, built: list[tuple[Handle, str, Any]]) -> None:
        """Makes every later operation of the handles use the new backends.

        The old ones are taken out and end on a thread of their own. Where torch does not allow that (:mod:`handles`), and
        beneath groups with NCCL, for which it has not been tried, they stay beneath the new ones.

        Raises:
            ResilienceError: in that case, after about 240 epochs in one process: torch has no backend types left.
        """
        old, self._installed = self._installed, built
        by_group: dict[Handle, list[tuple[str, Any]]] = {}
        for handle, device, backend in built:
            by_group.setdefault(handle, []).append((device, backend))
        # One type more for the epoch's groups that could not be emptied.
        spare = self._next_type
        for handle, backends in by_group.items():
            if all(isinstance(backend, dist.ProcessGroupGloo) for _, backend in backends) and handles.release(
                handle.group
            ):
                _fill(handle.group, [device for device, _ in backends], backends[0][1])
                continue
            if spare > _LAST_TYPE:
                raise ResilienceError(
                    "this process has rebuilt its groups 240 times and torch allows no more: "
                    "save a checkpoint and start the job again"
                )
            self._next_type = spare + 1
            for device, backend in backends:
                handle.group._register_backend(torch.device(device), dist.ProcessGroup.BackendType(spare), backend)
        alone.name_real_backends()
        threading.Thread(target=_end, args=[old], name="end-backends", daemon=True).start()


def _fill(group: Any, devices: list[str], gloo: Any) -> None:
    """Registers a backend with an empty group, for all its devices: on the CPU accelerator gloo serves every one."""
    kind = dist.ProcessGroup.BackendType.GLOO
    for device in devices:
        group._register_backend(torch.device(device), kind, gloo)
    group._set_default_backend(kind)


def _end(backends: list[Any]) -> None:
    """Ending a backend joins its threads: not before their last operations have failed, which would hold everybody up."""
    time.sleep(2 * ESCALATE_S)
    backends.clear()


def _devices(handle: Handle, fabrics: dict[str, Fabric]) -> list[str]:
    # Where training runs on the CPU accelerator there is one fabric, whatever device the group was made for.
    return [d for d in handle.devices if d in fabrics] or list(fabrics)[:1]
