"""Authenticated messages between agents: JSON objects over TCP, each with a keyed hash.

Both sides prove that they hold the job's secret by the first message already, because its hash is keyed with the
secret and fresh numbers of both sides. A message that does not verify ends the connection.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import os
import struct
from typing import Any

from megatron_resilience.errors import ControlError

_NONCE = 32
_MAC = 16
_LENGTH = struct.Struct("<I")
_LIMIT = 16 * 2**20
_GREETING = b"megatron-resilience/1\n"


class Peer:
    """One end of a connection between two agents."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, send_key: bytes, receive_key: bytes
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._send_key, self._receive_key = send_key, receive_key
        self._sent = self._received = 0

    def send(self, message: dict[str, Any]) -> None:
        """Queues a message; a broken connection shows when receiving."""
        if self._writer.is_closing():
            return
        data = json.dumps(message).encode()
        mac = _mac(self._send_key, self._sent, data)
        self._sent += 1
        self._writer.write(_LENGTH.pack(len(data)) + mac + data)

    async def receive(self) -> dict[str, Any] | None:
        """The next message, or None when the other side closed.

        Raises:
            ControlError: the message was not made with the job's secret.
        """
        try:
            (length,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
            if length > _LIMIT:
                raise ControlError("a peer that does not hold the job's secret")
            mac = await self._reader.readexactly(_MAC)
            data = await self._reader.readexactly(length)
        except (asyncio.IncompleteReadError, ConnectionError):
            return None
        if not hmac.compare_digest(mac, _mac(self._receive_key, self._received, data)):
            raise ControlError("a peer that does not hold the job's secret")
        self._received += 1
        return json.loads(data)

    async def flush(self) -> None:
        """Waits until what was sent is in the kernel's hands."""
        try:
            await self._writer.drain()
        except ConnectionError:
            return

    def close(self) -> None:
        """Closes the connection."""
        self._writer.close()


async def connect(address: str, port: int, secret: bytes, source: str | None = None) -> Peer:
    """A connection to an agent.

    Args:
        source: address of the configured interface to connect from.

    Raises:
        OSError: nobody listens there.
        ControlError: it is not an agent of this job.
    """
    local = (source, 0) if source else None
    reader, writer = await asyncio.open_connection(address, port, local_addr=local)
    return await _greet(reader, writer, secret, dialled=True)


async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, secret: bytes) -> Peer:
    """The other end of :func:`connect`. Raises the same."""
    return await _greet(reader, writer, secret, dialled=False)


async def _greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, secret: bytes, dialled: bool) -> Peer:
    mine = os.urandom(_NONCE)
    writer.write(_GREETING + mine)
    try:
        greeting = await asyncio.wait_for(reader.readexactly(len(_GREETING) + _NONCE), 10)
    except (asyncio.IncompleteReadError, TimeoutError, ConnectionError) as error:
        writer.close()
        raise ControlError("whatever listens there is no agent of megatron-resilience") from error
    if not greeting.startswith(_GREETING):
        writer.close()
        raise ControlError("whatever listens there is no agent of megatron-resilience")
    theirs = greeting[len(_GREETING) :]
    both = mine + theirs if dialled else theirs + mine
    out, back = _key(secret, both, b"dialler"), _key(secret, both, b"listener")
    return Peer(reader, writer, *((out, back) if dialled else (back, out)))


def _key(secret: bytes, nonces: bytes, role: bytes) -> bytes:
    return hmac.new(secret, nonces + role, hashlib.sha256).digest()


def _mac(key: bytes, sequence: int, data: bytes) -> bytes:
    return hashlib.blake2b(sequence.to_bytes(8, "little") + data, key=key, digest_size=_MAC).digest()
