"""What a job's protection will take, and whether it will hold; exits with 2 when it is refused.

preflight CONFIG judges ready settings (configs/jobs, or a YAML file like them). With the arguments of launch and of the training
script it judges that command: put `preflight` in the place of `launch`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
from collections.abc import Iterable
from pathlib import Path

from megatron_resilience import exits
from megatron_resilience.control import options as launch_options
from megatron_resilience.errors import ConfigurationError
from megatron_resilience.preflight.arguments import job_from
from megatron_resilience.preflight.changes import Change, change_rules, changes
from megatron_resilience.preflight.estimate import Estimate, estimate
from megatron_resilience.preflight.job import GIB, Hardware, Job, load_hardware, load_job
from megatron_resilience.preflight.machine import look
from megatron_resilience.preflight.rules import Finding, Machine, job_rules, machine_rules

_SHOWN_NODES = 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of ``preflight``: its own, then those of ``launch``."""
    parser.add_argument(
        "--hardware", type=Path, metavar="FILE", help="YAML with a node's memory and links (configs/jobs have examples)"
    )
    parser.add_argument("--step-seconds", type=float, metavar="S", help="of one training step, if it is known")
    parser.add_argument("--anywhere", action="store_true", help="do not judge the machine that this runs on")
    parser.add_argument("--json", action="store_true", help="as one JSON object")
    launch_options.add_arguments(parser, launching=False)


def run(args: argparse.Namespace) -> int:
    """Runs the command.

    Raises:
        ConfigurationError: what is asked for cannot be read, or has no sense.
    """
    job = _job(args)
    try:
        taken, planned = estimate(job), changes(job)
    except ValueError as error:
        raise ConfigurationError(str(error)) from error
    machine = None if args.anywhere else look()
    findings = job_rules(job, taken) + change_rules(job, planned)
    if machine is not None:
        findings += machine_rules(job, taken, machine, os.environ)
    refused = any(finding.refused for finding in findings)
    if args.json:
        figures = dataclasses.asdict(taken) | {"changes": [_described(change) for change in planned]}
        figures |= {"refused": [f.text for f in findings if f.refused]}
        print(json.dumps(figures | {"warnings": [f.text for f in findings if not f.refused]}))
    else:
        print("\n".join(report(job, taken, planned, machine, findings)))
    return exits.IMPOSSIBLE if refused else exits.DONE


def _job(args: argparse.Namespace) -> Job:
    if args.script.endswith(".py"):
        hardware = load_hardware(args.hardware) if args.hardware else Hardware()
        if args.nnodes is None:
            raise ConfigurationError("--nnodes is missing: preflight takes the arguments of launch")
        args.node_rank = args.node_rank if args.node_rank is not None or args.local_nodes else 0
        return job_from(launch_options.from_namespace(args, dict(os.environ)), hardware, args.step_seconds)
    if args.nnodes is not None or args.script_args:
        raise ConfigurationError(
            f"{args.script} is neither a training script (.py) nor alone: give settings or arguments, not both"
        )
    job = load_job(args.script)
    if args.hardware:
        job = dataclasses.replace(job, hardware=load_hardware(args.hardware))
    return job if args.step_seconds is None else dataclasses.replace(job, step_seconds=args.step_seconds)


def _described(change: Change) -> dict[str, object]:
    return dataclasses.asdict(change) | {"before": str(change.before), "after": str(change.after)}


def report(
    job: Job, taken: Estimate, planned: Iterable[Change], machine: Machine | None, findings: Iterable[Finding]
) -> list[str]:
    """Lines for people."""
    hardware = job.hardware
    lines = [
        f"{job.name}: {job.catalogue.name}, {job.layout} on {job.nodes} nodes of {job.ranks_per_node} ranks, {job.spares} spare",
        f"  state                {job.catalogue.state_bytes / GIB:10.2f} GiB, each element once",
        f"  device memory        {taken.device_bytes / GIB:10.2f} GiB per rank, state only{_of(hardware.device_memory_gib)}",
        f"  host memory          {taken.host_bytes / GIB:10.2f} GiB per node for two generations and "
        f"{job.deadpool.replicas} copies{_of(hardware.host_memory_gib)}",
        f"  device to host       {taken.rank_bytes / GIB:10.2f} GiB per rank and step{_seconds(taken.copy_seconds, job)}",
        f"  copies to others     {taken.sent_bytes / GIB:10.2f} GiB per node and step{_seconds(taken.send_seconds, job)}",
    ]
    if taken.send_seconds is not None and job.deadpool.replicas:
        lines.append(
            f"  a node replaced      {taken.send_seconds / job.deadpool.replicas:10.2f} s to send its state, besides start-up, "
            "rebuilding connections and the step that is done again"
        )
    for change in planned:
        lines.append(
            f"  change of layout     {change.device_bytes / GIB:10.2f} GiB per rank and {change.host_bytes / GIB:.2f} GiB of "
            f"host memory per node while {change.before} becomes {change.after}"
        )
    lines.append(f"  time limits          {_limits(job)}")
    if job.deadpool.replicas:
        shown = [f"{node} by {', '.join(map(str, by))}" for node, by in list(taken.keepers.items())[:_SHOWN_NODES]]
        more = "" if len(taken.keepers) <= _SHOWN_NODES else f" and {len(taken.keepers) - _SHOWN_NODES} more"
        lines.append(f"  node is kept by      {'; '.join(shown)}{more}")
    if machine is not None:
        lines.append(
            f"  here                 torch {machine.torch}, NCCL {machine.nccl}, NVIDIA driver {machine.driver}"
        )
    for finding in findings:
        lines.append(f"{'REFUSED' if finding.refused else 'warning'}: {finding.text}")
    return lines


def _limits(job: Job) -> str:
    hang = f"{job.deadpool.hang_timeout_s:g} s hang" if job.deadpool.hang_timeout_s else "no limit for hangs"
    return f"{job.heartbeat_s:g} s heartbeat < {hang} < {job.distributed_timeout_s:g} s process groups"


def _of(limit: float | None) -> str:
    return "" if limit is None else f", of {limit:g}"


def _seconds(seconds: float | None, job: Job) -> str:
    if seconds is None:
        return ""
    step = job.step_seconds
    return f", {seconds:.2f} s at the link's rate" + ("" if step is None else f", behind a step of {step:g} s")
