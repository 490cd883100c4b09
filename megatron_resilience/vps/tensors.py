"""Logical tensors: what exists once, whole, whatever the layout, and how each is cut by a layout.

Expert parallelism and pipeline parallelism place whole tensors on ranks; only tensor parallelism cuts one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int64": 8, "int32": 4, "uint8": 1, "float64": 8}


class Kind(Enum):
    """What a logical tensor is, which decides who owns it and which fields it has."""

    PARAMETER = "parameter"
    """Trainable: fp32 master and two moments, in flat distributed-optimizer ranges."""
    FROZEN = "frozen"
    """Parameter without gradient: on every data-parallel rank, in its own dtype."""
    BUFFER = "buffer"
    """Non-parameter state (router bias, FP8 scales): on every data-parallel rank."""
    STEP = "step"
    """torch Adam's counter of the parameter ``of``, a scalar on every rank whose flat shard has a part of it."""
    RNG = "rng"
    """One RNG stream, on the ranks with its ``coordinate``."""
    SCALAR = "scalar"
    """Scheduler, grad scaler, consumed samples, FusedAdam's counter and the like, on every rank."""


class Place(Enum):
    """Which pipeline stage, or which ranks, have a tensor."""

    FIRST = "first"
    LAYER = "layer"
    LAST = "last"
    TIED = "tied"
    """On the first stage, and (PP > 1) as a second copy on the last, as its output layer."""
    MTP_EMBEDDING = "mtp_embedding"
    """On the first stage, and (PP > 1) as a second copy on the last, where multi-token prediction embeds."""
    RANKS = "ranks"
    """On the ranks with the tensor's ``coordinate``, whatever their stage holds."""


TWICE = (Place.TIED, Place.MTP_EMBEDDING)
"""Places with a second copy when PP > 1."""


@dataclass(frozen=True)
class Coordinate:
    """Ranks that share a position in a layout; -1 is any. A layout without such ranks does not have the tensor.

    Attributes:
        tp: TP rank; ETP rank where ``ep`` is given.
        ep: EP rank; given, the ranks are those of the expert grid.
        pp: pipeline rank.
    """

    tp: int = -1
    ep: int = -1
    pp: int = -1


@dataclass(frozen=True)
class Cut:
    """How tensor parallelism cuts a tensor: each block of ``axis`` is cut evenly, and a rank's part is the
    concatenation of its slices of all blocks.

    One block is the plain column- or row-parallel case (grouped QKV too: Megatron stores it group by group).
    Two equal blocks are GLU's [gate | up]; a partition stride s is s equal blocks; Mamba's in_proj has the
    five blocks z, x, B, C, dt.

    Attributes:
        axis: dimension that is cut.
        blocks: sizes along ``axis`` in elements, summing to the tensor's extent.
        unit: elements along ``axis`` that must stay together (a query group, an attention head).
        padded: extent grows to a multiple of ``multiple * TP`` (the vocabulary); padding is not state.
    """

    axis: int
    blocks: tuple[int, ...]
    unit: int = 1
    padded: bool = False
    dimension: str = "features"
    """The word of the field for what is cut ("query groups"), used in errors."""

    def local(self, block: int, tp: int, vocabulary_multiple: int, size_name: str = "TP") -> int:
        """Size of one rank's slice of ``block``, padding included; ``size_name`` is what errors call ``tp``.

        Raises:
            ValueError: ``tp`` does not divide the block, naming the dimension and the nearest sizes that do.
        """
        size = self.blocks[block]
        if self.padded:
            return -(-size // (vocabulary_multiple * tp)) * vocabulary_multiple
        units = size // self.unit
        if units % tp:
            near = nearest_divisors(units, tp)
            raise ValueError(
                f"{size_name}={tp} does not divide the {units} {self.dimension}; nearest {size_name} that do: {near}"
            )
        return size // tp


def nearest_divisors(number: int, wanted: int) -> str:
    """The divisors of ``number`` just below and above ``wanted``, as text for an error."""
    divisors = [d for d in range(1, number + 1) if number % d == 0]
    below = [d for d in divisors if d <= wanted][-1:]
    above = [d for d in divisors if d > wanted][:1]
    return " or ".join(map(str, below + above))


@dataclass(frozen=True)
class LogicalTensor:
    """One logical tensor.

    Attributes:
        name: unique; layers and experts are numbered over the whole model.
        shape: logical shape, without padding.
        dtype: dtype of the model's copy (a key of DTYPE_BYTES); masters and moments are fp32 always.
        kind: what it is.
        place: pipeline stage; LAYER needs ``layer``.
        layer: number of the transformer layer, -1 outside the decoder's layers.
        expert: number of the expert over the whole model, -1 for dense tensors.
        cut: how TP (ETP for experts) cuts it; None when it is replicated over TP.
        of: name of the parameter that a STEP counts for.
        coordinate: for RANKS.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str = "bfloat16"
    kind: Kind = Kind.PARAMETER
    place: Place = Place.LAYER
    layer: int = -1
    expert: int = -1
    cut: Cut | None = None
    of: str = ""
    coordinate: Coordinate | None = None

    def __post_init__(self) -> None:
        if self.dtype not in DTYPE_BYTES:
            raise ValueError(f"{self.name}: unknown dtype {self.dtype!r}; known: {', '.join(DTYPE_BYTES)}")
        if (self.place is Place.LAYER) != (self.layer >= 0):
            raise ValueError(f"{self.name}: place {self.place.value!r} does not go with layer {self.layer}")
        if (self.kind is Kind.STEP) != bool(self.of):
            raise ValueError(f"{self.name}: a step, and nothing else, says of which parameter it is")
        if (self.place is Place.RANKS) != (self.coordinate is not None):
            raise ValueError(f"{self.name}: place {Place.RANKS.value!r}, and no other, needs a coordinate")
        if self.cut and sum(self.cut.blocks) != self.shape[self.cut.axis]:
            raise ValueError(
                f"{self.name}: blocks {self.cut.blocks} do not sum to the extent of axis {self.cut.axis} "
                f"of shape {self.shape}"
            )

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def bytes_per_element(self) -> int:
        """Bytes that one element's state has: master and two moments in fp32, or the tensor itself."""
        return 12 if self.kind is Kind.PARAMETER else DTYPE_BYTES[self.dtype]

    @property
    def canonical_shape(self) -> tuple[int, int, int]:
        """(outer, cut, inner): the shape with all dimensions before and after the cut one folded."""
        axis = self.cut.axis if self.cut else 0
        if not self.shape:
            return (1, 1, 1)
        return (math.prod(self.shape[:axis]), self.shape[axis], math.prod(self.shape[axis + 1 :]))
