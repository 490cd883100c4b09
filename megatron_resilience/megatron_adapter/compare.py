"""Comparing parameters across replicas by hash, position by position, on whatever device they are."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import xxhash
from megatron.core import mpu

_PIECE = 1 << 22
_SHIFTED = (1 << 35) - 1
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def fingerprint(tensor: torch.Tensor) -> torch.Tensor:
    """A 64-bit number that depends on every bit and its position.

    Args:
        tensor: any dtype and shape.

    Returns:
        int64 scalar on the tensor's device.
    """
    flat = tensor.detach().reshape(-1).contiguous()
    if flat.device.type != "cpu":
        return device_fingerprint(flat)
    # Not Tensor.numpy(), after which a storage can never be resized (see tenancy).
    number = xxhash.xxh3_64_intdigest(np.from_dlpack(flat.view(torch.uint8)))
    return torch.tensor(number, dtype=torch.uint64).view(torch.int64)


def device_fingerprint(flat: torch.Tensor) -> torch.Tensor:
    """:func:`fingerprint` of a one-dimensional tensor by tensor operations, in pieces that need little memory."""
    words = flat.view(_WORDS[flat.element_size()])
    result = torch.zeros((), dtype=torch.int64, device=flat.device)
    for start in range(0, words.numel(), _PIECE):
        piece = words[start : start + _PIECE].to(torch.int64)
        place = torch.arange(start, start + piece.numel(), device=flat.device, dtype=torch.int64)
        # An odd number of each place's own, and a shift that fills with zeros: both are bijections of 64-bit words, so that
        # one word that changes always shows; words that change places do unless two sums happen to be equal.
        weight = ((place * 0x5851F42D4C957F2D) << 1) + 0x14057B7EF767814F
        mixed = (piece + 0x2545F491) * weight
        result = result * 31 + (mixed ^ ((mixed >> 29) & _SHIFTED)).sum()
    return result


def differing_parameters(model: list[Any]) -> list[str]:
    """Names of parameters that differ from their replicas: across data parallelism, and what is replicated over TP.

    Args:
        model: DDP-wrapped chunks. Collectives over the data-parallel, expert-data-parallel and tensor-parallel groups.
    """
    dense: list[tuple[str, torch.Tensor]] = []
    expert: list[tuple[str, torch.Tensor]] = []
    replicated: list[tuple[str, torch.Tensor]] = []
    for index, chunk in enumerate(model):
        for name, param in chunk.named_parameters():
            label = f"{index}.{name.removeprefix('module.')}"
            is_expert = not getattr(param, "allreduce", True)
            (expert if is_expert else dense).append((label, param))
            if not is_expert and not getattr(param, "tensor_model_parallel", False):
                replicated.append((label, param))
    result = []
    groups = [
        (dense, mpu.get_data_parallel_group(with_context_parallel=True)),
        (expert, mpu.get_expert_data_parallel_group() if expert else None),
        (replicated, mpu.get_tensor_model_parallel_group()),
    ]
    for params, group in groups:
        if params and group is not None and group.size() > 1:
            result += _differing(params, group)
    return sorted(set(result))


def _differing(params: list[tuple[str, torch.Tensor]], group: Any) -> list[str]:
    mine = torch.stack([fingerprint(p) for _, p in params])
    low, high = mine.clone(), mine.clone()
    dist.all_reduce(low, op=dist.ReduceOp.MIN, group=group)
    dist.all_reduce(high, op=dist.ReduceOp.MAX, group=group)
    return [name for (name, _), a, b in zip(params, low.tolist(), high.tolist(), strict=True) if a != b]
