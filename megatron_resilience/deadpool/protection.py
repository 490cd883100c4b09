"""Copies every generation to host memory and to a partner on another node, behind the next step.

Two threads a rank, so that nothing waits on the critical path but what must:

* *copy* (DeadPool's D2H): the live tensors go to a slot of the rank's segment while forward and backward of the next
  step run; the step waits only if the copy is not done when the optimizer is about to change them.
* *rounds* (H2H): the sealed slot goes to the partners, the copies of others come in, and one small reduction over all
  ranks says whether the generation is complete everywhere. ``state.ledger`` has the rules.
"""

from __future__ import annotations

import queue
import struct
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.distributed as dist

from megatron_resilience.deadpool.allowance import StallAllowance
from megatron_resilience.errors import Interrupted, StateError
from megatron_resilience.state.inventory import Inventory
from megatron_resilience.state.ledger import Ledger
from megatron_resilience.state.segment import Segment, Slot

_ROUND = struct.Struct("<qqqq16s16s")
_SKIPPED = -1
_CHUNK = 64 * 2**20
_HEADER_TAG, _BODY_TAG = 1, 2


class TrainingState(Protocol):
    """A rank's live training state, as ``megatron_adapter.state`` presents it."""

    inventory: Inventory
    replicated: frozenset[int]
    """Indices of tensors that every rank of the data-parallel group holds alike."""

    def stable(self) -> list[tuple[int, torch.Tensor]]:
        """``(index in the inventory, live tensor)`` of what only ``optimizer.step`` changes."""

    def volatile(self) -> list[tuple[int, torch.Tensor]]:
        """The same for what changes during a forward pass; read at once."""

    def record(self) -> dict[str, Any]:
        """The scalars, as a JSON object."""


def views(slot: Slot, inventory: Inventory) -> list[torch.Tensor]:
    """The tensors of a slot, in inventory order, sharing its memory."""
    result = []
    for spec, offset in zip(inventory.specs, inventory.offsets, strict=True):
        dtype = getattr(torch, spec.dtype)
        count = spec.nbytes // dtype.itemsize
        flat = (
            torch.frombuffer(slot.payload, dtype=dtype, count=count, offset=offset)
            if count
            else torch.empty(0, dtype=dtype)
        )
        result.append(flat.view(spec.shape))
    return result


Pieces = list[tuple[int, int]]
"""Byte ranges of a slot's payload, ``(start, end)``, ascending."""


def pieces_to_send(inventory: Inventory, left_out: frozenset[int]) -> Pieces:
    """The payload without the tensors whose indices are left out, as few ranges as possible."""
    ends = [*inventory.offsets[1:], inventory.payload_bytes]
    result: Pieces = []
    for index, (start, end) in enumerate(zip(inventory.offsets, ends, strict=True)):
        if index in left_out:
            continue
        if result and result[-1][1] == start:
            result[-1] = (result[-1][0], end)
        else:
            result.append((start, end))
    return result


def send_slot(backend: Any, slot: Slot | None, slot_index: int, to: int, pieces: Pieces | None = None) -> list[Any]:
    """Starts sending a sealed slot, or the word that there is none; returns what must be waited for.

    Args:
        pieces: of the payload; default: all of it.
    """
    header = None if slot is None else slot.header()
    if slot is None or header is None:
        head = _ROUND.pack(_SKIPPED, 0, 0, 0, bytes(16), bytes(16))
        return [backend.send([_bytes_tensor(bytearray(head))], to, _HEADER_TAG)]
    head = _ROUND.pack(header.generation, slot_index, header.record_bytes, header.epoch, header.checksum, header.digest)
    works = [backend.send([_bytes_tensor(bytearray(head))], to, _HEADER_TAG)]
    for piece in _body(slot, header.record_bytes, pieces):
        works.append(backend.send([piece], to, _BODY_TAG))
    return works


def receive_slot(
    backend: Any,
    slots: tuple[Slot, ...],
    sender: int,
    epoch: int,
    pieces: Pieces | None = None,
    twin: Slot | None = None,
) -> int | None:
    """Receives what :func:`send_slot` sends into the slot of the same index, and seals it.

    Args:
        pieces: that are sent.
        twin: where the rest is to be copied from: this rank's own slot of the generation. The sender's checksum, over
            all of its payload, says whether the two really hold it alike.

    Returns:
        The generation, or None when the sender skipped it, or what was to be copied is not here.

    Raises:
        StateError: it arrived damaged, or is of another inventory than the slots; the slot stays unsealed.
        RuntimeError: the connection broke.
    """
    head = bytearray(_ROUND.size)
    backend.recv([_bytes_tensor(head)], sender, _HEADER_TAG).wait()
    generation, index, record_bytes, _, checksum, digest = _ROUND.unpack(head)
    if generation == _SKIPPED:
        return None
    slot = slots[index]
    slot.open()
    if pieces is not None and twin is not None:
        slot.payload[:] = twin.payload
    for piece in _body(slot, record_bytes, pieces):
        backend.recv([piece], sender, _BODY_TAG).wait()
    if digest != slot.shape.digest:
        raise StateError(
            f"generation {generation} from rank {sender} lists other tensors, or in another order, than this rank's "
            f"inventory ({digest.hex()}, expected {slot.shape.digest.hex()}): the two ran different code or options"
        )
    if pieces is not None and twin is None:
        # This rank skipped the generation, so the rest is missing.
        return None
    slot.seal(epoch, generation, record_bytes, checksum)
    return generation


