"""What planning costs: one rank's plan, stages included, for real models at 64 to 10,240 ranks.

Each case runs in a process of its own, so its memory is its own. The slowest of the sampled ranks counts; the
layouts' tables, which every rank builds once, count with it. The catalogue is timed apart.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from megatron_resilience.bench._report import check_writable, write

CASES: list[tuple[str, str, str, str, float]] = [
    ("70b-512", "llama2-70b", "TP8·PP8·DP8", "TP4·PP4·DP32", 0.5),
    ("70b-4096", "llama2-70b", "TP8·PP8·DP64", "TP4·PP4·DP256", 0.5),
    ("235b-128", "qwen3-moe-235b", "TP4·PP2·DP16·EP16·ETP1", "TP2·PP1·DP64·EP32·ETP1", 1.0),
    ("235b-1024", "qwen3-moe-235b", "TP4·PP2·DP128·EP32·ETP1", "TP2·PP1·DP512·EP16·ETP1", 1.0),
    ("235b-10240", "qwen3-moe-235b", "TP4·PP2·DP1280·EP64·ETP1", "TP2·PP1·DP5120·EP128·ETP1", 5.0),
]
"""name, model, from, to, goal in seconds."""
MEMORY_GOAL_GIB = 1.0


def main(arguments: list[str]) -> int:
    """Run all cases, or one with ``--case`` in this process; returns 1 when a goal is missed."""
    parser = argparse.ArgumentParser(prog="python -m megatron_resilience.bench plan", description=__doc__)
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the rows there")
    parser.add_argument("--case", choices=[c[0] for c in CASES], help="run this case only, in this process")
    parser.add_argument("--samples", type=int, default=16, help="ranks to sample")
    options = parser.parse_args(arguments)
    check_writable(options.json)
    if options.case:
        rows = [measure(*next(c for c in CASES if c[0] == options.case), options.samples)]
    else:
        rows = [_in_process_of_its_own(case[0], options.samples) for case in CASES]
        for row in rows:
            print(
                f"{row['name']:<12} {row['ranks']:>6} ranks  {row['seconds']:.3f} s "
                f"(goal {row['goal_seconds']} s)  "
                f"tables {row['tables_seconds']:.3f} s  slowest rank {row['rank_seconds']:.3f} s  "
                f"catalogue {row['catalogue_seconds']:.3f} s  {row['rss_gib']:.2f} GiB  "
                f"cpu {row['cpu_seconds']:.3f} s  load {row['load_average']:.1f}"
            )
        print(_growth(rows))
    if options.case and options.json is None:
        print(json.dumps({"rows": rows}, indent=1))
    write(options.json, {"rows": rows})
    missed = [r["name"] for r in rows if r["seconds"] > r["goal_seconds"] or r["rss_gib"] > MEMORY_GOAL_GIB]
    if missed:
        print(f"goals missed: {', '.join(missed)}", file=sys.stderr)
    return int(bool(missed))


def measure(name: str, model: str, source: str, target: str, goal: float, samples: int) -> dict[str, Any]:
    """One row: seconds of tables and the slowest sampled rank's plan, and the memory."""
    from megatron_resilience.routing.plan import plan_endpoint
    from megatron_resilience.routing.problem import relayout
    from megatron_resilience.routing.staging import chunks, fit_budget
    from megatron_resilience.vps.families import load_model
    from megatron_resilience.vps.layout import parse_layout
    from megatron_resilience.vps.space import StateSpace

    begin = time.perf_counter()
    catalogue = load_model(model)
    _ = catalogue.columns
    catalogue_seconds = time.perf_counter() - begin
    begin, begin_cpu = time.perf_counter(), time.process_time()
    problem = relayout(StateSpace(catalogue, parse_layout(source)), StateSpace(catalogue, parse_layout(target)))
    budget = fit_budget(problem, 1 << 40)
    tables = time.perf_counter() - begin
    tables_cpu = time.process_time() - begin_cpu
    world = problem.target.layout.world
    slowest, slowest_cpu, fragments = 0.0, 0.0, 0
    plans = {}
    for rank in np.unique(np.linspace(0, world - 1, samples).astype(int)).tolist():
        begin, begin_cpu = time.perf_counter(), time.process_time()
        plan = plans[rank] = plan_endpoint(problem, rank)
        stages = sum(1 for moves in (plan.sends, plan.receives) for _ in chunks(moves, budget.chunk))
        slowest = max(slowest, time.perf_counter() - begin)
        slowest_cpu = max(slowest_cpu, time.process_time() - begin_cpu)
        fragments = max(fragments, len(plan.sends) + len(plan.receives) + len(plan.keeps))
        if not stages:
            raise AssertionError(f"{name}: rank {rank} moves nothing, so nothing is measured")
        # Nothing that one rank's plan derived may make the next one cheaper.
        problem.known.clear()
        for space in (problem.source, problem.target):
            space.forget()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return {
        "name": name,
        "model": model,
        "from": source,
        "to": target,
        "ranks": world,
        "seconds": tables + slowest,
        "goal_seconds": goal,
        "rss_gib": peak,
        # On a busy machine the seconds are larger than what planning takes; they are what counts all the same.
        "cpu_seconds": tables_cpu + slowest_cpu,
        "load_average": os.getloadavg()[0],
        "tables_seconds": tables,
        "rank_seconds": slowest,
        "catalogue_seconds": catalogue_seconds,
        "sampled_ranks": samples,
        "most_fragments": fragments,
        "pairs_checked": _agreement(problem, plans),
    }


def _agreement(problem: Any, plans: dict[int, Any]) -> int:
    """Hold what each sampled rank receives against what its senders' plans say, for one sender per rank.

    Returns:
        Number of messages compared.

    Raises:
        AssertionError: two ranks disagree.
    """
    from megatron_resilience.routing.plan import plan_endpoint

    compared = 0
    for rank, plan in plans.items():
        for (phase, peer), size in list(plan.receives.per_message().items())[:1]:
            sent = plan_endpoint(problem, peer).sends.per_message().get((phase, rank))
            if sent != size:
                raise AssertionError(f"rank {rank} expects {size} bytes from {peer}, which sends {sent}")
            compared += 1
    return compared


def _in_process_of_its_own(case: str, samples: int) -> dict[str, Any]:
    command = [
        sys.executable,
        "-m",
        "megatron_resilience.bench",
        "plan",
        "--case",
        case,
        "--samples",
        str(samples),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if not done.stdout:
        raise RuntimeError(f"case {case} failed:\n{done.stderr}")
    return json.loads(done.stdout)["rows"][0]


def _growth(rows: list[dict[str, Any]]) -> str:
    lines = ["growth with ranks:"]
    for model in dict.fromkeys(r["model"] for r in rows):
        own = [r for r in rows if r["model"] == model]
        first, last = own[0], own[-1]
        lines.append(
            f"  {model}: {last['ranks'] / first['ranks']:.0f}x the ranks, "
            f"{last['seconds'] / first['seconds']:.2f}x the time"
        )
    return "\n".join(lines)
