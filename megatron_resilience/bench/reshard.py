"""The layout changes while the job trains: how long nobody trains, and how long if stock Megatron changes it.

Each trial of each kind of model runs four jobs, one after the other, each alone:

* a protected one, which is asked for the other layout as soon as its iterations are steady, and changes when the new world is
  ready, so that the preparation is hidden; and the same once more with ``--hotswap-exclusive-memory``, where it is not;
* stock Megatron under plain torchrun, which saves twice; the first save starts processes and is not counted. It is killed as
  soon as the second one is complete, which is quicker than its own end;
* stock Megatron at the other layout, which loads that. Later it loads the same again, plainly and with
  --ckpt-fully-parallel-load; the quicker one is the warm load.

Pauses are from the end of the last step of the old layout on the last rank to the beginning of the first step of the new one on
the last rank. Checkpoints lie in memory (/dev/shm) where there is room, in the format that other layouts can load
(torch_dist, fully_reshardable). Between them the same bytes go between the same pairs of bare gloo processes,
against which the exchange between nodes is held, with its packing, hashing and unpacking.
"""

from __future__ import annotations

import argparse
import functools
import os
import shutil
import statistics
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from megatron_resilience.bench import _model, _relayout
from megatron_resilience.bench._contain import contained
from megatron_resilience.bench._job import BenchError, Job
from megatron_resilience.bench._minimum import least_bytes
from megatron_resilience.bench._raw import raw_seconds
from megatron_resilience.bench._report import Goal, judged, machine, missed, parse, row, spread, write
from megatron_resilience.errors import ConfigurationError
from megatron_resilience.observe.switch import PHASES
from megatron_resilience.vps.catalogue import catalogue_from_json

GOALS = (
    *(Goal(f"{kind}_ratio_to_restart", 40.0, at_least=True) for kind in ("dense", "moe")),
    *(Goal(f"{kind}_ratio_to_save_load", 5.0, at_least=True) for kind in ("dense", "moe")),
    *(Goal(f"{kind}_ratio_to_restart_large", 15.0, at_least=True) for kind in ("dense", "moe")),
    *(Goal(f"{kind}_ratio_to_save_load_large", 3.0, at_least=True) for kind in ("dense", "moe")),
    Goal("bytes_over_minimum", 1.0),
    Goal("rate_over_raw", 0.7, at_least=True),
    Goal("prepare_hidden_fraction", 0.93, at_least=True),
    Goal("steps_slowdown", 1.2),
    Goal("peak_over_limit", 1.05),
    Goal("peak_over_limit_exclusive", 1.05),
)
STOCK = ("--ckpt-format", "torch_dist", "--dist-ckpt-optim-fully-reshardable", "--ckpt-assume-constant-structure")
"""How stock Megatron saves and loads."""
PAUSE = ("tail", *(phase for phase in PHASES if phase != "first step"), "re-entry")
"""Parts of the pause: what Megatron does after a step, those of the event, and what it does before the next one."""
_VALUES = (
    *(
        "pause_s",
        "event_pause_s",
        "prepare_s",
        "wait_s",
        "prepare_cpu_s",
        "iteration_s",
        "restart_s",
        "save_s",
        "load_s",
    ),
    *(
        "cold_save_s",
        "cold_load_s",
        "raw_s",
        "exchange_s",
        "received_bytes",
        "least_bytes",
        "bytes_over_minimum",
        "rate_over_raw",
    ),
    *("least_bytes_in_best_order", "prepare_hidden_fraction", "steps_slowdown", "peak_over_limit"),
    *("peak_over_limit_exclusive", "pause_exclusive_s"),
)
_WARM_UP, _SAVE_EVERY, _TOLERANCE_S = 3, 2, 0.05
_HASH = 16
_PATIENCE_S = 600.0
_SHM, _ROOM = Path("/dev/shm"), 8 << 30