class Protection:
    """Protects one rank in one epoch.

    Args:
        epoch: number of the epoch.
        state: of this rank.
        segment: this rank's own.
        ledger: of that segment; carried over from epoch to epoch.
        partners: ranks that keep copies; none without replicas.
        kept: segments kept for other ranks, by rank.
        peers: ranks of this rank's data-parallel group; what they hold alike is not sent between them.
        backend: gloo over all ranks, used by the *rounds* thread alone.
        allowance: for waits of a step; carried over from epoch to epoch.
        report: called with an event's name and fields, on any thread.
        copy: copies ``(destination, source)`` pairs off the critical path; returns when they are done.
        resumed_from: after a recovery, its generation: copies of it are missing until the first round is through.
    """

    def __init__(
        self,
        epoch: int,
        state: TrainingState,
        segment: Segment,
        ledger: Ledger,
        partners: tuple[int, ...],
        kept: dict[int, Segment],
        peers: frozenset[int],
        backend: Any,
        allowance: StallAllowance,
        report: Callable[..., None],
        copy: Callable[[list[tuple[torch.Tensor, torch.Tensor]]], None],
        resumed_from: int | None = None,
    ) -> None:
        self._epoch = epoch
        self._state = state
        self._segment = segment
        self._ledger = ledger
        self._partners = partners
        self._kept = kept
        self._peers = peers
        self._pieces = pieces_to_send(state.inventory, state.replicated) if state.replicated else None
        self._backend = backend
        self._allowance = allowance
        self._report = report
        self._copy = copy
        self._views = [views(slot, state.inventory) for slot in segment.slots]
        self._changed = threading.Condition()
        self._copies: queue.SimpleQueue[tuple[int, int, int] | None] = queue.SimpleQueue()
        self._rounds: queue.SimpleQueue[tuple[int, int | None] | None] = queue.SimpleQueue()
        self._copied = threading.Event()
        self._copied.set()
        self._ended = False
        self._unprotected_since = resumed_from
        self._missed = 0
        self.stalled_s = 0.0
        self._threads = [
            threading.Thread(target=self._guard, args=(body,), name=body.__name__.strip("_"), daemon=True)
            for body in (self._copy_loop, self._round_loop)
        ]
        for thread in self._threads:
            thread.start()

    def protect(self, generation: int) -> None:
        """Starts protecting the state as it is now; called on entry to the step after ``generation``.

        Raises:
            Interrupted: a newer epoch was published meanwhile.
        """
        held = self._ledger.slot_of(generation)
        if held is not None:
            # Resumed from this very generation: it lies here already, but perhaps not at the partner's.
            self._rounds.put((generation, held))
            return
        index = self._writable()
        if index is None:
            self._note_unprotected()
            self._rounds.put((generation, None))
            return
        with self._changed:
            self._ledger.write(index, generation)
        slot = self._segment.slots[index]
        slot.open()
        for place, tensor in self._state.volatile():
            self._views[index][place].copy_(tensor)
        record_bytes = slot.write_record(self._state.record())
        self._copied.clear()
        self._copies.put((generation, index, record_bytes))

    def seal(self, generation: int) -> int:
        """Protects the state as it is now, whatever that waits for; returns the slot once it is sealed.

        Raises:
            Interrupted: a newer epoch was published meanwhile.
        """
        if self._ledger.slot_of(generation) is None:
            with self._changed:
                self._changed.wait_for(lambda: self._ended or self._ledger.writable() is not None)
        self.protect(generation)
        index = self._ledger.slot_of(generation)
        assert index is not None
        with self._changed:
            self._changed.wait_for(lambda: self._ended or self._is_sealed(index, generation))
            if not self._is_sealed(index, generation):
                raise Interrupted
        return index

    def wait_copied(self) -> None:
        """Returns when the state may be changed; called before ``optimizer.step``."""
        if not self._copied.is_set():
            started = time.perf_counter()
            self._copied.wait()
            self.stalled_s += time.perf_counter() - started

    def wait_committed(self, generation: int) -> None:
        """Returns when ``generation`` is complete on all ranks.

        Raises:
            Interrupted: a newer epoch was published meanwhile.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._ended or self._is_committed(generation))
            if not self._is_committed(generation):
                raise Interrupted

    def interrupt(self) -> None:
        """Ends what waits here; the copy in progress is finished, it may be the newest complete one."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def settle(self, timeout_s: float) -> bool:
        """Ends both threads; False when one is stuck. The backend must have been aborted."""
        self.interrupt()
        self._copies.put(None)
        self._threads[0].join(timeout_s)
        self._rounds.put(None)
        self._threads[1].join(timeout_s)
        return not any(t.is_alive() for t in self._threads)

    @property
    def protected(self) -> int | None:
        """The newest generation that is complete with all its copies; None while the job is unprotected."""
        return self._ledger.committed if self._unprotected_since is None else None

    def _is_sealed(self, index: int, generation: int) -> bool:
        header = self._segment.slots[index].header()
        return header is not None and header.generation == generation

    def _is_committed(self, generation: int) -> bool:
        return self._ledger.committed is not None and self._ledger.committed >= generation

    def _writable(self) -> int | None:
        with self._changed:
            started = time.perf_counter()
            patience = self._allowance.available(started)
            self._changed.wait_for(lambda: self._ended or self._ledger.writable() is not None, patience)
            waited = time.perf_counter() - started
            self._allowance.spend(waited)
            self.stalled_s += waited
            if self._ended:
                raise Interrupted
            return self._ledger.writable()

    def _copy_loop(self) -> None:
        while (job := self._copies.get()) is not None:
            generation, index, record_bytes = job
            try:
                self._copy([(self._views[index][place], live) for place, live in self._state.stable()])
            finally:
                self._copied.set()
            self._segment.slots[index].seal(self._epoch, generation, record_bytes)
            with self._changed:
                self._changed.notify_all()
            self._rounds.put((generation, index))

    def _round_loop(self) -> None:
        while (job := self._rounds.get()) is not None:
            if self._ended:
                continue
            generation, index = job
            committed = self._round(generation, index)
            with self._changed:
                self._ledger.resolve(generation, committed)
                self._changed.notify_all()
            if not committed:
                self._missed += 1
                self._note_unprotected()
            elif self._unprotected_since is not None:
                since, missed = self._unprotected_since, self._missed
                self._unprotected_since, self._missed = None, 0
                self._report("protected", generation=generation, unprotected_since=since, missed=missed)

    def _note_unprotected(self) -> None:
        if self._unprotected_since is None:
            self._unprotected_since = self._ledger.committed
            self._report("unprotected", since=self._ledger.committed)

    def _round(self, generation: int, index: int | None) -> bool:
        """Runs the round of one generation; True when it is complete on all ranks."""
        slot = None if index is None else self._segment.slots[index]
        works = []
        for partner in self._partners:
            works += send_slot(self._backend, slot, index or 0, partner, self._pieces_for(partner))
        complete = slot is not None
        for rank in sorted(self._kept):
            try:
                pieces, slots = self._pieces_for(rank), self._kept[rank].slots
                complete &= receive_slot(self._backend, slots, rank, self._epoch, pieces, slot) == generation
            except StateError as error:
                complete = False
                self._report("damaged", rank=rank, error=str(error))
        for work in works:
            work.wait()
        return self._all_hold(generation if complete else _SKIPPED) == generation

    def _pieces_for(self, other: int) -> Pieces | None:
        return self._pieces if other in self._peers else None

    def _all_hold(self, generation: int) -> int | None:
        """The generation that every rank passed, or None when they differ."""
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MIN
        ends = torch.tensor([generation, -generation], dtype=torch.int64)
        self._backend.allreduce([ends], options).wait()
        low, high = int(ends[0]), -int(ends[1])
        return low if low == high else None

    def _guard(self, body: Callable[[], None]) -> None:
        try:
            body()
        except Exception as error:
            self._copied.set()
            if not self._ended:
                self._report("broken", error=f"{type(error).__name__}: {error}"[:500])
            self.interrupt()


def _bytes_tensor(buffer: bytearray) -> torch.Tensor:
    return torch.frombuffer(buffer, dtype=torch.uint8)


def _body(slot: Slot, record_bytes: int, pieces: Pieces | None) -> list[torch.Tensor]:
    whole = [(0, len(slot.payload))] if pieces is None else pieces
    payload = [chunk for start, end in whole for chunk in _chunks(slot.payload[start:end])]
    return payload + _chunks(slot.record[:record_bytes])


def _chunks(memory: memoryview) -> list[torch.Tensor]:
    return [torch.frombuffer(memory[at : at + _CHUNK], dtype=torch.uint8) for at in range(0, len(memory), _CHUNK)]
