"""The catalogue: all logical tensors of a model, in the order in which Megatron's modules hold them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from megatron_resilience.vps.tensors import TWICE, Coordinate, Cut, Kind, LogicalTensor, Place


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
        self._check_steps()

    def _check_steps(self) -> None:
        steps = [t for t in self.tensors if t.kind is Kind.STEP]
        by_name = {t.name: t for t in self.tensors} if steps else {}
        for step in steps:
            parameter = by_name.get(step.of)
            if parameter is None or parameter.kind is not Kind.PARAMETER:
                raise ValueError(f"{step.name} counts the steps of {step.of!r}, which is no parameter of {self.name}")
            if (step.place, step.layer, step.expert) != (parameter.place, parameter.layer, parameter.expert):
                raise ValueError(f"{step.name} is not in the place of its parameter {step.of}")

    def with_tensors(self, more: Iterable[LogicalTensor]) -> Catalogue:
        """The same model with further state."""
        return Catalogue(self.name, self.layers, self.experts, (*self.tensors, *more))

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
        known: dict[Cut | None, int] = {None: -1}
        self.cut_number = _ints([known.setdefault(t.cut, len(known) - 1) for t in tensors])
        """Number of the tensor's cut in `cuts`, -1 for none."""
        self.cuts = tuple(cut for cut in known if cut is not None)
        self.is_cut = self.cut_number >= 0
        self.is_step = np.array([t.kind is Kind.STEP for t in tensors], bool)
        self.on_ranks = np.array([t.place is Place.RANKS for t in tensors], bool)
        self.coordinate = _ints([(c.tp, c.ep, c.pp) if (c := t.coordinate) else (-1, -1, -1) for t in tensors]).reshape(
            -1, 3
        )
        """(tp, ep, pp) that the place RANKS asks for."""
        self.is_flat = np.array([t.kind is Kind.PARAMETER for t in tensors], bool)
        self.is_model = self.is_flat | np.array([t.kind is Kind.FROZEN for t in tensors], bool)
        self.is_twice = np.array([t.place in TWICE for t in tensors], bool)
        self.dtype_names, self.dtype = np.unique([t.dtype for t in tensors], return_inverse=True)
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
    if tensor.of:
        entry["of"] = tensor.of
    if tensor.coordinate:
        entry["coordinate"] = vars(tensor.coordinate)
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
        if "coordinate" in entry:
            fields["coordinate"] = Coordinate(**entry["coordinate"])
        tensors.append(LogicalTensor(**fields))
    return Catalogue(data["name"], data["layers"], data["experts"], tuple(tensors))
