"""A node is killed in the middle of an iteration: how long until the job's next completed step, and how long a restart.

Each trial kills a node (agent, zygote and ranks, SIGKILL) of a protected job at another moment of an iteration, the
first node and the second in turn. Then it kills the whole job and relaunches it at once from its last checkpoint on
disk, under plain torchrun without --deadpool: nobody's time to notice, and nobody's queue, is counted for the restart.
Nor is the loading of the optimizer's moments (--no-load-optim), which favours the restart.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import statistics
import time
from pathlib import Path
from typing import Any

from megatron_resilience.bench import _model
from megatron_resilience.bench._contain import contained
from megatron_resilience.bench._job import BenchError, Job, kill_all
from megatron_resilience.bench._report import Goal, judged, machine, missed, parse, row, spread, write
from megatron_resilience.observe.report import PHASES

GOALS = (Goal("recovery_s", 3.0), Goal("ratio_to_restart", 10.0, at_least=True))
_CHECKPOINT_AT, _KILL_AFTER = 2, 4
_TOLERANCE_S = 0.1


def main(arguments: list[str]) -> int:
    """Runs the trials; returns 1 when a goal is missed or a trial fails."""
    options = parse("recovery", __doc__, {"trials": (5, "nodes to kill, one after the other")}, arguments)
    return contained(functools.partial(_run, options))


def _run(options: argparse.Namespace, folder: Path) -> int:
    model = _model.MODELS[options.model]
    argv = model.argv(model.recovery_batch)
    report: dict[str, Any] = {"bench": "recovery", **machine(), "model": options.model, "parameters": model.parameters}
    checkpoint = _checkpoint(folder / "first", argv)
    trials = []
    for number in range(options.trials):
        victim, part = number % _model.NODES, (number + 0.5) / options.trials
        trials.append(_trial(folder / f"trial{number}", argv, checkpoint, victim, part))
        print(_line(number, trials[-1]), flush=True)
    report |= summary(trials)
    print(_table(report))
    write(options.json, report)
    return judged(missed(GOALS, report) if options.model == "standard" else [])


def summary(trials: list[dict[str, Any]]) -> dict[str, Any]:
    """The report's values; ``trials`` as :func:`_trial` returns them."""

    def over(value: Any) -> dict[str, float]:
        return spread(value(trial) for trial in trials)

    return {
        "recovery_s": over(lambda t: t["recovery_s"]),
        "phases_s": {phase: over(lambda t, phase=phase: t["phases_s"][phase]) for phase in PHASES},
        "restart_s": over(lambda t: t["restart_s"]),
        "recovery_before_step_s": over(lambda t: t["recovery_before_step_s"]),
        "restart_before_step_s": over(lambda t: t["restart_before_step_s"]),
        "ratio_to_restart": over(lambda t: t["restart_before_step_s"] / t["recovery_before_step_s"]),
        "replay_after_recovery_s": over(lambda t: t["replay_after_recovery_s"]),
        "replay_after_restart_s": over(lambda t: t["replay_after_restart_s"]),
        "iteration_s": over(lambda t: t["iteration_s"]),
        "trials": trials,
    }


def _checkpoint(folder: Path, argv: list[str]) -> Path:
    """Lets a stock job write the checkpoint that restarts load."""
    save = folder / "checkpoint"
    interval = str(_CHECKPOINT_AT)
    job = Job.stock(folder, [*argv, "--save", str(save), "--save-interval", interval, "--exit-interval", interval])
    try:
        job.wait_for_end()
    finally:
        job.kill()
    return save


def _trial(folder: Path, argv: list[str], checkpoint: Path, victim: int, part: float) -> dict[str, Any]:
    """Kills one node, then everything.

    Args:
        victim: node rank.
        part: of an iteration that has passed when the node dies, 0 to 1.
    """
    job = Job.protected(folder / "protected", argv)
    try:
        job.wait_for_step(_KILL_AFTER)
        job.wait_for_spare()
        result = _kill_node(job, victim, part)
        killed_at = time.time()
    finally:
        job.kill()
    return result | _restart(folder / "restart", argv, checkpoint, killed_at, result)