def main(arguments: list[str]) -> int:
    """Runs the trials; returns 1 when a goal is missed or a trial fails."""
    kinds = tuple(_model.CHANGES["standard"])
    options = parse("reshard", __doc__, {"trials": (3, "changes of each kind")}, arguments, kinds)
    roomy = _SHM.is_dir() and shutil.disk_usage(_SHM).free > _ROOM
    return contained(functools.partial(_run, options), _SHM if roomy else None)


def _run(options: argparse.Namespace, folder: Path) -> int:
    changes = {kind: c for kind, c in _model.CHANGES[options.model].items() if kind in options.kinds}
    if not changes:
        there = ", ".join(_model.CHANGES[options.model])
        raise ConfigurationError(f"--kinds {' '.join(options.kinds)}: --model {options.model} has {there}")
    report: dict[str, Any] = {
        "bench": "reshard",
        **machine(),
        "model": options.model,
        "checkpoints_in": str(folder.parent),
    }
    trials: dict[str, list[dict[str, Any]]] = {kind: [] for kind in changes}
    for number in range(options.trials):
        for kind, change in changes.items():
            place = folder / f"{kind}{number}"
            trials[kind].append(_trial(place, change))
            shutil.rmtree(place)
            print(_line(number, kind, trials[kind][-1]), flush=True)
            report |= {"kinds": {kind: summary(t) for kind, t in trials.items() if t}}
            write(options.json, report)
    report |= overall(report["kinds"]) | {"load_after": round(os.getloadavg()[0], 2)}
    print(_table(report))
    write(options.json, report)
    if options.model != "standard":
        return judged([])
    measured = [goal for goal in GOALS if goal.name in report]
    unmeasured = [f"{goal.name} was not measured" for goal in GOALS if goal.name not in report]
    return judged([*missed(measured, report), *unmeasured])


def summary(trials: list[dict[str, Any]]) -> dict[str, Any]:
    """The values of one kind of model; ``trials`` as :func:`_trial` returns them."""

    def over(value: Callable[[dict[str, Any]], float]) -> dict[str, float]:
        return spread(value(trial) for trial in trials)

    return {
        **{key: trials[0][key] for key in ("before", "after", "state_bytes")},
        "ratio_to_restart": over(lambda t: t["restart_s"] / t["pause_s"]),
        "ratio_to_save_load": over(lambda t: (t["save_s"] + t["load_s"]) / t["pause_s"]),
        **{name: over(lambda t, name=name: t[name]) for name in _VALUES},  # type: ignore[misc]
        "phases_s": {part: over(lambda t, part=part: t["phases_s"][part]) for part in PAUSE},  # type: ignore[misc]
        **{
            name: {part: over(lambda t, name=name, part=part: t[name][part]) for part in trials[0][name]}  # type: ignore[misc]
            for name in ("move_parts_s", "restart_parts_s", "memory", "memory_exclusive")
        },
        "trials": trials,
    }


def overall(kinds: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, float]]:
    """The values that goals are for. Of what all kinds have, the kind with the worst median counts."""
    report = {}
    for kind, values in kinds.items():
        base, _, size = kind.partition("_")
        for name in ("ratio_to_restart", "ratio_to_save_load"):
            report[f"{base}_{name}{'_' + size if size else ''}"] = values[name]
    large = {kind: values for kind, values in kinds.items() if kind.endswith("_large")}
    for name, among, worst in (
        ("bytes_over_minimum", kinds, max),
        ("rate_over_raw", large or kinds, min),
        ("prepare_hidden_fraction", kinds, min),
        ("steps_slowdown", kinds, max),
        ("peak_over_limit", kinds, max),
        ("peak_over_limit_exclusive", kinds, max),
    ):
        report[name] = worst((values[name] for values in among.values()), key=lambda value: value["median"])
    return report


# -- one trial -------------------------------------------------------------------------------------


