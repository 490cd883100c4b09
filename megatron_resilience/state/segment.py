"""A segment: two slots in shared memory, each able to hold one generation of one rank's state.

A slot is a header page, the tensors' payload, and a JSON record of the scalars. Writing one goes
``open`` (marks it as being written) → payload and record → ``seal`` (checksum, then the state word, last).
Killed anywhere in between, a slot is not sealed, and nobody takes it for a generation.

Pure in the sense that it works on any writable buffer; :mod:`memory` supplies the shared ones.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from typing import Any

import xxhash

from megatron_resilience.errors import StateError

SLOTS = 2
PAGE = 4096
RECORD_BYTES = 256 * 1024
"""Room for the scalars of one generation; a job whose record is larger is refused by ``seal``."""

_HEADER = struct.Struct("<8sIIQqQQ16s16s")
_MAGIC = b"MRSLOT01"
_STATE_OFFSET = 12
_EMPTY, _WRITING, _SEALED = 0, 1, 2


@dataclass(frozen=True)
class SlotHeader:
    """What a sealed slot says of itself.

    Attributes:
        epoch: in which it was written.
        generation: number of completed optimizer steps.
        digest: the inventory's, 16 bytes.
        checksum: xxh3-128 over payload and record, 16 bytes.
        record_bytes: length of the JSON record.
    """

    epoch: int
    generation: int
    digest: bytes
    checksum: bytes
    record_bytes: int


@dataclass(frozen=True)
class Shape:
    """What somebody who only keeps a segment for another rank must know of its inventory.

    Attributes:
        payload_bytes: of one generation's tensors.
        digest: the inventory's, 16 bytes.
    """

    payload_bytes: int
    digest: bytes

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot, a multiple of the page size."""
        return PAGE + -(-self.payload_bytes // PAGE) * PAGE + RECORD_BYTES

    @property
    def segment_bytes(self) -> int:
        """Bytes of a whole segment (two slots)."""
        return SLOTS * self.slot_bytes


class Slot:
    """One slot of a segment, over a writable buffer of ``shape.slot_bytes`` bytes.

    Attributes:
        shape: of what it holds.
        payload: the tensors' bytes.
        record: room for the JSON record.
    """

    def __init__(self, buffer: memoryview, shape: Shape) -> None:
        size = shape.slot_bytes
        if len(buffer) != size:
            raise StateError(f"a slot of this shape takes {size} bytes, the buffer has {len(buffer)}")
        self.shape = shape
        self._head = buffer[:PAGE]
        self.payload = buffer[PAGE : PAGE + shape.payload_bytes]
        self.record = buffer[size - RECORD_BYTES :]

    def open(self) -> None:
        """Marks the slot as being written: whatever it held is gone from now on."""
        self._set_state(_WRITING)

    def write_record(self, record: dict[str, Any]) -> int:
        """Stores the scalars of the generation; returns their length in bytes.

        Raises:
            StateError: the record does not fit.
        """
        text = json.dumps(record, separators=(",", ":"), sort_keys=True).encode()
        if len(text) > RECORD_BYTES:
            raise StateError(
                f"the scalars of one generation take {len(text)} bytes, a segment has room for {RECORD_BYTES}"
            )
        self.record[: len(text)] = text
        return len(text)

    def seal(self, epoch: int, generation: int, record_bytes: int, checksum: bytes | None = None) -> SlotHeader:
        """Publishes the slot: header first, state word last.

        Args:
            checksum: what the contents must hash to (a replica's, as its sender computed it).

        Raises:
            StateError: the contents do not hash to ``checksum``; the slot stays unsealed.
        """
        found = self._hash(record_bytes)
        if checksum is not None and checksum != found:
            raise StateError(
                f"generation {generation} arrived damaged: checksum {found.hex()}, sent as {checksum.hex()}"
            )
        header = SlotHeader(epoch, generation, self.shape.digest, found, record_bytes)
        _HEADER.pack_into(
            self._head,
            0,
            _MAGIC,
            1,
            _WRITING,
            epoch,
            generation,
            len(self.payload),
            record_bytes,
            header.digest,
            header.checksum,
        )
        self._set_state(_SEALED)
        return header

    def header(self) -> SlotHeader | None:
        """The header of a sealed slot of this shape, or None. Does not verify the checksum."""
        found = read_header(self._head)
        return found if found is not None and found.digest == self.shape.digest else None

    def read_record(self) -> dict[str, Any]:
        """The scalars of the sealed generation.

        Raises:
            StateError: the slot is not sealed.
        """
        header = self.header()
        if header is None:
            raise StateError("the slot holds no sealed generation of this layout")
        return json.loads(bytes(self.record[: header.record_bytes]))

    def verify(self) -> SlotHeader:
        """The header, after hashing the contents.

        Raises:
            StateError: not sealed, or the contents no longer hash to the header's checksum.
        """
        header = self.header()
        if header is None:
            raise StateError("the slot holds no sealed generation of this layout")
        found = self._hash(header.record_bytes)
        if found != header.checksum:
            raise StateError(
                f"the copy of generation {header.generation} is damaged: checksum {found.hex()}, "
                f"its header says {header.checksum.hex()}"
            )
        return header

    def discard(self) -> None:
        """Forgets the contents."""
        self._set_state(_EMPTY)

    def _hash(self, record_bytes: int) -> bytes:
        digest = xxhash.xxh3_128(self.payload)
        digest.update(self.record[:record_bytes])
        return digest.digest()

    def _set_state(self, state: int) -> None:
        struct.pack_into("<I", self._head, _STATE_OFFSET, state)


def read_header(head: memoryview) -> SlotHeader | None:
    """The header in the first page of a slot, or None when it is not sealed. Needs no inventory."""
    magic, version, state, epoch, generation, _, record, digest, checksum = _HEADER.unpack_from(head, 0)
    if magic != _MAGIC or version != 1 or state != _SEALED:
        return None
    return SlotHeader(epoch, generation, digest, checksum, record)


class Segment:
    """The two slots of one rank's state over one buffer of ``shape.segment_bytes`` bytes."""

    def __init__(self, buffer: memoryview, shape: Shape) -> None:
        size = shape.slot_bytes
        self.shape = shape
        self.slots = tuple(Slot(buffer[i * size : (i + 1) * size], shape) for i in range(SLOTS))

    def generations(self) -> tuple[int | None, ...]:
        """The sealed generation of each slot."""
        headers = [slot.header() for slot in self.slots]
        return tuple(None if h is None else h.generation for h in headers)


def sealed_generations(buffer: memoryview) -> tuple[SlotHeader | None, ...]:
    """The headers of a segment whose shape is not known (an agent lists what its node holds)."""
    half = len(buffer) // SLOTS
    return tuple(read_header(buffer[i * half : i * half + PAGE]) for i in range(SLOTS))
