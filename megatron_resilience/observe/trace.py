"""A line per training step and rank, exact enough to compare two runs bit by bit.

One file per rank, ``DIR/rank{r}.jsonl``, mode 0600. A line is an object with

* ``rank``: the global rank;
* ``iteration``: the number of the step, counted from 1 as Megatron logs it;
* ``loss``: name of the loss to ``float.hex`` of it; empty on ranks that are not on the last stage;
* ``grad_norm``: ``float.hex``, or null where the optimizer reports none;
* ``samples``: a digest of the token ids of each microbatch that the rank drew, in order. They identify
  the samples; ranks that draw none (tensor-parallel rank > 0, inner pipeline stages) have an empty list.

Lines are flushed one by one: a killed rank leaves every step it completed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import xxhash


def digest(data: bytes) -> str:
    """16 hexadecimal digits that identify ``data`` (xxh3, 64 bit)."""
    return xxhash.xxh3_64_hexdigest(data)


def write_private(path: Path, text: str) -> None:
    """Writes a whole file that only its owner can read."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)


class TraceWriter:
    """Appends one rank's lines.

    Args:
        directory: made if missing (mode 0700).
        rank: global rank, part of the file's name.

    Raises:
        OSError: the directory or file cannot be written.
    """

    def __init__(self, directory: str | os.PathLike[str], rank: int) -> None:
        Path(directory).mkdir(parents=True, exist_ok=True, mode=0o700)
        self.path = Path(directory) / f"rank{rank}.jsonl"
        descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._rank = rank
        self._file = os.fdopen(descriptor, "w", encoding="utf-8")

    def write(self, iteration: int, loss: Mapping[str, float], grad_norm: float | None, samples: list[str]) -> None:
        """Writes and flushes the line of one step."""
        line = {
            "rank": self._rank,
            "iteration": iteration,
            "loss": {name: value.hex() for name, value in loss.items()},
            "grad_norm": None if grad_norm is None else grad_norm.hex(),
            "samples": samples,
        }
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Closes the file; further writes raise ``ValueError``."""
        self._file.close()


def read(directory: str | os.PathLike[str]) -> dict[int, list[dict[str, Any]]]:
    """All lines under ``directory``, by rank, in file order.

    A last line without its newline was being written when the rank died, and is left out.
    """
    traces: dict[int, list[dict[str, Any]]] = {}
    for path in sorted(Path(directory).glob("rank*.jsonl")):
        *lines, _ = path.read_text(encoding="utf-8").split("\n")
        traces[int(path.stem.removeprefix("rank"))] = [json.loads(line) for line in lines]
    return traces


def losses(directory: str | os.PathLike[str]) -> dict[int, float]:
    """Loss by iteration, as the ranks that computed one recorded it first."""
    result: dict[int, float] = {}
    for lines in read(directory).values():
        for line in lines:
            for value in line["loss"].values():
                result.setdefault(line["iteration"], float.fromhex(value))
    return dict(sorted(result.items()))


def differences(ours: str | os.PathLike[str], oracle: str | os.PathLike[str]) -> list[str]:
    """Where two runs differ, one sentence each; empty when they are equal to the bit.

    Every execution of every step in ``ours``, repeated ones included, must equal the oracle's on the same rank. The
    last state each rank wrote (``state{r}.json``) must be equal too, tensor by tensor.
    """
    left, right = read(ours), read(oracle)
    result = [] if set(left) == set(right) else [f"ranks {sorted(left)} recorded, the oracle has {sorted(right)}"]
    for rank in sorted(set(left) & set(right)):
        expected = {line["iteration"]: line for line in right[rank]}
        if {line["iteration"] for line in left[rank]} != set(expected):
            result.append(f"rank {rank}: not the same iterations")
        for line in left[rank]:
            wanted = expected.get(line["iteration"], line)
            result += [
                f"rank {rank}, iteration {line['iteration']}: {key} {line[key]} against {wanted[key]}"
                for key in wanted
                if line[key] != wanted[key]
            ]
    for path in sorted(Path(oracle).glob("state*.json")):
        mine = Path(ours) / path.name
        result += _state_differences(path, mine) if mine.exists() else [f"{path.name} was not written"]
    return result


def _state_differences(oracle: Path, ours: Path) -> list[str]:
    left, right = json.loads(ours.read_text()), json.loads(oracle.read_text())
    names = sorted(set(left["tensors"]) | set(right["tensors"]))
    result = [
        f"{oracle.name}: {name} differs" for name in names if left["tensors"].get(name) != right["tensors"].get(name)
    ]
    return result + [f"{oracle.name}: {key} differs" for key in right if key != "tensors" and left[key] != right[key]]
