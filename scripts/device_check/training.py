"""A small Megatron job that loses its rank in the middle, against the same job left alone, to the bit.

NCCL takes one rank per device, so with one GPU there is one rank: it is killed on a healthy node, whose agent has its state in
shared memory and starts it again in place. What crosses the network in a hot swap is not checked here.
"""

from __future__ import annotations

import importlib.util
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil

from megatron_resilience.accelerator import ENVIRONMENT_VARIABLE, Accelerator
from megatron_resilience.observe.events import read_events
from megatron_resilience.observe.trace import differences
from scripts.device_check.report import Check

_ROOT = Path(__file__).resolve().parents[2]
_ITERATIONS, _KILLED_AT, _TIMEOUT_S = 20, 8, 150.0
_MODEL = f"""
--mock-data --tokenizer-type NullTokenizer --vocab-size 128 --make-vocab-size-divisible-by 1 --split 100,0,0
--no-gradient-accumulation-fusion --no-persist-layer-norm --no-masked-softmax-fusion --num-workers 0 --transformer-impl local
--attention-backend unfused --micro-batch-size 2 --global-batch-size 8 --train-iters {_ITERATIONS} --eval-iters 0
--eval-interval 1000 --lr 1e-3 --lr-decay-style constant --log-interval 1 --seed 1234 --use-distributed-optimizer
"""
_ON_GPU = """
--bf16 --num-layers 4 --hidden-size 1024 --num-attention-heads 16 --seq-length 512 --max-position-embeddings 512
--distributed-backend nccl --deterministic-mode --no-cross-entropy-loss-fusion
"""
_ON_CPU = """
--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 --distributed-backend gloo
"""
_DETERMINISTIC = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0", "NCCL_ALGO": "Ring"}


def check(device: Accelerator, scratch: Path) -> list[Check]:
    """All of this module; one line that says so where megatron-core is missing.

    Args:
        scratch: an empty folder.
    """
    if not _importable():
        return [
            Check(
                "training", "a Megatron job that loses its rank", "not tried: no megatron-core (--wheels DIR brings it)"
            )
        ]
    job = Job(device, scratch)
    job.alone("first")
    job.alone("second")
    steady = differences(scratch / "first", scratch / "second")
    checks = [Check("training", "two undisturbed runs", "equal" if not steady else steady[0], "equal", not steady)]
    recovered = job.with_a_death("killed")
    unlike = differences(scratch / "killed", scratch / "first")
    again = [f"{event['steps_again']} steps again" for event in recovered]
    checks.append(
        Check(
            "training",
            "recoveries after one SIGKILL",
            f"{len(recovered)} ({', '.join(again)})",
            "1",
            len(recovered) == 1,
        )
    )
    checks.append(
        Check("training", "with the death, and without", "equal" if not unlike else unlike[0], "equal", not unlike)
    )
    for event in recovered:
        seconds = event["seconds"]
        parts = ", ".join(f"{name} {value:.2f}" for name, value in seconds.items())
        checks.append(Check("training", "the recovery took", f"{sum(seconds.values()):.2f} s ({parts})"))
    return checks


def _importable() -> bool:
    try:
        return importlib.util.find_spec("megatron.core") is not None
    except ModuleNotFoundError:
        return False


class Job:
    """The runs of one model."""

    def __init__(self, device: Accelerator, scratch: Path) -> None:
        self._scratch = scratch
        self._script = [str(_ROOT / "examples" / "train_gpt.py"), *_MODEL.split()]
        self._script += (_ON_GPU if device.name == "cuda" else _ON_CPU).split()
        self._environment = os.environ | _DETERMINISTIC | {ENVIRONMENT_VARIABLE: device.name, "OMP_NUM_THREADS": "1"}

    def alone(self, name: str) -> None:
        """Without protection, as torchrun would start it; the trace is in the folder of that name."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        known = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
        known |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        process = self._start(name, [sys.executable, *self._script], known)
        self._finish(name, process)

    def with_a_death(self, name: str) -> list[dict]:
        """Protected, and the rank is killed; the recoveries that the events tell of."""
        events = self._scratch / f"{name}.events"
        launch = [
            sys.executable,
            "-m",
            "megatron_resilience.control.cli",
            "launch",
            "--nnodes",
            "1",
            "--nproc-per-node",
            "1",
        ]
        launch += ["--local-nodes", "--events", str(events), *self._script, "--deadpool", "--deadpool-replicas", "0"]
        process = self._start(name, launch, {})
        trace, deadline = self._scratch / name / "rank0.jsonl", time.monotonic() + _TIMEOUT_S
        while not (trace.exists() and f'"iteration": {_KILLED_AT},' in trace.read_text()):
            if process.poll() is not None or time.monotonic() > deadline:
                self._finish(name, process, 0.0)
                raise RuntimeError(f"{name}: ended before iteration {_KILLED_AT}:\n{self._tail(name)}")
            time.sleep(0.002)
        (agent,) = psutil.Process(process.pid).children()
        (zygote,) = agent.children()
        (rank,) = zygote.children()
        rank.kill()
        self._finish(name, process)
        return [event for event in read_events(events) if event["kind"] == "recovered"]

    def _start(self, name: str, command: list[str], environment: dict[str, str]) -> subprocess.Popen:
        with (self._scratch / f"{name}.log").open("w") as log:
            return subprocess.Popen(
                [*command, "--trace-dir", str(self._scratch / name)],
                env=self._environment | environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=_ROOT,
            )

    def _finish(self, name: str, process: subprocess.Popen, patience: float = _TIMEOUT_S) -> None:
        try:
            code = process.wait(patience)
        except subprocess.TimeoutExpired:
            # What is below it dies with it.
            process.kill()
            code = process.wait()
        if code != 0:
            raise RuntimeError(f"{name}: exit status {code}:\n{self._tail(name)}")

    def _tail(self, name: str) -> str:
        return (self._scratch / f"{name}.log").read_text()[-3000:]
