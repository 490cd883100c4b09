"""The catalogue: all logical tensors of a model, in the order in which Megatron's modules hold them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from megatron_resilience.vps.tensors import Cut, Kind, LogicalTensor, Place


@dataclass(frozen=True)
class Catalogue:
    """All logical tensors of a model.

    Attributes:
        name: what the model is called.
        layers: number of transformer layers.
        experts: number of routed experts per MoE layer, 0 in dense models.
        tensors: in the order of ``named_parameters()`` of the whole model on one rank (PP=1, EP=1).
    """

    name: str
    layers: int
    experts: int
    tensors: tuple[LogicalTensor, ...]

    def __post_init__(self) -> None:
        names = {t.name for t in self.tensors}
        if len(names) != len(self.tensors):
            raise ValueError(f"catalogue {self.name}: two tensors share a name")

    @cached_property
    def columns(self) -> Columns:
        """The same as arrays, for vectorised work."""
        return Columns(self.tensors)

    @cached_property
    def number_of(self) -> dict[str, int]:
        """Index of each tensor by name."""
        return {t.name: i for i, t in enumerate(self.tensors)}

    @property
    def state_bytes(self) -> int:
        """Bytes of the whole state, each element once."""
        return sum(t.numel * t.bytes_per_element for t in self.tensors)

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready description, the inverse of `catalogue_from_json`."""
        return {
            "name": self.name,
            "layers": self.layers,
            "experts": self.experts,
            "tensors": [_tensor_to_json(t) for t in self.tensors],
        }


class Columns:
    """One int64 array per property, indexed by tensor number."""

    def __init__(self, tensors: Iterable[LogicalTensor]) -> None:
        tensors = list(tensors)
        self.canonical = _ints([t.canonical_shape for t in tensors]).reshape(-1, 3)
        self.layer = _ints([t.layer for t in tensors])
        self.expert = _ints([t.expert for t in tensors])
        self.is_cut = np.array([t.cut is not None for t in tensors], bool)
        self.is_flat = np.array([t.kind is Kind.PARAMETER for t in tensors], bool)
        self.bytes_per_element = _ints([t.bytes_per_element for t in tensors])


def _ints(values: list[Any]) -> np.ndarray:
    return np.array(values, np.int64)


def _tensor_to_json(tensor: LogicalTensor) -> dict[str, Any]:
    entry: dict[str, Any] = {"name": tensor.name, "shape": list(tensor.shape), "dtype": tensor.dtype}
    entry |= {"kind": tensor.kind.value, "place": tensor.place.value}
    entry |= {"layer": tensor.layer, "expert": tensor.expert}
    if tensor.cut:
        cut = tensor.cut
        entry["cut"] = {"axis": cut.axis, "blocks": list(cut.blocks), "unit": cut.unit}
        entry["cut"] |= {"padded": cut.padded, "dimension": cut.dimension}
    return entry


def catalogue_from_json(data: dict[str, Any]) -> Catalogue:
    """Read what `Catalogue.to_json` wrote.

    Raises:
        ValueError: an unknown kind or place, naming the tensor and what is known.
    """
    tensors = []
    for entry in data["tensors"]:
        fields = dict(entry, shape=tuple(entry["shape"]))
        for key, enum in (("kind", Kind), ("place", Place)):
            try:
                fields[key] = enum(entry[key])
            except ValueError:
                known = ", ".join(member.value for member in enum)
                raise ValueError(f"{entry['name']}: unknown {key} {entry[key]!r}; known: {known}") from None
        if "cut" in entry:
            fields["cut"] = Cut(**dict(entry["cut"], blocks=tuple(entry["cut"]["blocks"])))
        tensors.append(LogicalTensor(**fields))
    return Catalogue(data["name"], data["layers"], data["experts"], tuple(tensors))