def _trial(folder: Path, change: _model.Change) -> dict[str, Any]:
    live = _live(folder / "live", change)
    receives = live.pop("receives")
    live["raw_s"] = min(raw_seconds(folder / "raw", receives))
    live["rate_over_raw"] = live["raw_s"] / live["exchange_s"]
    alone = _live(folder / "exclusive", change, "--hotswap-exclusive-memory")
    live |= {
        "pause_exclusive_s": alone["pause_s"],
        "peak_over_limit_exclusive": alone["peak_over_limit"],
        "memory_exclusive": alone["memory"],
    }
    return live | _stock(folder, change)


def _live(folder: Path, change: _model.Change, *more: str) -> dict[str, Any]:
    """One change in a protected job; ``more`` options for it."""
    job = Job.changing(folder, [*change.argv(change.before), *more])
    try:
        job.wait_for_step(_WARM_UP + change.steady, _PATIENCE_S)
        partial = folder / f"{_relayout.WISH}.part"
        partial.write_text(change.after)
        partial.replace(folder / _relayout.WISH)
        event = job.wait_for(lambda: _switched(job), "change of layout", _PATIENCE_S)
        job.wait_for_step(event["generation"] + 2, _PATIENCE_S)
    finally:
        job.kill()
    (asked,) = job.notes("asked", 0)
    (told,) = job.notes("transfer", 0)
    result = _pause(job, event) | _preparation(job, asked["time"], event) | _memory(job) | _moves(job)
    (least, best), received = least_bytes(told), event["bytes"]["received"]
    transfers = [job.notes("transfer", rank)[0] for rank in range(_model.WORLD_SIZE)]
    return result | {
        "before": change.before,
        "after": change.after,
        "state_bytes": catalogue_from_json(told["catalogue"]).state_bytes,
        "received_bytes": received,
        "kept_bytes": event["bytes"]["kept"],
        "least_bytes": least,
        "least_bytes_in_best_order": best,
        # The job chooses the order of the nodes itself, so the best one is what it is measured against.
        "bytes_over_minimum": received / best if best else float(received == 0),
        "receives": [transfer["receives"] for transfer in transfers],
    }


def _switched(job: Job) -> dict[str, Any] | None:
    for kind in ("switch_refused", "switch_abandoned"):
        for event in job.of_kind(kind):
            raise BenchError(f"{kind}: {event['why']}")
    return next(iter(job.of_kind("switch_done")), None)


def _pause(job: Job, event: dict[str, Any]) -> dict[str, Any]:
    """How long nobody trained, by part, from what the ranks noted; it must fit what the event says."""
    generation = event["generation"]
    ended = max(_step(steps, generation)["end"] for steps in job.all_steps())
    began = max(_step(steps, generation + 1)["start"] for steps in job.all_steps())
    ranks = range(_model.WORLD_SIZE)
    stopped = min(job.notes("parked", rank)[-1]["stopped"] for rank in ranks)
    gone = max(job.notes("stepped", rank)[-1]["gone"] for rank in ranks)
    seconds = {phase: event["seconds"][phase] for phase in PHASES if phase != "first step"}
    if abs(sum(seconds.values()) - (gone - stopped)) > _TOLERANCE_S:
        raise BenchError(
            f"the event's phases {seconds} do not add up to {gone - stopped:.3f} s from the first stop to the go"
        )
    return {
        "generation": generation,
        "pause_s": began - ended,
        "event_pause_s": event["pause_s"],
        "phases_s": {"tail": stopped - ended, **seconds, "re-entry": began - gone},
    }


def _step(steps: Iterable[dict[str, Any]], iteration: int) -> dict[str, Any]:
    return next(step for step in steps if step["iteration"] == iteration)


