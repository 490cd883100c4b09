"""The rendezvous of one epoch: a TCPStore in an agent, bound to the configured interface.

A store serves one epoch. Its host may die: the next epoch has another one, elsewhere. torch's store has no
authentication, so every key lies under a random token that only this job's ranks are told, and the store
holds nothing but the addresses at which gloo and NCCL meet.
"""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import threading
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist

from megatron_resilience.errors import ControlError
from megatron_resilience.transport.sockets import connected_sockets, shut

_CHECK_S = 0.05


def host_store(address: str) -> dist.TCPStore:
    """A store in this process, on a free port of ``address``.

    Raises:
        ControlError: the address is not one of this machine's.
    """
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.bind((address, 0))
    except OSError as error:
        listener.close()
        raise ControlError(f"cannot listen on {address}: {error.strerror}; see --node-addr") from error
    listener.listen(1024)
    # The store owns the descriptor from here on.
    return dist.TCPStore(
        address,
        listener.getsockname()[1],
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def _connect(address: str, port: int, timeout_s: float, check: Callable[[], None]) -> dist.TCPStore:
    """A connection, made beside the calling thread: torch tries for ``timeout_s`` and more where nobody listens."""
    made: queue.SimpleQueue[dist.TCPStore | Exception] = queue.SimpleQueue()

    def connect() -> None:
        limit = timedelta(seconds=timeout_s)
        try:
            made.put(dist.TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=limit))
        except Exception as error:
            made.put(error)

    threading.Thread(target=connect, name="connect-store", daemon=True).start()
    while True:
        with contextlib.suppress(queue.Empty):
            result = made.get(timeout=_CHECK_S)
            break
        check()
    if isinstance(result, Exception):
        raise result
    return result


class StoreClient:
    """A connection to an epoch's store whose blocked calls can be ended from another thread.

    Args:
        address: of the store.
        port: of the store.
        token: the epoch's secret prefix of all keys.
        timeout_s: of connecting, and of any single call.
        check: raises when nobody wants this store any more; its host may be gone before we come.

    Raises:
        RuntimeError: nobody answers there.
    """

    def __init__(
        self, address: str, port: int, token: str, timeout_s: float, check: Callable[[], None] = lambda: None
    ) -> None:
        before = connected_sockets()
        store = _connect(address, port, timeout_s, check)
        # A copy of the descriptor: the number itself may be somebody else's by the time we abort.
        self._sockets = [os.dup(fd) for fd in connected_sockets() - before]
        self.store = dist.PrefixStore(token, store)

    def abort(self) -> None:
        """Ends every call in flight with an error. Any thread; idempotent."""
        shut(self._sockets, socket.SHUT_RDWR)

    def close(self) -> None:
        """Closes our copies of the descriptors."""
        while self._sockets:
            os.close(self._sockets.pop())

    def barrier(self, name: str, size: int, timeout_s: float) -> None:
        """Returns when ``size`` ranks have come.

        Raises:
            RuntimeError: they did not within ``timeout_s``, or the store went away.
        """
        if self.store.add(f"{name}/count", 1) == size:
            self.store.set(f"{name}/open", b"1")
        self.store.wait([f"{name}/open"], timedelta(seconds=timeout_s))
