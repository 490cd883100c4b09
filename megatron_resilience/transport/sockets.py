"""Finding and shutting the TCP sockets that a C++ library opened in this process.

gloo offers no way to end an operation that waits for a peer. Shutting the *read* side of its connected sockets does:
local operations return with an error within milliseconds (shutting both sides at once loses wake-ups; measured,
see docs/design.md). Sockets are told apart by what appeared while the library was building its connections.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterable


def connected_sockets() -> set[int]:
    """Descriptors of this process that are connected TCP sockets."""
    result = set()
    for name in os.listdir("/proc/self/fd"):
        fd = int(name)
        try:
            if not os.readlink(f"/proc/self/fd/{fd}").startswith("socket:"):
                continue
            with borrowed(fd) as sock:
                if sock.family in (socket.AF_INET, socket.AF_INET6) and sock.type == socket.SOCK_STREAM:
                    sock.getpeername()
                    result.add(fd)
        except OSError:
            continue
    return result


@contextlib.contextmanager
def borrowed(fd: int):
    """A Python socket over a descriptor that stays its owner's."""
    sock = socket.socket(fileno=fd)
    try:
        yield sock
    finally:
        sock.detach()


def shut(fds: Iterable[int], how: int) -> None:
    """``shutdown(2)`` on each; those already gone are skipped."""
    for fd in list(fds):
        with contextlib.suppress(OSError), borrowed(fd) as sock:
            sock.shutdown(how)


def tune(fds: Iterable[int], silent_s: int) -> None:
    """Makes a silent peer (power lost, network cut) an error after about ``silent_s`` seconds, not after hours."""
    for fd in fds:
        with contextlib.suppress(OSError), borrowed(fd) as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, max(1, silent_s // 3))
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, max(1, silent_s // 3))
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 2)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, silent_s * 1000)