def _preparation(job: Job, asked: float, event: dict[str, Any]) -> dict[str, Any]:
    """What was hidden behind training, and what training lost by it."""
    prepared = [job.notes("prepared", rank)[0] for rank in range(_model.WORLD_SIZE)]
    ready = max(line["time"] for line in prepared)
    by_rank = [{step["iteration"]: step for step in steps} for steps in job.all_steps()]
    last = event["generation"]
    ends = {i: max(steps[i]["end"] for steps in by_rank) for i in range(1, last + 1)}
    # The last iteration that was over before anybody asked; what follows until the new world was ready had less than all cores.
    first = max(i for i in ends if ends[i] <= asked)
    through = next((i for i in ends if ends[i] >= ready), last)
    iteration_s = statistics.median(ends[i] - ends[i - 1] for i in range(_WARM_UP + 1, first + 1))
    extra = ends[through] - ends[first] - (through - first) * iteration_s
    cpu = sum(line["cpu_s"] for line in prepared)
    hidden, wait = event["prepare_s"], event["wait_s"]
    return {
        "iteration_s": iteration_s,
        "prepare_s": hidden,
        "wait_s": wait,
        "prepare_cpu_s": cpu,
        "iterations_meanwhile": through - first,
        "extra_s": extra,
        "prepare_hidden_fraction": hidden / (hidden + wait + event["pause_s"]),
        "steps_slowdown": extra / (cpu / (os.cpu_count() or 1)),
    }


def _moves(job: Job) -> dict[str, Any]:
    """Parts of moving the state, each of the rank that took longest; how long any rank exchanged something."""
    by_rank = [{p["what"]: p for p in job.notes("part", rank)} for rank in range(_model.WORLD_SIZE)]
    seconds = [{what: parts[what]["end"] - parts[what]["start"] for what in _relayout.MOVES} for parts in by_rank]
    exchanges = [parts["exchange"] for parts in by_rank]
    return {
        "move_parts_s": {
            "check seals": max(s["seals"] for s in seconds),
            "within nodes": max(s["run"] - s["exchange"] for s in seconds),
            "between nodes": max(s["exchange"] for s in seconds),
            "compare": max(s["compare"] for s in seconds),
        },
        "exchange_s": max(e["end"] for e in exchanges) - min(e["start"] for e in exchanges),
    }


def _memory(job: Job) -> dict[str, Any]:
    """Tensors of both processes of the rank that is furthest above its limit, when the state moves."""
    found = []
    for rank in range(_model.WORLD_SIZE):
        trained, source, target = (job.notes(name, rank)[0]["tensors"] for name in ("holds", "parked", "prepared"))
        staging = job.notes("moved", rank)[0]["staging"]
        buffer = job.notes("transfer", rank)[0]["buffer"] + _HASH
        limit = max(sum(trained.values()), sum(target.values())) + buffer
        parts = {f"old {name}": size for name, size in source.items()} | {
            f"new {n}": size for n, size in target.items()
        }
        total = sum(parts.values()) + staging
        found.append((total / limit, parts | {"staging": staging, "limit": limit}))
    worst, parts = max(found, key=lambda pair: pair[0])
    return {"peak_over_limit": worst, "memory": parts}


def _stock(folder: Path, change: _model.Change) -> dict[str, Any]:
    """Saves twice, is killed, starts again at the other layout and loads."""
    checkpoint, second = folder / "checkpoint", 2 * _SAVE_EVERY
    saving = [*STOCK, "--save", str(checkpoint), "--save-interval", str(_SAVE_EVERY)]
    job = Job.stock(folder / "saving", [*change.argv(change.before), *saving], relayout=True)
    try:
        job.wait_for(lambda: _calls(job, "save_checkpoint", 2), "second save", _PATIENCE_S)
    finally:
        job.kill()
    cold_save, save = _calls(job, "save_checkpoint", 2)
    ended = max(_step(steps, second)["end"] for steps in job.all_steps())
    again = folder / "loading"
    again.mkdir()
    (again / _relayout.LOAD_AGAIN).write_text(str(second + 3))
    loading = [*change.argv(change.after), *STOCK, "--load", str(checkpoint)]
    job = Job.stock(again, loading, relayout=True)
    try:
        job.wait_for(lambda: _calls(job, "load_checkpoint", 3), "third load", _PATIENCE_S)
    finally:
        job.kill()
    cold_load, *warm_loads = _calls(job, "load_checkpoint", 3)
    plain, parallel = (end - start for start, end in warm_loads)
    began = max(_step(steps, second + 1)["start"] for steps in job.all_steps())
    parts = {"tail and save": save[1] - ended, "end and start-up": cold_load[0] - save[1]}
    parts |= {"load": cold_load[1] - cold_load[0], "until the first step": began - cold_load[1]}
    return {
        "restart_s": began - ended,
        "restart_parts_s": parts,
        "cold_save_s": cold_save[1] - cold_save[0],
        "save_s": save[1] - save[0],
        "cold_load_s": parts["load"],
        "load_s": min(plain, parallel),
        "warm_loads_s": {"plain": plain, "fully parallel": parallel},
    }


