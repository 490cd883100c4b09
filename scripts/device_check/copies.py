"""Copies from the device to the segments that protect it: rate, overlap with compute, and restoring to the bit."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from megatron_resilience.accelerator import Accelerator
from megatron_resilience.deadpool.protection import views
from megatron_resilience.state.inventory import Inventory, Kind, TensorSpec
from megatron_resilience.state.memory import SharedMemory
from megatron_resilience.state.segment import Segment
from scripts.device_check.report import Check

_REPEATS = 5
_MIN_SHARE_OF_RAW = 0.8
_MAX_EXPOSED = 0.2


def check(device: Accelerator, mebibytes: int, matrix: int) -> list[Check]:
    """All of this module.

    Args:
        mebibytes: of state on the device.
        matrix: side of the matrices that are multiplied meanwhile.
    """
    state = _state(device, mebibytes)
    inventory = Inventory(tuple(_spec(name, tensor) for name, tensor in state.items()))
    with _segment(device, inventory) as segment:
        slots = [views(slot, inventory) for slot in segment.slots]
        return [
            *_rate(device, list(state.values()), slots[0]),
            *_overlap(device, list(state.values()), slots[1], matrix),
            *_restore(device, list(state.values()), segment, slots[0]),
        ]


def _state(device: Accelerator, mebibytes: int) -> dict[str, torch.Tensor]:
    """As a rank of the distributed optimizer has it: large fp32 tensors, a few small ones; and any bits, NaNs among them."""
    where, count = device.torch_device(), max(1, mebibytes // 64)
    size = mebibytes * 2**20 // (4 * count)
    state = {f"master{i}": torch.randn(size, device=where) for i in range(count)}
    state["bits"] = torch.randint(-(2**31), 2**31 - 1, (4096,), dtype=torch.int32, device=where).view(torch.float32)
    state["bf16"] = torch.randn(1023, device=where).to(torch.bfloat16)
    state["step"] = torch.tensor(7.0, device=where)
    return state


def _spec(name: str, tensor: torch.Tensor) -> TensorSpec:
    return TensorSpec(name, Kind.MASTER, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))


@contextmanager
def _segment(device: Accelerator, inventory: Inventory) -> Iterator[Segment]:
    memory = SharedMemory.create("device-check", inventory.shape.segment_bytes)
    whole = torch.frombuffer(memory.buffer, dtype=torch.uint8)
    device.pin(whole)
    try:
        yield Segment(memory.buffer, inventory.shape)
    finally:
        device.synchronize()
        device.unpin(whole)
        del whole
        memory.close()


def _copy(device: Accelerator, sources: list[torch.Tensor], targets: list[torch.Tensor]) -> None:
    """As a session does, but for the wait: that is ``synchronize``'s."""
    with device.copy_stream():
        for source, target in zip(sources, targets, strict=True):
            target.copy_(source, non_blocking=True)
        event = device.record_copy_event()
    event.synchronize()


def _best(device: Accelerator, action) -> float:
    """Seconds, the least of some tries after one for warming up."""
    found = []
    for _ in range(_REPEATS + 1):
        device.synchronize()
        started = time.perf_counter()
        action()
        device.synchronize()
        found.append(time.perf_counter() - started)
    return min(found[1:])


def _rate(device: Accelerator, state: list[torch.Tensor], slot: list[torch.Tensor]) -> list[Check]:
    bytes_ = sum(tensor.numel() * tensor.element_size() for tensor in state)
    raw_source = torch.empty(bytes_, dtype=torch.uint8, device=device.torch_device())
    raw_target = device.pinned_empty((bytes_,), torch.uint8)
    plain = [torch.empty(tensor.shape, dtype=tensor.dtype) for tensor in state]
    raw = _best(device, lambda: _copy(device, [raw_source], [raw_target]))
    ours = _best(device, lambda: _copy(device, state, slot))
    pageable = _best(device, lambda: _copy(device, state, plain))
    share = raw / ours
    gib = bytes_ / 2**30
    return [
        Check("copies", "one pinned tensor (the link)", f"{gib / raw:.2f} GiB/s"),
        Check(
            "copies",
            f"{gib:.2f} GiB of state to a pinned segment",
            f"{gib / ours:.2f} GiB/s, {share:.0%} of the link",
            f">= {_MIN_SHARE_OF_RAW:.0%}",
            share >= _MIN_SHARE_OF_RAW if device.name == "cuda" else None,
        ),
        Check("copies", "the same to memory that is not pinned", f"{gib / pageable:.2f} GiB/s"),
    ]


def _overlap(device: Accelerator, state: list[torch.Tensor], slot: list[torch.Tensor], matrix: int) -> list[Check]:
    dtype = torch.bfloat16 if device.name == "cuda" else torch.float32
    left, right = (torch.randn(matrix, matrix, device=device.torch_device(), dtype=dtype) for _ in range(2))
    alone = _best(device, lambda: _copy(device, state, slot))

    def multiply(times: int) -> None:
        for _ in range(times):
            left @ right

    once = _best(device, lambda: multiply(8)) / 8
    # Long enough to hide the copy twice over.
    times = max(4, int(2 * alone / once))
    compute = _best(device, lambda: multiply(times))

    def both() -> None:
        with device.copy_stream():
            for source, target in zip(state, slot, strict=True):
                target.copy_(source, non_blocking=True)
            event = device.record_copy_event()
        multiply(times)
        event.synchronize()

    together = _best(device, both)
    exposed = max(0.0, together - compute) / alone
    return [
        Check("overlap", f"{times} products of {matrix}x{matrix}", f"{1000 * compute:.1f} ms"),
        Check("overlap", "the copy alone", f"{1000 * alone:.1f} ms"),
        Check(
            "overlap",
            "both: how much of the copy is not hidden",
            f"{1000 * together:.1f} ms, {exposed:.0%} exposed",
            f"<= {_MAX_EXPOSED:.0%}",
            exposed <= _MAX_EXPOSED if device.name == "cuda" else None,
        ),
    ]


def _restore(device: Accelerator, state: list[torch.Tensor], segment: Segment, slot: list[torch.Tensor]) -> list[Check]:
    wanted = [_bits(tensor).cpu().clone() for tensor in state]
    streams = {name: stream.clone() for name, stream in device.rng_streams().items()}
    drawn = torch.randn(1000, device=device.torch_device()).cpu().clone()
    segment.slots[0].open()
    _copy(device, state, slot)
    segment.slots[0].seal(1, 1, 0)
    for tensor in state:
        tensor.zero_()
    segment.slots[0].verify()
    for tensor, kept in zip(state, slot, strict=True):
        tensor.copy_(kept)
    device.synchronize()
    differ = sum(not torch.equal(_bits(tensor).cpu(), bits) for tensor, bits in zip(state, wanted, strict=True))
    device.set_rng_streams(streams)
    again = torch.equal(torch.randn(1000, device=device.torch_device()).cpu(), drawn)
    return [
        Check("restore", "tensors that differ in a bit", f"{differ} of {len(state)}", "0", differ == 0),
        Check("restore", "the device's random stream goes on", "the same" if again else "another", "the same", again),
    ]


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)
