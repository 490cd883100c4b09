"""NCCL: the fabric of device tensors on GPUs. Written from torch's sources; see the README for what has run.

Its environment variables are in :mod:`environment`.
"""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from megatron_resilience.transport.base import Fabric, GroupKey


class NcclFabric(Fabric):
    """All NCCL backends of one epoch in this process. Arguments as :class:`gloo.GlooFabric`'s."""

    def __init__(self, store: Any, rank: int, timeout_s: float) -> None:
        self._store = store
        self._rank = rank
        self._timeout = timedelta(seconds=timeout_s)
        self._backends: list[Any] = []
        self._lock = threading.Lock()
        self._aborted = False

    def build(self, key: GroupKey) -> Any:
        """See :meth:`Fabric.build`. The communicator itself is made by the first collective."""
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = self._timeout
        options.group_name = key.prefix()
        options.global_ranks_in_group = list(key.ranks)
        backend = dist.ProcessGroupNCCL(
            dist.PrefixStore(key.prefix(), self._store), key.ranks.index(self._rank), len(key.ranks), options
        )
        with self._lock:
            self._backends.append(backend)
            if self._aborted:
                raise RuntimeError("the epoch was aborted")
        return backend

    def built(self) -> None:
        """Nothing to record: NCCL can abort."""

    def abort(self) -> None:
        with self._lock:
            first, self._aborted = not self._aborted, True
            backends = list(self._backends)
        if not first or not backends:
            return
        # Together, each on a thread: aborting one communicator after the other deadlocks when a kernel of
        # one waits for a kernel of another.
        threads = [threading.Thread(target=b.abort, daemon=True) for b in backends]
        for thread in threads:
            thread.start()

    def bury(self) -> None:
        self.abort()
        with self._lock:
            self._backends.clear()