def _calls(job: Job, what: str, count: int) -> list[tuple[float, float]]:
    """First beginning and last end of each call over all ranks, once all have made ``count`` of them."""
    ranks = range(_model.WORLD_SIZE)
    calls = [[line for line in job.notes("checkpoint", rank) if line["what"] == what] for rank in ranks]
    if min(map(len, calls)) < count:
        return []
    return [(min(c[i]["start"] for c in calls), max(c[i]["end"] for c in calls)) for i in range(count)]


# -- for people ------------------------------------------------------------------------------------


def _line(number: int, kind: str, trial: dict[str, Any]) -> str:
    return (
        f"trial {number}, {kind}: {trial['before']} to {trial['after']} after a pause of {trial['pause_s']:.3f} s, "
        f"{trial['prepare_s']:.1f} s of preparation hidden; restart {trial['restart_s']:.1f} s, "
        f"warm save {trial['save_s']:.2f} s and load {trial['load_s']:.2f} s"
    )


def _table(report: dict[str, Any]) -> str:
    mib = 2.0**-20
    lines = []
    for kind, values in report["kinds"].items():
        lines += [
            "",
            f"{kind}: {values['before']} to {values['after']}, {values['state_bytes'] * mib:.0f} MiB of state in all",
            row("pause", values["pause_s"], "s"),
            *(row(f"  {part}", value, "s") for part, value in values["phases_s"].items()),
            *(row(f"  move, {part}", value, "s") for part, value in values["move_parts_s"].items()),
            row("pause with exclusive memory", values["pause_exclusive_s"], "s"),
            row("restart: step to step", values["restart_s"], "s"),
            *(row(f"  {part}", value, "s") for part, value in values["restart_parts_s"].items()),
            row("warm save", values["save_s"], "s"),
            row("warm load", values["load_s"], "s"),
            row("ratio to restart", values["ratio_to_restart"]),
            row("ratio to warm save + load", values["ratio_to_save_load"]),
            row("preparation, hidden", values["prepare_s"], "s"),
            row("preparation, waited for", values["wait_s"], "s"),
            row("preparation, processor time", values["prepare_cpu_s"], "s"),
            row("iteration", values["iteration_s"], "s"),
            row("received from other nodes", values["received_bytes"], "MiB", mib),
            row("  least, nodes in this order", values["least_bytes"], "MiB", mib),
            row("  least, nodes in the best order", values["least_bytes_in_best_order"], "MiB", mib),
            row("exchanged between nodes in", values["exchange_s"], "s"),
            row("  the same, raw", values["raw_s"], "s"),
            *(row(f"memory, {part}", value, "MiB", mib) for part, value in values["memory"].items()),
            *(row(f"exclusive, {part}", value, "MiB", mib) for part, value in values["memory_exclusive"].items()),
        ]
    lines += ["", "what the goals are for (of all kinds, the worst):"]
    lines += [row(goal.name, report[goal.name]) for goal in GOALS if goal.name in report]
    return "\n".join(lines)
