"""Unsafe combinations are refused, each with the remedy; safe ones are not."""

from dataclasses import replace

import pytest

from megatron_resilience.preflight.estimate import estimate
from megatron_resilience.preflight.job import Hardware, load_job
from megatron_resilience.preflight.rules import Machine, job_rules, machine_rules

JOB = load_job("7b")
TAKEN = estimate(JOB)
LIMITS = JOB.deadpool


@pytest.mark.parametrize(
    ("job", "says"),
    [
        (replace(JOB, nodes=9), "has 64 ranks, 9 nodes of 8 have 72"),
        (replace(JOB, hardware=Hardware(device_memory_gib=16)), "more TP, PP or nodes"),
        (replace(JOB, hardware=Hardware(host_memory_gib=32)), "fewer --deadpool-replicas"),
        (replace(JOB, heartbeat_s=300), "--heartbeat-timeout is 300 s and --deadpool-hang-timeout 300 s"),
        (replace(JOB, distributed_timeout_s=300), "at least --distributed-timeout-minutes 10"),
        (replace(JOB, step_seconds=200), "at least 600"),
    ],
)
def test_refused_with_the_remedy(job, says):
    (finding,) = [f for f in job_rules(job, TAKEN) if f.refused]
    assert says in finding.text


@pytest.mark.parametrize(
    ("job", "says"),
    [
        (replace(JOB, spares=0), "--spares"),
        (replace(JOB, deadpool=replace(LIMITS, replicas=2)), "--spares 2"),
        (replace(JOB, deadpool=replace(LIMITS, replicas=0)), "the loss of a node is not"),
        (replace(JOB, step_seconds=TAKEN.send_seconds / 2.5), "about every 3th step"),
        (replace(JOB, step_seconds=TAKEN.copy_seconds / 2), "steps will wait for it"),
    ],
)
def test_warned_of(job, says):
    findings = job_rules(job, TAKEN)
    assert any(says in f.text for f in findings) and not any(f.refused for f in findings)


def test_a_fit_job_has_no_findings():
    assert job_rules(replace(JOB, step_seconds=5), TAKEN) == []
    fit = Machine(open_files=65536, locked_memory_bytes=None, host_memory_bytes=2**40)
    assert machine_rules(JOB, TAKEN, fit, {}) == []


def test_switched_off_hangs_have_no_order():
    assert job_rules(replace(JOB, deadpool=replace(LIMITS, hang_timeout_s=0), distributed_timeout_s=60), TAKEN) == []


@pytest.mark.parametrize(
    ("machine", "environment", "refused", "says"),
    [
        (Machine(open_files=512), {}, True, "ulimit -n 768"),
        (Machine(), {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}, True, "unset TORCH_NCCL_ASYNC_ERROR_HANDLING"),
        (Machine(locked_memory_bytes=2**26), {}, False, "ulimit -l unlimited"),
        (Machine(host_memory_bytes=2**30), {}, False, "on a node of the job"),
    ],
)
def test_a_machine_that_does_not_fit(machine, environment, refused, says):
    (finding,) = machine_rules(JOB, TAKEN, machine, environment)
    assert finding.refused is refused and says in finding.text
