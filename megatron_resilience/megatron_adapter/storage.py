"""Live device state as the router sees it: one-dimensional storage by logical tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron_resilience.hotswap.fragments import Storage
from megatron_resilience.megatron_adapter.buckets import chained
from megatron_resilience.megatron_adapter.catalogue import LayoutMismatch, logical_names
from megatron_resilience.megatron_adapter.state import masters, prime
from megatron_resilience.vps.local import storage_size
from megatron_resilience.vps.space import StateSpace

MOMENTS = ("exp_avg", "exp_avg_sq")


def live_storage(space: StateSpace, rank: int, chunks: Sequence[Any], optimizer: Any) -> Storage:
    """The storage of everything in ``space`` that modules and optimizer hold; random streams and scalars are
    `state.MegatronState`'s.

    Args:
        space: as `catalogue.live_space` found it, with steps if torch's Adam counts them per parameter.
        chunks: the DDP-wrapped model chunks.
        optimizer: Megatron's; moments that it has not made yet are made.

    Raises:
        LayoutMismatch: a tensor of another size than predicted, or a persistent buffer that nobody described.
    """
    layout, numbers = space.layout, space.catalogue.number_of
    offset = layout.coordinates(layout.expert, rank)[1] * (space.catalogue.experts // layout.ep)
    keys: dict[Any, tuple[int, int]] = {}
    out: Storage = {}
    for chunk in chunks:
        for name, parameter in logical_names(chunk, offset):
            keys[parameter] = _key(space, rank, name)
            if not space.flat[keys[parameter][0]] and not parameter.requires_grad:
                out[keys[parameter]] = {"value": parameter.data.view(-1)}
        for name, buffer in logical_names(chunk, offset, buffers=True):
            if name not in numbers:
                raise LayoutMismatch(f"rank {rank}: nobody described the buffer {name}; the catalogue needs it")
            out[numbers[name], 0] = {"value": buffer.view(-1)}
    for part in chained(optimizer):
        prime(part.optimizer)
        for parameter, master in masters(part):
            number, copy = keys[parameter]
            moments = part.optimizer.state[master]
            out[number, copy] = {"master": master.data.view(-1)} | {m: moments[m].view(-1) for m in MOMENTS}
            step = numbers.get(f"{space.catalogue.tensors[number].name}/step")
            if step is not None:
                out[step, copy] = {"value": moments["step"].view(-1)}
    for (number, copy), fields in out.items():
        size = storage_size(space, rank, number, copy)
        for field, tensor in fields.items():
            if tensor.numel() != size:
                raise LayoutMismatch(
                    f"rank {rank}: {field} of {space.catalogue.tensors[number].name} has {tensor.numel()} elements, "
                    f"but {size} were predicted for {layout}"
                )
    return out


def _key(space: StateSpace, rank: int, name: str) -> tuple[int, int]:
    """(number, copy) of a parameter here: on the last stage of several the second copy of an embedding."""
    numbers, inst = space.catalogue.number_of, space.instances
    number = numbers.get(name, numbers.get("embedding.word_embeddings.weight", -1))
    pp = space.layout.coordinates(space.layout.dense, rank)[3]
    second = inst.second[number] >= 0 and inst.pp[inst.second[number]] == pp
    return number, int(second)
