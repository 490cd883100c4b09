"""How fast gloo moves bytes between the same pairs of processes when it does nothing else: no packing, no hash, no order.

Run as a module, it is one of the processes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_resilience.bench._job import ROOT, BenchError
from megatron_resilience.transport.base import GroupKey
from megatron_resilience.transport.gloo import GlooFabric

_ROUNDS, _LIMIT_S = 4, 300.0
_FIRST_TAG = 7


def raw_seconds(folder: Path, receives: list[dict[int, int]]) -> list[float]:
    """Seconds of each round of sending everything at once; the first round, which connects nothing but warms up, is left out.

    Args:
        folder: made; for the processes' files.
        receives: per process, bytes by process that they come from.

    Raises:
        BenchError: a process failed.
    """
    folder.mkdir(parents=True)
    (folder / "receives.json").write_text(json.dumps(receives))
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", __name__, str(folder)]
    with (folder / "log").open("w") as log:
        started = [
            subprocess.Popen([*command, str(rank)], env=environment, stdout=log, stderr=log)
            for rank in range(len(receives))
        ]
    try:
        statuses = [process.wait(_LIMIT_S) for process in started]
        if any(statuses):
            raise BenchError(f"raw transfer failed:\n{(folder / 'log').read_text()[-3000:]}")
    finally:
        for process in started:
            process.kill()
            process.wait()
    times = [json.loads((folder / f"times{rank}.json").read_text()) for rank in range(len(receives))]
    rounds = [[by_rank[i] for by_rank in times] for i in range(_ROUNDS)]
    return [max(end for _, end in r) - min(start for start, _ in r) for r in rounds[1:]]


def main(folder: Path, rank: int) -> None:
    """One process: its rounds' beginnings and ends go to a file."""
    receives = [
        {int(peer): size for peer, size in r.items()} for r in json.loads((folder / "receives.json").read_text())
    ]
    store = dist.FileStore(str(folder / "store"), len(receives))
    fabric = GlooFabric(store, rank, "127.0.0.1", _LIMIT_S)
    backend = fabric.build(GroupKey("raw", tuple(range(len(receives)))))
    fabric.built()
    incoming = {peer: torch.empty(size, dtype=torch.uint8) for peer, size in receives[rank].items()}
    outgoing = {
        peer: torch.ones(sizes[rank], dtype=torch.uint8) for peer, sizes in enumerate(receives) if sizes.get(rank)
    }
    times = []
    for number in range(_ROUNDS):
        backend.barrier().wait()
        start = time.time()
        works = [backend.recv([tensor], peer, _FIRST_TAG + number) for peer, tensor in incoming.items()]
        works += [backend.send([tensor], peer, _FIRST_TAG + number) for peer, tensor in outgoing.items()]
        for work in works:
            work.wait()
        times.append((start, time.time()))
    backend.barrier().wait()
    (folder / f"times{rank}.json").write_text(json.dumps(times))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
