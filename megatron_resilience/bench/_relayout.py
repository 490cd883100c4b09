"""In a rank of the bench of changes of layout: asks for a change when the bench wants one, and notes what it takes.

Files in the job's folder, one JSON object per line, ``{name}{rank}.jsonl``:

* ``holds``: a rank in its third step: its tensors' bytes;
* ``prepared``: a rank of the next world waits for its state: seconds of processor time so far, its tensors' bytes;
* ``parked``: a rank of the old world stands: its tensors' bytes, and when it came (``stopped``);
* ``stepped``: a rank has taken its first step: its marks of the time since it was told to join;
* ``transfer``: bytes by peer that an endpoint will receive, its largest staging buffer; rank 0: both layouts and the model;
* ``moved``: the peak of the staging buffers;
* ``part``: one part of moving the state, by :data:`MOVES`' names;
* ``checkpoint``: one call of Megatron's ``save_checkpoint`` or ``load_checkpoint``.
"""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

WISH = "wish"
"""File with a layout; rank 0 takes it away and asks for the layout."""
LOAD_AGAIN = "load-again"
"""File with an iteration: on entry to it every rank loads the checkpoint once more, and again with
``--ckpt-fully-parallel-load``."""
MOVES = ("seals", "run", "exchange", "compare")
"""Parts of moving the state: the old ranks' seals are checked; everything goes to its place, and within that what other nodes
send (with packing, hashing and unpacking); all of it is compared with its source."""


class Notes:
    """This rank's files.

    Args:
        folder: of the job.
        rank: of this process.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder, self._rank = folder, rank
        self._model: Any = None
        self._optimizer: Any = None

    def write(self, name: str, **fields: Any) -> None:
        """A line."""
        with (self._folder / f"{name}{self._rank}.jsonl").open("a") as file:
            file.write(json.dumps({"time": time.time(), **fields}) + "\n")

    def holds(self, model: Any, optimizer: Any) -> None:
        """What this rank trains."""
        self._model, self._optimizer = model, optimizer

    def tensors(self) -> dict[str, int]:
        """Bytes of its tensors: ``model`` (parameters, buffers), ``gradients``, ``optimizer`` (masters, moments)."""
        return tensor_bytes(self._model, self._optimizer)


def install(folder: Path, rank: int) -> Callable[[Any, Any, Any], None]:
    """Wraps what is to be noted; returns what to call on entry to a step, with model, optimizer and scheduler."""
    from megatron.training import get_args, training

    from megatron_resilience import api
    from megatron_resilience.control.link import AgentLink
    from megatron_resilience.deadpool.session import Session
    from megatron_resilience.hotswap.arrival import Arrival, Shelves
    from megatron_resilience.hotswap.engine import Transfer

    notes = Notes(folder, rank)
    wish, again = folder / WISH, folder / LOAD_AGAIN

    def enter(model: Any, optimizer: Any, scheduler: Any) -> None:
        notes.holds(model, optimizer)
        if get_args().curr_iteration == 2:
            notes.write("holds", tensors=notes.tensors())
        if rank == 0 and wish.exists():
            layout = wish.read_text()
            wish.unlink()
            notes.write("asked", layout=layout)
            api.request_layout(layout)
        if again.exists() and again.read_text() == str(get_args().curr_iteration + 1):
            # Which way is quicker depends on the storage.
            for parallel in (False, True):
                get_args().ckpt_fully_parallel_load = parallel
                training.load_checkpoint(model, optimizer, scheduler)

    send = AgentLink.send

    @functools.wraps(send)
    def noted_send(self: AgentLink, kind: str, *args: Any, **kwargs: Any) -> None:
        if kind == "prepared":
            notes.write("prepared", cpu_s=time.process_time(), tensors=notes.tensors())
        send(self, kind, *args, **kwargs)
        if kind == "parked":
            # After the word is out: it takes nothing from the pause but processor time.
            notes.write("parked", tensors=notes.tensors(), stopped=kwargs["stopped"])
        elif kind == "stepped":
            notes.write("stepped", **kwargs["times"])

    arrive, move, init = Session._arrive, Arrival.move, Transfer.__init__

    @functools.wraps(arrive)
    def noted_arrive(self: Session, epoch: Any) -> int:
        relayout: Any = self._relayout
        notes.holds(relayout.live._model, relayout.live._optimizer)
        return arrive(self, epoch)

    @functools.wraps(init)
    def noted_init(self: Transfer, problem: Any, endpoint: int, *args: Any, **kwargs: Any) -> None:
        init(self, problem, endpoint, *args, **kwargs)
        receives: dict[int, int] = {}
        for (_, peer), size in self.plan.receives.per_message().items():
            receives[peer] = receives.get(peer, 0) + size
        chunks = [c.size for e in self._exchanges for c in (e.outgoing, e.incoming) if c is not None]
        more: dict[str, Any] = {}
        if rank == 0:
            more = {"catalogue": problem.source.catalogue.to_json(), "ranks_per_node": problem.cluster.ranks_per_node}
            more |= {"source": asdict(problem.source.layout), "target": asdict(problem.target.layout)}
            more |= {"sharded": bool(problem.source.sharded_optimizer)}
        notes.write("transfer", receives=receives, buffer=max(chunks, default=0), **more)

    @functools.wraps(move)
    def noted_move(self: Arrival, *args: Any, **kwargs: Any) -> None:
        move(self, *args, **kwargs)
        notes.write("moved", staging=self.tally.peak)

    AgentLink.send, Session._arrive = noted_send, noted_arrive  # type: ignore[method-assign]
    Transfer.__init__, Arrival.move = noted_init, noted_move  # type: ignore[method-assign]
    for name in ("save_checkpoint", "load_checkpoint"):
        setattr(training, name, _timed(notes, "checkpoint", name, getattr(training, name)))
    moving = ((Shelves, "open"), (Transfer, "run"), (Transfer, "_exchange"), (Transfer, "verify"))
    for what, (owner, method) in zip(MOVES, moving, strict=True):
        setattr(owner, method, _timed(notes, "part", what, getattr(owner, method)))
    return enter


def _timed(notes: Notes, name: str, what: str, call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(call)
    def timed(*args: Any, **kwargs: Any) -> Any:
        start = time.time()
        result = call(*args, **kwargs)
        notes.write(name, what=what, start=start, end=time.time())
        return result

    return timed


def tensor_bytes(model: Any, optimizer: Any) -> dict[str, int]:
    """See :meth:`Notes.tensors`; memory that several tensors share is counted once, where it comes first."""
    from megatron_resilience.megatron_adapter.tenancy import training_tensors

    seen: set[int] = set()
    found = training_tensors(model, optimizer)
    found["model"] += [buffer for chunk in model for buffer in chunk.module.buffers()]
    return {kind: _unique(tensors, seen) for kind, tensors in found.items()}


def _unique(tensors: Iterable[torch.Tensor], seen: set[int]) -> int:
    total = 0
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            total += storage.nbytes()
    return total
