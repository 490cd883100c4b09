"""The device memory that a rank trains in, given up for a while and taken again in place: no tensor or view is replaced."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from typing import Any

import torch

from megatron_resilience.megatron_adapter.buckets import chained

PATIENCE_S = 60.0
"""How long memory is waited for that a killed process has not given back yet."""


class Tenancy:
    """Storages of parameters, DDP's buffers (parameters, gradients), masters and optimizer states.

    Module buffers stay, and so does host memory that somebody has shown to NumPy: torch does not resize it any more.

    Args:
        model: DDP-wrapped chunks.
        optimizer: Megatron's.
    """

    def __init__(self, model: list[Any], optimizer: Any) -> None:
        self._model, self._optimizer = model, optimizer
        self._left: list[tuple[torch.UntypedStorage, int]] = []

    @property
    def bytes(self) -> int:
        """That are held now."""
        return sum(storage.nbytes() for storage in self._storages())

    def vacate(self) -> None:
        """Gives the memory up, and with it what is in it. Again: nothing."""
        if not self._left:
            for part in chained(self._optimizer):
                # Of masters: what the last step made of the gradients; the next one makes its own.
                for tensor in itertools.chain(*(group["params"] for group in part.optimizer.param_groups)):
                    tensor.grad = None
            self._left = [(storage, storage.nbytes()) for storage in self._storages() if storage.resizable()]
            for storage, _ in self._left:
                storage.resize_(0)

    def reoccupy(self) -> None:
        """Takes it again, zeroed.

        Raises:
            RuntimeError: there is none; :data:`PATIENCE_S` was waited.
        """
        deadline = time.monotonic() + PATIENCE_S
        while self._left:
            storage, size = self._left[-1]
            try:
                storage.resize_(size)
            except RuntimeError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)
                continue
            torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).zero_()
            self._left.pop()

    def _storages(self) -> Iterator[torch.UntypedStorage]:
        seen: set[int] = set()
        for tensor in itertools.chain(*training_tensors(self._model, self._optimizer).values()):
            storage = tensor.untyped_storage()
            if storage.nbytes() and storage.data_ptr() not in seen:
                seen.add(storage.data_ptr())
                yield storage


def training_tensors(model: list[Any], optimizer: Any) -> dict[str, list[torch.Tensor]]:
    """What a rank trains with, by kind: ``model`` (parameters), ``gradients``, ``optimizer`` (masters, states). Several may share
    memory, also those of different kinds."""
    found: dict[str, list[torch.Tensor]] = {"model": [], "gradients": [], "optimizer": []}
    for chunk in model:
        found["model"] += chunk.module.parameters()
        # DDP's own attribute of that name, not torch's method.
        for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
            found["model"] += [t for t in (buffer.param_data,) if t is not None]
            found["gradients"] += [t for t in (buffer.grad_data,) if t is not None]
    for part in chained(optimizer):
        for group in part.optimizer.param_groups:
            found["optimizer"] += group["params"]
            # Of masters, where gradients are not summed in their type.
            found["gradients"] += [param.grad for param in group["params"] if param.grad is not None]
        for state in part.optimizer.state.values():
            found["optimizer"] += [t for t in state.values() if isinstance(t, torch.Tensor)]
    return found
