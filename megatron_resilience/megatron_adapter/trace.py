"""Taking the trace (see ``observe.trace``) from Megatron 0.19's ``train_step``, and the state at the end of training."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import torch

from megatron_resilience.observe.trace import TraceWriter, digest, write_private


def install(directory: str) -> None:
    """Wraps ``megatron.training.training.train_step`` of this rank; call once, before ``pretrain``.

    Args:
        directory: where ``rank{r}.jsonl`` goes. The file is opened at the first step, when the rank is
            known.
    """
    from megatron.core.rerun_state_machine import RerunDataIterator
    from megatron.training import get_args, training

    train_step = training.train_step
    draw = RerunDataIterator.__next__
    writer: TraceWriter | None = None
    samples: list[str] = []

    # On the class, not by wrapping the iterators: the rerun machine insists on their exact type.
    @functools.wraps(draw)
    def noted_draw(self: Any) -> Any:
        batch = draw(self)
        samples.append(digest(batch["tokens"].cpu().contiguous().numpy().tobytes()))
        return batch

    @functools.wraps(train_step)
    def traced_step(*args: Any, **kwargs: Any) -> Any:
        nonlocal writer
        megatron_args = get_args()
        if writer is None:
            writer = TraceWriter(directory, megatron_args.rank)
        # What evaluation drew since the last step is no part of this one.
        samples.clear()
        result = train_step(*args, **kwargs)
        loss, grad_norm = result[0], result[5]
        writer.write(
            # train() counts from 0 and logs the number from 1.
            iteration=megatron_args.curr_iteration + 1,
            loss={name: float(value) for name, value in loss.items()},
            grad_norm=None if grad_norm is None else float(grad_norm),
            samples=list(samples),
        )
        return result

    RerunDataIterator.__next__ = noted_draw
    training.train_step = traced_step
    train = training.train

    def traced_train(forward_step: Any, model: Any, optimizer: Any, scheduler: Any, *rest: Any, **kwargs: Any) -> Any:
        result = train(forward_step, model, optimizer, scheduler, *rest, **kwargs)
        rank = get_args().rank
        write_private(Path(directory) / f"state{rank}.json", json.dumps(final_state(model, optimizer, scheduler)))
        return result

    training.train = traced_train


def final_state(model: Any, optimizer: Any, scheduler: Any) -> dict[str, Any]:
    """Digest of every tensor of this rank's training state by name, and of its parameters; its scalars.

    Reads Megatron's live objects through the inventory, whether or not anything protects them.
    """
    from megatron.training import get_args

    from megatron_resilience.megatron_adapter.state import MegatronState, named_parameters

    state = MegatronState(model, optimizer, scheduler, get_args())
    tensors = dict(state.stable()) | dict(state.volatile())
    digests = {spec.name: _digest(tensors[i]) for i, spec in enumerate(state.inventory.specs)}
    digests |= {f"{name}/parameter": _digest(p) for name, p in named_parameters(model)}
    record = state.record()
    return {"tensors": digests} | {key: record[key] for key in ("args", "scheduler", "groups", "scalers")}


def _digest(tensor: torch.Tensor) -> str:
    return digest(tensor.detach().cpu().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes())
