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
    """Adam's counter of one parameter, a scalar on every rank that owns a part of the parameter."""
    RNG = "rng"
    """One RNG stream."""
    SCALAR = "scalar"
    """Scheduler, grad scaler, consumed samples and the like."""


class Place(Enum):
    """Which pipeline stage has a tensor."""

    FIRST = "first"
    LAYER = "layer"
    LAST = "last"
    TIED = "tied"
    """On the first stage, and (PP > 1) as a second copy on the last."""


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

    def local(self, block: int, tp: int, vocabulary_multiple: int) -> int:
        """Size of one rank's slice of ``block``, padding included.

        Raises:
            ValueError: ``tp`` does not divide the block, naming the dimension and the nearest sizes that do.
        """
        size = self.blocks[block]
        if self.padded:
            return -(-size // (vocabulary_multiple * tp)) * vocabulary_multiple
        units = size // self.unit
        if units % tp:
            near = nearest_divisors(units, tp)
            raise ValueError(f"TP={tp} does not divide the {units} {self.dimension}; nearest TP that do: {near}")
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
        layer: number of the transformer layer, -1 outside layers.
        expert: number of the expert over the whole model, -1 for dense tensors.
        cut: how TP (ETP for experts) cuts it; None when it is replicated over TP.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str = "bfloat16"
    kind: Kind = Kind.PARAMETER
    place: Place = Place.LAYER
    layer: int = -1
    expert: int = -1
    cut: Cut | None = None

    def __post_init__(self) -> None:
        if self.dtype not in DTYPE_BYTES:
            raise ValueError(f"{self.name}: unknown dtype {self.dtype!r}; known: {', '.join(DTYPE_BYTES)}")
        if (self.place is Place.LAYER) != (self.layer >= 0):
            raise ValueError(f"{self.name}: place {self.place.value!r} does not go with layer {self.layer}")
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
