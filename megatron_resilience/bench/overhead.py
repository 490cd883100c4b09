"""What protection costs while nothing happens: the same training with and without --deadpool, in turns, on one machine.

Two jobs of the same model: under megatron-resilience launch with --deadpool (its agents and its spare included), and under
plain torchrun without it. While one trains a block of iterations, all processes of the other are stopped. The first
iteration of a block warms up and is not counted; pairs of blocks come in alternating order.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import statistics
import time
from pathlib import Path
from typing import Any

import psutil

from megatron_resilience.bench import _model
from megatron_resilience.bench._contain import contained
from megatron_resilience.bench._job import Job
from megatron_resilience.bench._probe import open_gate
from megatron_resilience.bench._report import Goal, judged, machine, missed, parse, row, spread, write

GOALS = (Goal("exposed_fraction", 0.01), Goal("ratio", 1.05))
_WARM_UP, _DRAIN_S = 3, 0.3
_ITERATION_S = (1.0, 4.0)


def main(arguments: list[str]) -> int:
    """Runs both jobs in turns; returns 1 when a goal is missed."""
    counts = {"pairs": (8, "pairs of blocks"), "block": (4, "counted iterations of a block")}
    options = parse("overhead", __doc__, counts, arguments)
    return contained(functools.partial(_run, options))


def _run(options: argparse.Namespace, folder: Path) -> int:
    model = _model.MODELS[options.model]
    argv = model.argv(model.overhead_batch)
    report: dict[str, Any] = {"bench": "overhead", **machine(), "model": options.model, "parameters": model.parameters}
    arms = {
        "protected": Arm(folder / "protected", Job.protected, argv),
        "plain": Arm(folder / "plain", Job.stock, argv),
    }
    try:
        arms["protected"].job.wait_for_spare()
        for arm in arms.values():
            arm.job.pause()
        blocks: list[dict[str, list[dict[str, float]]]] = []
        for number in range(options.pairs):
            order = list(arms) if number % 2 == 0 else list(reversed(arms))
            blocks.append({name: arms[name].train(options.block) for name in order})
            print(_line(number, blocks[-1]), flush=True)
        report |= summary(blocks) | {"memory": _memory(arms)}
    finally:
        for arm in arms.values():
            arm.job.kill()
    print(_table(report))
    write(options.json, report)
    problems = []
    if options.model == "standard":
        problems = missed(GOALS, report)
        plain = report["iteration_s"]["plain"]["median"]
        if not _ITERATION_S[0] <= plain <= _ITERATION_S[1]:
            problems.append(
                f"an iteration took {plain:.2f} s; the goals are for {_ITERATION_S[0]:g} to {_ITERATION_S[1]:g} s"
            )
    return judged(problems)


class Arm:
    """One of the two jobs.

    Args:
        folder: of its own.
        start: starts it.
        argv: Megatron's command line.
    """

    def __init__(self, folder: Path, start: Any, argv: list[str]) -> None:
        folder.mkdir(parents=True)
        open_gate(folder, _WARM_UP)
        self.done = _WARM_UP
        self.job: Job = start(folder, argv)
        self.job.wait_for_step(self.done)

    def train(self, count: int) -> list[dict[str, float]]:
        """Its turn: one iteration to warm up and ``count`` that are measured, one dictionary for each.

        Keys: ``iteration_s``, from the end of one to the end of the next on the last rank; ``cpu_s`` of all its
        processes, averaged over the block; the maximum over ranks of ``exposed_s``; the sums over ranks of the rest.
        """
        first, self.done = self.done + 2, self.done + 1 + count
        self.job.resume()
        used = self._cpu()
        open_gate(self.job.folder, self.done)
        self.job.wait_for_step(self.done)
        self.job.wait_for_arrival(self.done + 1)
        # What the last step left to the background ends.
        time.sleep(_DRAIN_S)
        used = self._cpu() - used
        self.job.pause()
        by_rank = [{step["iteration"]: step for step in steps} for steps in self.job.all_steps()]
        result = []
        for iteration in range(first, self.done + 1):
            steps = [steps[iteration] for steps in by_rank]
            ends = [max(steps[i]["end"] for steps in by_rank) for i in (iteration - 1, iteration)]
            measured = {"iteration_s": ends[1] - ends[0], "cpu_s": used / (count + 1)}
            for name in set(steps[0]) - {"iteration", "start", "end"}:
                measured[name] = (max if name == "exposed_s" else sum)(step[name] for step in steps)
            result.append(measured)
        return result

    def _cpu(self) -> float:
        total = 0.0
        for process in self.job.tree():
            with contextlib.suppress(psutil.NoSuchProcess):
                total += sum(process.cpu_times()[:2])
        return total


def summary(blocks: list[dict[str, list[dict[str, float]]]]) -> dict[str, Any]:
    """The report's values; ``blocks`` are pairs of what :meth:`Arm.train` returns, by arm."""

    def median(block: list[dict[str, float]], key: str) -> float:
        return statistics.median(step[key] for step in block)

    protected = [step for pair in blocks for step in pair["protected"]]
    plain = [step for pair in blocks for step in pair["plain"]]

    def rate(amount: str, seconds: str) -> dict[str, float]:
        return spread(step[amount] / step[seconds] for step in protected if step[seconds] > 0)

    return {
        "exposed_fraction": spread(step["exposed_s"] / step["iteration_s"] for step in protected),
        "ratio": spread(median(p["protected"], "iteration_s") / median(p["plain"], "iteration_s") for p in blocks),
        "cpu_ratio": spread(median(p["protected"], "cpu_s") / median(p["plain"], "cpu_s") for p in blocks),
        "iteration_s": {
            "protected": spread(step["iteration_s"] for step in protected),
            "plain": spread(step["iteration_s"] for step in plain),
        },
        "cpu_s": {
            "protected": spread(step["cpu_s"] for step in protected),
            "plain": spread(step["cpu_s"] for step in plain),
        },
        "bytes_per_iteration": {
            "copied": spread(step["copy_bytes"] for step in protected),
            "sent": spread(step["round_bytes"] for step in protected),
        },
        "bytes_per_second": {
            "copied": rate("copy_bytes", "copy_s"),
            "sent": rate("round_bytes", "round_s"),
        },
        "blocks": blocks,
    }


