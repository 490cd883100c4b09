"""Where the ranks of an epoch meet: its store, the transports beneath all process groups, and groups of our own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from megatron_resilience.errors import Interrupted, StateError
from megatron_resilience.hotswap.courier import TRANSFER_GROUP
from megatron_resilience.hotswap.endpoints import couriers, peers
from megatron_resilience.topology.epoch import Epoch
from megatron_resilience.topology.groups import GroupSwitch, live_handles
from megatron_resilience.transport.base import Fabric, GroupKey
from megatron_resilience.transport.gloo import GlooFabric
from megatron_resilience.transport.store import StoreClient

MEETING_TIMEOUT_S = 60.0
"""For ranks that are already on their way to meet each other; deaths among them end it much earlier."""
PREPARING_TIMEOUT_S = 1800.0
"""For ranks of a next world, which start up in the background, some of them on nodes that have yet to import everything."""
REPLICA_TIMEOUT_S = 24 * 3600.0
"""A partner may legitimately be busy for long (evaluation, a checkpoint): only an abort ends the wait."""


class Meeting:
    """See the module. One after the other: each epoch's buries the one before.

    Args:
        rank: this process's.
        address: of the configured interface.
        device_fabric: makes the fabric for device tensors from ``(store, rank)``, or None on CPU.
        timeout_s: of a collective of training.
        newest: number of the newest epoch this process has been told of, on any thread.

    Attributes:
        replica: group of all ranks, for copies of state.
        transfer: group of all endpoints of a change of layout; the same where nothing changes.
    """

    def __init__(
        self,
        rank: int,
        address: str,
        device_fabric: Callable[[Any, int], Fabric] | None,
        timeout_s: float,
        newest: Callable[[], int],
    ) -> None:
        self._rank, self._address = rank, address
        self._device_fabric, self._timeout_s, self._newest = device_fabric, timeout_s, newest
        self._switch = GroupSwitch()
        self._lock = threading.Lock()
        self._to_abort: list[Any] = []
        self._store: StoreClient | None = None
        self._control: Any = None
        self.replica: Any = None
        self.transfer: Any = None

    @property
    def store(self) -> Any:
        """The epoch's, as torch.distributed has it."""
        assert self._store is not None
        return self._store.store

    @property
    def remains(self) -> int:
        """How many exchanges of the transports beneath the process groups have left something behind in this process."""
        return self._switch.remains

    def meet(self, epoch: Epoch) -> None:
        """Makes everything anew, and installs it beneath the handles that Megatron holds.

        Raises:
            Interrupted: a newer epoch is there.
            RuntimeError: somebody is gone.
        """
        self.release()
        patience = MEETING_TIMEOUT_S if epoch.before is None else PREPARING_TIMEOUT_S
        store = StoreClient(*epoch.store, epoch.token, patience, lambda: self._check(epoch))
        self._register(epoch, store)
        self._store = store
        gloo = GlooFabric(store.store, self._rank, self._address, self._timeout_s)
        self._register(epoch, gloo)
        fabrics: dict[str, Fabric] = {"cpu": gloo}
        if self._device_fabric is not None:
            fabrics["cuda"] = self._device_fabric(store.store, self._rank)
            self._register(epoch, fabrics["cuda"])
        everyone = tuple(range(epoch.world_size))
        self._control = gloo.build(GroupKey("resilience-control", everyone))
        self.replica = gloo.build(GroupKey("resilience-replica", everyone), REPLICA_TIMEOUT_S)
        self.transfer = self.replica
        if epoch.before is not None and couriers(epoch):
            self.transfer = gloo.build(GroupKey(TRANSFER_GROUP, tuple(peers(epoch))))
        built = self._switch.build(live_handles(), fabrics)
        for fabric in fabrics.values():
            fabric.built()
        # Installed only when all ranks have all their groups: a member that starts early could
        # otherwise take down a peer that is still connecting.
        store.barrier("met", epoch.world_size, patience)
        self._check(epoch)
        self._switch.install(built)

    def barrier(self, generation: int = 0, numbers: Sequence[int] = ()) -> list[int]:
        """All ranks, at the same generation; returns the largest that any of them passed, of each of the numbers.

        Raises:
            StateError: they are not.
            RuntimeError: somebody is gone.
        """
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MIN
        ends = torch.tensor([generation, -generation, *(-n for n in numbers)], dtype=torch.int64)
        self._control.allreduce([ends], options).wait()
        if int(ends[0]) != generation or int(ends[1]) != -generation:
            raise StateError(f"ranks stand at generations {int(ends[0])} to {-int(ends[1])}")
        return [-n for n in ends[2:].tolist()]

    def abort(self) -> None:
        """On another thread: whatever anybody waits for here ends with an error."""
        with self._lock:
            for thing in self._to_abort:
                thing.abort()

    def release(self) -> None:
        """Buries the world of the last epoch, or of an attempt that failed."""
        with self._lock:
            things, self._to_abort = self._to_abort, []
        for thing in things:
            if isinstance(thing, Fabric):
                thing.bury()
            else:
                thing.close()

    def _register(self, epoch: Epoch, thing: Any) -> None:
        with self._lock:
            self._to_abort.append(thing)
        self._check(epoch)

    def _check(self, epoch: Epoch) -> None:
        if self._newest() > epoch.number:
            raise Interrupted


_COMMUNICATION = (
    "gloo",
    "nccl",
    "connection",
    "socket",
    "broken pipe",
    "timed out",
    "tcpstore",
    "the epoch was aborted",
)


def is_communication_error(error: BaseException) -> bool:
    """Whether an exception came from torch.distributed or a transport beneath it."""
    if isinstance(error, dist.DistError):
        return True
    return isinstance(error, RuntimeError) and any(w in str(error).lower() for w in _COMMUNICATION)
