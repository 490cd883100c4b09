"""What the sbatch scripts ask Slurm for, by a Slurm that only takes notes. tests/e2e/test_slurm.py runs them on a real one."""

from __future__ import annotations

import shlex
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.template import ROOT

SLURM = ROOT / "scripts" / "slurm"
NOTES = """#!/bin/bash
echo "$(basename "$0") $(printf '%q ' "$@")" >>"$NOTES"
"""
TOOLS = {
    "srun": NOTES,
    "squeue": NOTES,
    "scancel": NOTES,
    "scontrol": NOTES
    + """
case "$*" in
    *"show hostnames"*) printf 'n1\\nn2\\n' ;;
    *"show node"*) echo "NodeName=n1 NodeAddr=127.0.0.1 Port=1" ;;
    *"show job"*) echo "JobId=7 JobState=COMPLETING Command=$SUBMITTED WorkDir=/" ;;
esac
""",
}


@dataclass
class Ran:
    """How a script ended, and what it asked for."""

    result: subprocess.CompletedProcess[str]
    calls: list[list[str]]

    @property
    def training(self) -> list[str]:
        """The srun that starts the agents."""
        (found,) = [call for call in self.calls if call[0] == "srun" and "megatron-resilience" in call]
        return found


@pytest.fixture
def slurm(tmp_path: Path):
    """Runs a script of scripts/slurm as slurmd would: a copy elsewhere, with the job's environment."""
    tools, copy = tmp_path / "tools", tmp_path / "spool" / "slurm_script"
    for folder in (tools, copy.parent):
        folder.mkdir()
    for name, text in TOOLS.items():
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)

    def run(name: str, *arguments: str, submitted: Path | None = None, **settings: str) -> Ran:
        copy.write_text((SLURM / name).read_text())
        notes = tmp_path / "notes"
        notes.write_text("")
        environment = {
            "PATH": f"{tools}:/usr/bin:/bin:/usr/sbin",
            "NOTES": str(notes),
            "SUBMITTED": str(submitted or SLURM / name),
            "SLURM_JOB_ID": "7",
            "SLURM_JOB_NODELIST": "n[1-2]",
            "SLURM_NNODES": "2",
            "SLURM_SUBMIT_DIR": str(tmp_path),
            "GPUS_PER_NODE": "8",
            "POLL_S": "0.1",
        }
        result = subprocess.run(
            ["/bin/bash", str(copy), *arguments],
            env=environment | settings,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=60,
        )
        return Ran(result, [shlex.split(line) for line in notes.read_text().splitlines()])

    return run


def value(call: list[str], option: str) -> str:
    """Of an option that is given once."""
    assert call.count(option) == 1
    return call[call.index(option) + 1]


def test_hot_swap_starts_an_agent_per_node(slurm):
    training = slurm("hot-swap.sbatch", "pretrain_gpt.py", "--lr", "1").training
    assert {"--no-kill", "--kill-on-bad-exit=0", "--wait=0", "--ntasks-per-node=1"} < set(training)
    assert value(training, "--nnodes") == "2" and value(training, "--spares") == "1"
    assert value(training, "--rdzv-endpoint") == "127.0.0.1:20007" and value(training, "--nproc-per-node") == "8"
    assert training[-5:] == ["pretrain_gpt.py", "--lr", "1", "--deadpool", "--exit-signal-handler"]
    assert not any(word.startswith("--container") for word in training)


def test_reshard_adds_what_a_change_of_layout_needs(slurm, tmp_path):
    (tmp_path / "my schedule.yaml").write_text("5: PP2\n")
    training = slurm("reshard.sbatch", "pretrain_gpt.py", SCHEDULE="my schedule.yaml").training
    assert value(training, "--spares") == "0"
    assert value(training, "--hotswap-schedule") == str(tmp_path / "my schedule.yaml")
    assert value(training, "--deadpool-on-no-spare") == "shrink"
    assert {"--hotswap-parallelism", "--deadpool", "--exit-signal-handler"} < set(training)


def test_reshard_with_spares(slurm):
    training = slurm("reshard.sbatch", "pretrain_gpt.py", SPARES="1", ON_NO_SPARE="stop").training
    assert value(training, "--spares") == "1" and value(training, "--deadpool-on-no-spare") == "stop"
    assert "--hotswap-schedule" not in training


@pytest.mark.parametrize("script", ["hot-swap.sbatch", "reshard.sbatch"])
def test_in_a_container(slurm, tmp_path, script):
    schedule = tmp_path / "schedule.yaml"
    schedule.write_text("5: PP2\n")
    settings = {"CONTAINER": "nvcr.io#nvidia/pytorch:1", "CONTAINER_MOUNTS": "/lustre:/lustre"}
    ran = slurm(script, "pretrain_gpt.py", SCHEDULE=str(schedule), **settings)
    job_dir = tmp_path / "megatron-resilience-7"
    mounts = [
        "/lustre:/lustre",
        *([f"{schedule}:{schedule}:ro"] if script == "reshard.sbatch" else []),
        f"{job_dir}:{job_dir}",
    ]
    assert "--container-image=nvcr.io#nvidia/pytorch:1" in ran.training
    assert f"--container-mounts={','.join(mounts)}" in ran.training
    # Who gives the nodes back runs outside: the container has no Slurm.
    (janitor,) = [call for call in ran.calls if call[0] == "srun" and call[-1] == "janitor"]
    assert not any(word.startswith("--container") for word in janitor)


@pytest.mark.parametrize(
    ("settings", "arguments", "message"),
    [
        ({}, [], "no training script"),
        ({"SLURM_JOB_ID": ""}, ["train.py"], "this runs under Slurm only"),
        ({"SCHEDULE": "none.yaml"}, ["train.py"], "SCHEDULE=none.yaml: there is no such file"),
        ({"SUBMITTED": "/elsewhere/reshard.sbatch"}, ["train.py"], "/elsewhere/hot-swap.sbatch cannot be read on"),
        ({"HOT_SWAP_SBATCH": "/none/hot"}, ["train.py"], "/none/hot cannot be read on"),
    ],
)
def test_reshard_fails_loudly(slurm, settings, arguments, message):
    ran = slurm("reshard.sbatch", *arguments, **settings)
    assert ran.result.returncode == 2
    assert f"reshard.sbatch: {message}" in ran.result.stderr
    assert not any(call[0] == "srun" for call in ran.calls)