def _memory(arms: dict[str, Arm]) -> dict[str, Any]:
    """Bytes, shared pages divided among those who share them (PSS): per rank, agent with zygote, spare node."""
    agents = arms["protected"].job.agents()
    nodes, spare = agents[: _model.NODES], agents[_model.NODES]
    zygotes = [agent.children()[0] for agent in nodes]
    ranks = [rank for zygote in zygotes for rank in zygote.children()]
    plain = [process for process in arms["plain"].job.tree()[1:] if "_program.py" in " ".join(process.cmdline())]
    return {
        "copies_per_node": spread(_segments(agent) for agent in nodes),
        "protected_rank": spread(map(_pss, ranks)),
        "plain_rank": spread(map(_pss, plain)),
        "agent_and_zygote": spread(_pss(a) + _pss(z) for a, z in zip(nodes, zygotes, strict=True)),
        "spare_node": spread([sum(map(_pss, [spare, *spare.children(recursive=True)]))]),
    }


def _pss(process: psutil.Process) -> float:
    return float(process.memory_full_info().pss)


def _segments(agent: psutil.Process) -> float:
    """Bytes of the copies of generations that a node's agent keeps."""
    total = 0
    for fd in Path(f"/proc/{agent.pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            if str(fd.readlink()).startswith("/memfd:mr-"):
                total += fd.stat().st_size
    return float(total)


def _line(number: int, pair: dict[str, list[dict[str, float]]]) -> str:
    medians = {name: statistics.median(step["iteration_s"] for step in block) for name, block in pair.items()}
    return (
        f"pair {number}: {medians['protected']:.3f} s protected, {medians['plain']:.3f} s plain, "
        f"ratio {medians['protected'] / medians['plain']:.3f}"
    )


def _table(report: dict[str, Any]) -> str:
    mib = 2.0**-20
    memory = report["memory"]
    lines = [
        row("exposed fraction", report["exposed_fraction"], "%", 100),
        row("ratio of pairs of blocks", report["ratio"]),
        row("ratio of processor time", report["cpu_ratio"]),
        *(row(f"iteration, {arm}", report["iteration_s"][arm], "s") for arm in ("protected", "plain")),
        *(row(f"processor time, {arm}", report["cpu_s"][arm], "s") for arm in ("protected", "plain")),
        *(row(f"{what} per iteration, all ranks", v, "MiB", mib) for what, v in report["bytes_per_iteration"].items()),
        *(row(f"rate, {what}, a rank's mean", v, "MiB/s", mib) for what, v in report["bytes_per_second"].items()),
        *(row(f"memory, {name.replace('_', ' ')}", value, "MiB", mib) for name, value in memory.items()),
    ]
    return "\n".join(lines)
