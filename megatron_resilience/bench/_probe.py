"""In a rank of a bench: notes when steps begin and end, one JSON line per step, and waits for its turn.

A line has ``iteration`` (counted from 1, as Megatron logs it), ``start`` and ``end`` (``time.time()``), and what
:mod:`_gauge` adds in a protected job.
"""

from __future__ import annotations

import functools
import json
import os
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

FOLDER, SCRIPT, RELAYOUT = (f"MEGATRON_RESILIENCE_BENCH_{name}" for name in ("FOLDER", "SCRIPT", "RELAYOUT"))
"""Environment variables: where lines go; the training script; set: what :mod:`_relayout` notes is wanted."""
GATE = "gate"
"""File in the folder with the last iteration that may begin; none: all may."""
ARRIVED = "arrived"
"""Prefix of the file with the iteration that a rank waits to begin."""
_POLL_S = 0.001


def install() -> None:
    """Wraps ``train_step`` of this process; after everything else that wraps it."""
    from megatron.training import get_args, training

    from megatron_resilience.bench import _gauge, _relayout

    folder, rank = Path(os.environ[FOLDER]), int(os.environ["RANK"])
    gate = Gate(folder, rank)
    gauge = _gauge.install()
    enter = _relayout.install(folder, rank) if RELAYOUT in os.environ else None
    file = (folder / f"steps{rank}.jsonl").open("a", buffering=1)
    step = training.train_step

    @functools.wraps(step)
    def probed(*args: Any, **kwargs: Any) -> Any:
        iteration = get_args().curr_iteration + 1
        gate.wait(iteration)
        if enter is not None:
            # Model, optimizer, scheduler: their places in Megatron's signature.
            enter(*args[2:5])
        before = gauge()
        start = time.time()
        result = step(*args, **kwargs)
        end = time.time()
        spent = {name: value - before[name] for name, value in gauge().items()}
        file.write(json.dumps({"iteration": iteration, "start": start, "end": end, **spent}) + "\n")
        return result

    training.train_step = probed


class Gate:
    """Lets a rank begin an iteration when it is its job's turn.

    Args:
        folder: with the file :data:`GATE`, or without one.
        rank: this one.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self._path = folder / GATE
        self._arrived = folder / f"{ARRIVED}{rank}"
        self._open = self._read() if self._path.exists() else None

    def wait(self, iteration: int) -> None:
        """Returns when ``iteration`` may begin."""
        if self._open is None or iteration <= self._open:
            return
        self._arrived.write_text(str(iteration))
        while iteration > self._open:
            time.sleep(_POLL_S)
            self._open = self._read()

    def _read(self) -> int:
        return _NUMBER.unpack(self._path.read_bytes())[0]


_NUMBER = struct.Struct("<q")


def open_gate(folder: Path, iteration: int) -> None:
    """Lets a job go on up to and including ``iteration``."""
    partial = folder / f"{GATE}.part"
    partial.write_bytes(_NUMBER.pack(iteration))
    partial.replace(folder / GATE)


Gauge = Callable[[], dict[str, float]]
"""Readings that only grow, by name."""
