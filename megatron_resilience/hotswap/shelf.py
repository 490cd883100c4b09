"""A rank's sealed state as others read it: a table that says where each logical tensor lies in its segment.

Written once, when a rank joins its world; the agent keeps it beside the segment and hands both to the ranks of the next
world on the node. A table is JSON, in unnamed shared memory.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

import torch

from megatron_resilience.hotswap.fragments import Storage
from megatron_resilience.state.memory import SharedMemory
from megatron_resilience.state.segment import Segment, Shape, Slot
from megatron_resilience.vps.layout import Layout


@dataclass(frozen=True)
class Table:
    """Where things lie in a rank's slots.

    Attributes:
        layout: of the world that the rank belongs to.
        payload_bytes, digest: the segment's shape.
        tensors: ``(number in the catalogue, copy, field, byte offset, dtype, elements)``.
        streams: ``(name, byte offset, bytes)`` of the raw states of random number generators.
    """

    layout: Layout
    payload_bytes: int
    digest: bytes
    tensors: tuple[tuple[int, int, str, int, str, int], ...]
    streams: tuple[tuple[str, int, int], ...]

    @property
    def shape(self) -> Shape:
        """Of the segment."""
        return Shape(self.payload_bytes, self.digest)

    def to_bytes(self) -> bytes:
        """As JSON."""
        data = {
            "layout": asdict(self.layout),
            "payload_bytes": self.payload_bytes,
            "digest": self.digest.hex(),
            "tensors": self.tensors,
            "streams": self.streams,
        }
        return json.dumps(data).encode()

    @classmethod
    def from_bytes(cls, text: bytes) -> Table:
        """From :meth:`to_bytes`'s."""
        data: dict[str, Any] = json.loads(text)
        return cls(
            Layout(**data["layout"]),
            data["payload_bytes"],
            bytes.fromhex(data["digest"]),
            tuple((n, c, f, o, d, e) for n, c, f, o, d, e in data["tensors"]),
            tuple((name, offset, size) for name, offset, size in data["streams"]),
        )


class Shelf:
    """A borrowed segment with its table.

    Args:
        fds: of the segment and of the table.
        size, table_size: bytes.
    """

    def __init__(self, fds: list[int], size: int, table_size: int) -> None:
        self._memory = [SharedMemory(fds[0], size, populate=True), SharedMemory(fds[1], table_size)]
        self.table = Table.from_bytes(bytes(self._memory[1].buffer))
        self._segment: Segment | None = Segment(self._memory[0].buffer, self.table.shape)

    def slot(self, index: int) -> Slot:
        """A slot of the segment."""
        assert self._segment is not None
        return self._segment.slots[index]

    def storage(self, index: int) -> Storage:
        """What lies in a slot, by logical tensor; shares its memory."""
        slot, out = self.slot(index), Storage()
        for number, copy, name, offset, dtype, count in self.table.tensors:
            out.setdefault((number, copy), {})[name] = (
                torch.frombuffer(slot.payload, dtype=getattr(torch, dtype), count=count, offset=offset)
                if count
                else torch.empty(0, dtype=getattr(torch, dtype))
            )
        return out

    def streams(self, index: int) -> dict[str, bytes]:
        """Raw states of the random number generators in a slot, by name."""
        payload = self.slot(index).payload
        return {name: bytes(payload[offset : offset + size]) for name, offset, size in self.table.streams}

    def close(self) -> None:
        """Gives the memory back; views of it keep it until they go."""
        self._segment = None
        for memory in self._memory:
            memory.close()
        self._memory = []