def _kill_node(job: Job, victim: int, part: float) -> dict[str, Any]:
    ends = [step["end"] for step in job.steps(0)]
    iteration_s = statistics.median(b - a for a, b in itertools.pairwise(ends))
    agent = job.agents()[victim]
    victims = [agent, *agent.children(recursive=True)]
    seen = len(job.steps(0))
    last = job.wait_for(lambda: job.steps(0)[seen:], "further step")[-1]
    time.sleep(max(0.0, last["end"] + part * iteration_s - time.time()))
    killed = time.time()
    kill_all(victims)
    event = job.wait_for(lambda: job.of_kind("recovered"), "recovery")[0]
    job.wait_for_step(event["generation"] + 2)
    start, end = _resumed(job, event["generation"] + 1, killed)
    (published,) = (e["time"] for e in job.of_kind("epoch") if e["epoch"] == event["epoch"])
    phases = {**event["seconds"], "detect": published - killed}
    if abs(sum(phases.values()) - (end - killed)) > _TOLERANCE_S:
        raise BenchError(f"the phases {phases} do not add up to {end - killed:.3f} s from kill to first completed step")
    return {
        "victim": victim,
        "part_of_iteration": part,
        "iteration_s": iteration_s,
        "killed_in_iteration": last["iteration"] + 1,
        "recovery_s": end - killed,
        "recovery_before_step_s": start - killed,
        "phases_s": phases,
        "steps_again": event["steps_again"],
        "replay_after_recovery_s": event["steps_again"] * iteration_s,
    }


def _resumed(job: Job, iteration: int, after: float) -> tuple[float, float]:
    """When the last rank began, and the last rank completed, the first step after a death."""
    first = [next(s for s in steps if s["start"] > after) for steps in job.all_steps()]
    if {step["iteration"] for step in first} != {iteration}:
        raise BenchError(f"ranks went on with iterations {[s['iteration'] for s in first]}, expected {iteration}")
    return max(step["start"] for step in first), max(step["end"] for step in first)


def _restart(
    folder: Path, argv: list[str], checkpoint: Path, killed_at: float, killed: dict[str, Any]
) -> dict[str, Any]:
    job = Job.stock(folder, [*argv, "--load", str(checkpoint), "--no-load-optim", "--no-load-rng"])
    try:
        job.wait_for_step(_CHECKPOINT_AT + 1)
        start, end = _resumed(job, _CHECKPOINT_AT + 1, killed_at)
    finally:
        job.kill()
    # What it had completed when it was killed, less what the checkpoint has.
    lost = killed["killed_in_iteration"] - 1 - _CHECKPOINT_AT
    return {
        "restart_s": end - killed_at,
        "restart_before_step_s": start - killed_at,
        "replay_after_restart_s": lost * killed["iteration_s"],
    }


def _line(number: int, trial: dict[str, Any]) -> str:
    return (
        f"trial {number}: node n{trial['victim']} killed {100 * trial['part_of_iteration']:.0f} % into an iteration of "
        f"{trial['iteration_s']:.2f} s: {trial['recovery_s']:.2f} s to the first completed step, "
        f"restart {trial['restart_s']:.1f} s"
    )


def _table(report: dict[str, Any]) -> str:
    lines = [
        row("recovery: kill to first step done", report["recovery_s"], "s"),
        *(row(f"  {phase}", report["phases_s"][phase], "s") for phase in PHASES),
        row("restart: kill to first step done", report["restart_s"], "s"),
        row("recovery without its first step", report["recovery_before_step_s"], "s"),
        row("restart without its first step", report["restart_before_step_s"], "s"),
        row("ratio to restart (of the last two)", report["ratio_to_restart"]),
        row("replay, recovery (not in the ratio)", report["replay_after_recovery_s"], "s"),
        row("replay, restart (not in the ratio)", report["replay_after_restart_s"], "s"),
        row("iteration", report["iteration_s"], "s"),
    ]
    return "\n".join(lines)
