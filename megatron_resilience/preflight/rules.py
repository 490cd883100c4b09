"""What is refused, and what is warned of. Pure: everything that is looked at is passed in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megatron_resilience.preflight.estimate import Estimate
from megatron_resilience.preflight.job import GIB, Job
from megatron_resilience.transport.environment import problems

OPEN_FILES, OPEN_FILES_PER_PEER = 256, 8
"""What a rank is given, on the safe side: gloo has a connection to every member of every group, of two epochs during a swap."""


@dataclass(frozen=True)
class Finding:
    """``refused``: it cannot work or is unsafe; otherwise a warning. ``text`` says what to do."""

    refused: bool
    text: str


@dataclass(frozen=True)
class Machine:
    """What the machine that the preflight runs on is like; None: it could not be found out.

    Attributes:
        open_files: how many a process may have.
        locked_memory_bytes: how much it may lock (pinned host memory); None also when unlimited.
        host_memory_bytes: that is available.
        torch, nccl, driver: versions.
    """

    open_files: int | None = None
    locked_memory_bytes: int | None = None
    host_memory_bytes: int | None = None
    torch: str | None = None
    nccl: str | None = None
    driver: str | None = None


def job_rules(job: Job, taken: Estimate) -> list[Finding]:
    """About the job itself."""
    found = []

    def refuse(text: str) -> None:
        found.append(Finding(True, text))

    def warn(text: str) -> None:
        found.append(Finding(False, text))

    hardware, deadpool = job.hardware, job.deadpool
    if job.layout.world != job.world_size:
        refuse(
            f"the layout {job.layout} has {job.layout.world} ranks, {job.nodes} nodes of {job.ranks_per_node} have "
            f"{job.world_size}: change one of them (spares are not counted)"
        )
    if hardware.device_memory_gib is not None and taken.device_bytes > hardware.device_memory_gib * GIB:
        refuse(
            f"a rank's parameters, gradients and optimizer take {taken.device_bytes / GIB:.1f} GiB of device memory, which has "
            f"{hardware.device_memory_gib:g}: more TP, PP or nodes"
        )
    if hardware.host_memory_gib is not None and taken.host_bytes > hardware.host_memory_gib * GIB:
        refuse(
            f"copies take {taken.host_bytes / GIB:.1f} GiB of host memory per node, which has {hardware.host_memory_gib:g}: "
            f"fewer --deadpool-replicas ({deadpool.replicas} now), or more nodes"
        )
    found += _time_limits(job)
    if job.spares == 0:
        warn("no spare: the loss of a node ends the job (--spares)")
    elif job.spares < deadpool.replicas:
        warn(
            f"{deadpool.replicas} nodes may die at once, but {job.spares} waits to replace them: --spares {deadpool.replicas}"
        )
    if deadpool.replicas == 0:
        warn("--deadpool-replicas 0: deaths of ranks are survived, the loss of a node is not")
    step = job.step_seconds
    if step is not None and taken.send_seconds is not None and taken.send_seconds > step:
        every = int(taken.send_seconds / step) + 1
        warn(
            f"the copies of a step take {taken.send_seconds:.2f} s on the network, a step {step:g} s: about every {every}th step "
            "is protected; a faster interface (--node-addr), fewer --deadpool-replicas, or a larger batch"
        )
    if step is not None and taken.copy_seconds is not None and taken.copy_seconds > step:
        warn(f"the copy to host memory takes {taken.copy_seconds:.2f} s, a step {step:g} s: steps will wait for it")
    return found


def _time_limits(job: Job) -> list[Finding]:
    found = []
    hang, group, heartbeat = job.deadpool.hang_timeout_s, job.distributed_timeout_s, job.heartbeat_s
    if hang and heartbeat >= hang:
        found.append(
            Finding(
                True,
                f"--heartbeat-timeout is {heartbeat:g} s and --deadpool-hang-timeout {hang:g} s: a dead node would be taken "
                "for hung ranks; the first must be shorter",
            )
        )
    if hang > group / 2:
        found.append(
            Finding(
                True,
                f"--deadpool-hang-timeout is {hang:g} s and --distributed-timeout-minutes {group / 60:g}: torch would give up "
                f"before the hung rank is found; at least --distributed-timeout-minutes {-(-2 * hang // 60):g}, or a shorter "
                "--deadpool-hang-timeout",
            )
        )
    if job.step_seconds is not None and hang and hang < 3 * job.step_seconds:
        found.append(
            Finding(
                True,
                f"--deadpool-hang-timeout is {hang:g} s and a step takes {job.step_seconds:g} s: slow steps would be looked "
                f"into as hangs; at least {3 * job.step_seconds:g}",
            )
        )
    return found


def machine_rules(job: Job, taken: Estimate, machine: Machine, environment: Mapping[str, str]) -> list[Finding]:
    """About the machine that this runs on, which is to be like the job's nodes."""
    found = [Finding(True, text) for text in problems(environment)]
    needed = OPEN_FILES + OPEN_FILES_PER_PEER * job.world_size
    if machine.open_files is not None and machine.open_files < needed:
        found.append(
            Finding(
                True,
                f"a process may have {machine.open_files} open files, ranks need up to about {needed}: ulimit -n {needed}, "
                "in the batch script",
            )
        )
    pinned = 2 * taken.rank_bytes
    if machine.locked_memory_bytes is not None and machine.locked_memory_bytes < pinned:
        found.append(
            Finding(
                False,
                f"a process may lock {machine.locked_memory_bytes / GIB:.1f} GiB, a rank pins {pinned / GIB:.1f}: "
                "ulimit -l unlimited, where devices are used",
            )
        )
    if machine.host_memory_bytes is not None and machine.host_memory_bytes < taken.host_bytes:
        found.append(
            Finding(
                False,
                f"this machine has {machine.host_memory_bytes / GIB:.1f} GiB of memory left, copies take "
                f"{taken.host_bytes / GIB:.1f} GiB per node: run the preflight on a node of the job",
            )
        )
    return found
