"""gloo over TCP: the fabric of CPU training, and of host memory (replicas, control) everywhere."""

from __future__ import annotations

import os
import socket
import threading
import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from megatron_resilience.transport.base import Fabric, GroupKey
from megatron_resilience.transport.sockets import connected_sockets, shut, tune

ESCALATE_S = 0.3
"""After this long the write side is shut too: it frees the rare large send that SHUT_RD does not reach."""

_AGAIN_S = 0.02


class GlooFabric(Fabric):
    """All gloo backends of one epoch in this process.

    Args:
        store: the epoch's store, already under its own prefix.
        rank: this process's global rank.
        address: of the interface to listen on and connect from.
        timeout_s: of a single operation; the last net under everything else.
    """

    def __init__(self, store: Any, rank: int, address: str, timeout_s: float) -> None:
        self._store = store
        self._rank = rank
        self._timeout = timedelta(seconds=timeout_s)
        self._device = dist.ProcessGroupGloo.create_device(hostname=address)
        self._backends: list[Any] = []
        self._before = connected_sockets()
        self._sockets: list[int] = []
        self._building = False
        self._lock = threading.Lock()
        self._aborted = False

    def build(self, key: GroupKey, timeout_s: float | None = None) -> Any:
        """See :meth:`Fabric.build`. ``timeout_s`` of a single operation, where the fabric's is not wanted."""
        options = dist.ProcessGroupGloo._Options()
        options._timeout = self._timeout if timeout_s is None else timedelta(seconds=timeout_s)
        options._devices = [self._device]
        options._threads = 2
        options.group_name = key.prefix()
        store = dist.PrefixStore(key.prefix(), self._store)
        with self._lock:
            if self._aborted:
                raise RuntimeError("the epoch was aborted")
            self._building = True
        try:
            backend = dist.ProcessGroupGloo(store, key.ranks.index(self._rank), len(key.ranks), options)
        finally:
            with self._lock:
                self._building = False
        self._backends.append(backend)
        return backend

    def built(self) -> None:
        with self._lock:
            fresh = connected_sockets() - self._before
            tune(fresh, silent_s=max(3, int(self._timeout.total_seconds() / 3)))
            self._sockets = [os.dup(fd) for fd in fresh]

    def abort(self) -> None:
        with self._lock:
            first, self._aborted = not self._aborted, True
            shut(self._sockets, socket.SHUT_RD)
        if first:
            threading.Thread(target=self._escalate, name="abort-gloo", daemon=True).start()

    def bury(self) -> None:
        backends, self._backends = self._backends, []
        self.abort()

        def drain() -> None:
            # Destroying a backend waits for its operations; they end, because their sockets are shut.
            backends.clear()

        threading.Thread(target=drain, name="bury-gloo", daemon=True).start()

    def _escalate(self) -> None:
        while True:
            with self._lock:
                if not self._building:
                    break
                # Whatever is connected by now is this group's: the next epoch cannot begin before build() returns.
                shut(connected_sockets() - self._before, socket.SHUT_RDWR)
            time.sleep(_AGAIN_S)
        time.sleep(ESCALATE_S)
        with self._lock:
            shut(self._sockets, socket.SHUT_RDWR)
            while self._sockets:
                os.close(self._sockets.pop())
