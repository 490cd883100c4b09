"""The list of tensors that make up one rank's training state, and where each lies in a segment.

Pure: no torch, no Megatron. ``megatron_adapter.state`` fills it from a live model and optimizer;
snapshot, replica, restore, verification and tests all speak of tensors by the names given here.
"""

from __future__ import annotations

import enum
import hashlib
import json
import math
from dataclasses import dataclass
from functools import cached_property

from megatron_resilience.state.segment import Shape

ALIGNMENT = 64
"""Bytes. Every tensor starts at a multiple of it, so that any dtype can be viewed in place."""

ITEM_SIZES = {
    "float64": 8,
    "int64": 8,
    "float32": 4,
    "int32": 4,
    "bfloat16": 2,
    "float16": 2,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
}


class Kind(enum.StrEnum):
    """What a tensor is to training; verification and re-layout treat the kinds differently."""

    MASTER = "master"
    """The value the optimizer updates; the truth that model parameters are rebuilt from."""
    MOMENT = "moment"
    """An optimizer state of its master's shape (Adam's ``exp_avg``, ``exp_avg_sq``)."""
    STEP = "step"
    """The optimizer's own count of steps for one parameter (torch Adam keeps it so)."""
    FROZEN = "frozen"
    """A model parameter that no optimizer updates."""
    BUFFER = "buffer"
    """A module's buffer, such as a router's expert bias."""
    SCALER = "scaler"
    """The gradient scaler's tensors (fp16)."""
    RNG = "rng"
    """The raw state of a random number generator."""


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of a rank's state.

    Attributes:
        name: unique in the rank, stable over restarts, e.g. ``0.decoder.layers.0...weight/exp_avg``.
        kind: what it is to training.
        dtype: torch's name without the prefix, e.g. ``"float32"``.
        shape: of this rank's own piece, in elements.
    """

    name: str
    kind: Kind
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor itself, without padding."""
        return math.prod(self.shape) * ITEM_SIZES[self.dtype]


@dataclass(frozen=True)
class Inventory:
    """All tensors of one rank's state in a fixed order, with their offsets in a segment's payload.

    Two processes that hold the same rank of the same job at the same layout derive the same inventory,
    hence the same :attr:`digest`; a segment of another digest is never read.
    """

    specs: tuple[TensorSpec, ...]

    def __post_init__(self) -> None:
        names = [s.name for s in self.specs]
        if len(set(names)) != len(names):
            twice = sorted({n for n in names if names.count(n) > 1})
            raise ValueError(f"tensor names must be unique in a rank, found twice: {twice[:5]}")

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Byte offset of each tensor in the payload, aligned to :data:`ALIGNMENT`."""
        result, at = [], 0
        for spec in self.specs:
            result.append(at)
            at += -(-spec.nbytes // ALIGNMENT) * ALIGNMENT
        return tuple(result)

    @cached_property
    def payload_bytes(self) -> int:
        """Bytes of one generation's tensors, padding included."""
        if not self.specs:
            return 0
        return self.offsets[-1] + -(-self.specs[-1].nbytes // ALIGNMENT) * ALIGNMENT

    @cached_property
    def digest(self) -> bytes:
        """16 bytes that name this layout of a segment: equal digests, interchangeable segments."""
        text = json.dumps([[s.name, s.kind.value, s.dtype, list(s.shape)] for s in self.specs])
        return hashlib.blake2b(text.encode(), digest_size=16).digest()

    @property
    def shape(self) -> Shape:
        """What a partner must know to keep a copy."""
        return Shape(self.payload_bytes, self.digest)

    def bytes_by_kind(self) -> dict[Kind, int]:
        """Bytes per kind of state, for the preflight's table."""
        result: dict[Kind, int] = {}
        for spec in self.specs:
            result[spec.kind] = result.get(spec.kind, 0) + spec.nbytes
        return result
