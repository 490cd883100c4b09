"""What gloo lacks of what Megatron asks NCCL for."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from megatron_resilience.accelerator.cpu.patching import Patches


def _unequal(tensors: list[torch.Tensor]) -> bool:
    return any(tensor.shape != tensors[0].shape for tensor in tensors)


def _refuse_async(name: str, async_op: bool) -> None:
    if async_op:
        raise NotImplementedError(
            f"{name} of tensors of unequal shapes with async_op=True does not exist on the CPU accelerator; "
            "Megatron 0.19 does not ask for it: if your script does, pass async_op=False"
        )


def _all_gather(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def all_gather(tensor_list, tensor, group=None, async_op=False):
        if not _unequal(tensor_list):
            return original(tensor_list, tensor, group=group, async_op=async_op)
        _refuse_async("all_gather", async_op)
        # Every rank knows all shapes, so all ranks take this branch together.
        rank = dist.get_rank(group)
        for source, output in enumerate(tensor_list):
            piece = (tensor if source == rank else output).contiguous()
            dist.broadcast(piece, group=group, group_src=source)
            output.copy_(piece)
        return None

    return all_gather


def _reduce_scatter(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def reduce_scatter(output, input_list, op=dist.ReduceOp.SUM, group=None, async_op=False):
        if not _unequal(input_list):
            return original(output, input_list, op=op, group=group, async_op=async_op)
        _refuse_async("reduce_scatter", async_op)
        sizes = [tensor.numel() for tensor in input_list]
        # cat copies: the caller's inputs stay untouched.
        whole = torch.cat([tensor.reshape(-1) for tensor in input_list])
        dist.all_reduce(whole, op=op, group=group)
        output.copy_(whole.split(sizes)[dist.get_rank(group)].view_as(output))
        return None

    return reduce_scatter


def _init_process_group(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def init_process_group(backend=None, *args, **kwargs):
        if backend is not None and "nccl" in str(backend):
            raise ValueError(
                f"process group backend {backend!r} needs a GPU, and this process trains on the CPU; "
                "pass --distributed-backend gloo"
            )
        # Megatron binds the group to cuda:LOCAL_RANK; gloo's barrier would then look for a CUDA backend.
        kwargs.pop("device_id", None)
        return original(backend, *args, **kwargs)

    return init_process_group


def install(patches: Patches) -> None:
    """Maps collectives of unequal shapes and the binding of groups to devices."""
    c10d = dist.distributed_c10d
    for name, wrap in (
        ("all_gather", _all_gather),
        ("reduce_scatter", _reduce_scatter),
        ("init_process_group", _init_process_group),
    ):
        wrapper = wrap(getattr(c10d, name))
        patches.replace(c10d, name, wrapper)
        patches.replace(dist, name, wrapper)
