"""Messages within a node: an agent and a rank, or an agent and its zygote, over an unnamed socket pair.

JSON objects, one per datagram, with file descriptors beside them where memory or sockets are handed over.
Nobody outside the two processes can reach it, so it needs no secret.
"""

from __future__ import annotations

import array
import json
import socket
from typing import Any

LIMIT = 180_000
"""Bytes of one message; below the kernel's default send buffer."""
_MAX_FDS = 64


class Channel:
    """One end of the pair. Sending is thread-safe (a datagram is atomic)."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock

    @classmethod
    def pair(cls) -> tuple[Channel, Channel]:
        """Both ends."""
        a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for sock in (a, b):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        return cls(a), cls(b)

    def send(self, message: dict[str, Any], fds: list[int] | None = None) -> None:
        """Sends one message; descriptors are duplicated into the receiver.

        Raises:
            OSError: the other end is gone.
        """
        data = json.dumps(message).encode()
        if len(data) > LIMIT:
            raise ValueError(f"a message of {len(data)} bytes within a node: the limit is {LIMIT}")
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        self.sock.sendmsg([data], ancillary)

    def receive(self, wait: bool = True) -> tuple[dict[str, Any], list[int]] | None:
        """The next message and its descriptors, or None when the other end is gone; without ``wait``, also when there is none."""
        size = socket.CMSG_SPACE(_MAX_FDS * 4)
        flags = socket.MSG_CMSG_CLOEXEC | (0 if wait else socket.MSG_DONTWAIT)
        try:
            try:
                data, ancillary, _, _ = self.sock.recvmsg(LIMIT, size, flags)
            except ConnectionResetError:
                # It died with a message of ours unread; what it sent before is still here.
                data, ancillary, _, _ = self.sock.recvmsg(LIMIT, size, flags)
        except ConnectionError:
            return None
        except BlockingIOError:
            if wait:
                raise
            return None
        if not data:
            return None
        fds = array.array("i")
        for level, kind, payload in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds.frombytes(payload[: len(payload) - len(payload) % fds.itemsize])
        return json.loads(data), list(fds)

    def close(self) -> None:
        """Closes this end."""
        self.sock.close()
