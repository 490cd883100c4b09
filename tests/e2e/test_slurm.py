"""scripts/slurm/*.sbatch on a real Slurm of several virtual nodes (tests/support/slurm.py)."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from megatron_resilience import exits
from megatron_resilience.control.jobdir import JobDir
from megatron_resilience.observe.events import read_events
from megatron_resilience.observe.trace import differences, read
from tests.e2e.test_good_order import after
from tests.e2e.test_hot_swap import longer
from tests.support.configurations import Configuration
from tests.support.oracles import RESHARDABLE, STEADY, resharded_oracle
from tests.support.slurm import Cluster, missing
from tests.support.template import ROOT, TRAIN_GPT, Template

pytestmark = pytest.mark.e2e

LONG = 300
"""Iterations that take longer than Slurm takes to look at time limits."""
SBATCH = ROOT / "scripts" / "slurm" / "hot-swap.sbatch"
RESHARD = SBATCH.with_name("reshard.sbatch")


@pytest.fixture(scope="module")
def _cluster() -> Iterator[Cluster]:
    why = missing()
    if why:
        pytest.skip(f"no virtual Slurm: {why}")
    with Cluster(3) as running:
        yield running


@pytest.fixture
def cluster(_cluster: Cluster) -> Iterator[Cluster]:
    """Its jobs end with the test."""
    yield _cluster
    _cluster.run("scancel", "--user=root", "--signal=KILL", "--full")
    _cluster.run("scancel", "--user=root")


@dataclass
class Submitted:
    """A job of the sbatch script, on two nodes and a spare, two ranks each."""

    cluster: Cluster
    number: str
    folder: Path

    @property
    def job_dir(self) -> JobDir:
        return JobDir(self.folder / "job")

    @property
    def output(self) -> str:
        """Of the script and all its nodes."""
        files = [self.folder / "slurm.txt", *sorted((self.folder / "job" / "log").glob("*.txt"))]
        return "\n".join(f"--- {path.name}\n{path.read_text()[-3000:]}" for path in files if path.exists())

    @property
    def state(self) -> str:
        return self.cluster.job(self.number).get("JobState", "")

    def wait_for_step(self, iteration: int) -> None:
        path = self.folder / "trace" / "rank0.jsonl"

        def there() -> bool:
            assert self.state in ("PENDING", "RUNNING", "SIGNALING"), f"{self.state}:\n{self.output}"
            return path.exists() and f'"iteration": {iteration},' in path.read_text()

        self.cluster.wait(there, f"iteration {iteration}")

    def wait_until_freed(self) -> None:
        """The job has left the queue, and no node is its any more."""
        self.cluster.wait(
            lambda: self.state not in ("PENDING", "RUNNING", "SIGNALING", "COMPLETING"), "the end of the job", 90
        )
        self.cluster.wait(lambda: not self.cluster.allocated(), "the nodes to be free", 60)


def submit(
    cluster: Cluster,
    folder: Path,
    configuration: Configuration,
    *options: str,
    script: Path = SBATCH,
    **settings: str,
) -> Submitted:
    folder.mkdir(parents=True, exist_ok=True)
    environment = {
        "SPARES": "1",
        "GPUS_PER_NODE": "2",
        "JOB_DIR": str(folder / "job"),
        "POLL_S": "1",
        "MEGATRON_RESILIENCE_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
        **settings,
    }
    command = ["sbatch", "--parsable", "--nodes=3", "--mem=100", f"--output={folder}/slurm.txt", *options, str(script)]
    command += [TRAIN_GPT, *configuration.argv, "--trace-dir", str(folder / "trace")]
    return Submitted(cluster, cluster.run(*command, env=environment, cwd=folder), folder)


def kill_and_finish(cluster: Cluster, folder: Path, victim: str, oracle: Path, configuration: Configuration) -> None:
    job = submit(cluster, folder, configuration)
    try:
        job.wait_for_step(5)
        cluster.kill_node(victim)
        job.wait_until_freed()
    finally:
        cluster.revive(victim)
    assert job.job_dir.outcome() == (0, ""), job.output
    assert differences(folder / "trace", oracle) == []
    (recovered,) = [e for e in read_events(folder / "job" / "events") if e["kind"] == "recovered"]
    assert victim in recovered["cause"] and recovered["steps_again"] <= 1


def test_the_node_with_the_batch_script_is_killed(cluster: Cluster, tmp_path: Path, oracle) -> None:
    """With it go srun, rank 0 and the coordinator. Training goes on, and the nodes are given back at the end."""
    configuration = longer("tp2_dp2_fp32", 60)
    kill_and_finish(cluster, tmp_path, "n1", oracle(configuration), configuration)


@pytest.mark.full
@pytest.mark.parametrize("victim", ["n2", "n1", "n2", "n1", "n2"])
def test_again_and_again(cluster: Cluster, tmp_path: Path, oracle, victim: str) -> None:
    configuration = longer("tp2_dp2_fp32", 60)
    kill_and_finish(cluster, tmp_path, victim, oracle(configuration), configuration)


@pytest.mark.full
def test_the_layout_changes_and_then_a_node_is_killed(cluster: Cluster, template: Template, tmp_path: Path) -> None:
    """reshard.sbatch with a schedule and a spare: what follows equals stock Megatron going on at the new layout."""
    changed, last, layout = 8, 60, "PP2 DP2"
    configuration = longer("tp2_dp2_fp32", last, *RESHARDABLE)
    oracle = resharded_oracle(template, tmp_path, configuration, changed, layout, last)
    schedule = tmp_path / "schedule.yaml"
    schedule.write_text(f"{changed}: {layout}\n")
    job = submit(cluster, tmp_path / "run", configuration, script=RESHARD, SCHEDULE=str(schedule))
    try:
        job.wait_for_step(changed + 10)
        cluster.kill_node("n2")
        job.wait_until_freed()
    finally:
        cluster.revive("n2")
    assert job.job_dir.outcome() == (0, ""), job.output
    events = read_events(tmp_path / "run" / "job" / "events")
    (switched,) = [event for event in events if event["kind"] == "switch_done"]
    (recovered,) = [event for event in events if event["kind"] == "recovered" and "n2" in event["cause"]]
    assert switched["generation"] == changed < recovered["generation"]
    assert recovered["steps_again"] <= 1
    for lines in read(tmp_path / "run" / "trace").values():
        assert {line["iteration"] for line in lines} == set(range(1, last + 1))
    assert after(differences(tmp_path / "run" / "trace", oracle)) == []


@pytest.mark.full
def test_the_time_limit_saves_requeues_and_goes_on(cluster: Cluster, template: Template, tmp_path: Path) -> None:
    """The first run is cut off by its time limit; the second goes on with the next step, in the same trace, to the end."""
    whole = longer("tp2_dp2_bf16_overlap", LONG, *STEADY)
    argv = [*whole.argv, "--trace-dir", str(tmp_path / "whole")]
    assert all(r.returncode == 0 for r in template.run_ranks(whole.world_size, argv, timeout=600))
    save = ("--save", str(tmp_path / "ckpt"), "--save-interval", "100000", "--load", str(tmp_path / "ckpt"))
    command = longer("tp2_dp2_bf16_overlap", LONG, *STEADY, *save)
    job = submit(cluster, tmp_path / "run", command, "--time=60")
    latest = tmp_path / "ckpt" / "latest_checkpointed_iteration.txt"
    job.wait_for_step(5)
    # Less than the ten minutes before the limit that the script asks to be told of it.
    cluster.run("scontrol", "update", f"JobId={job.number}", "TimeLimit=9")
    cluster.wait(latest.exists, "the checkpoint", 180)
    saved = int(latest.read_text())
    # Slurm lets a requeued job wait for two minutes, and forgets what was asked of it while it was completing.
    cluster.wait(lambda: job.state == "PENDING", "the requeue")
    cluster.run("scontrol", "update", f"JobId={job.number}", "TimeLimit=60", "StartTime=now")
    cluster.wait(lambda: job.state == "COMPLETED", "the end", 400)
    oracle = read(tmp_path / "whole")
    traced = read(tmp_path / "run" / "trace")
    assert 5 <= saved < LONG
    # Neither a step left out nor one done twice.
    assert all([line["iteration"] for line in lines] == list(range(1, LONG + 1)) for lines in traced.values())
    assert all(lines == oracle[rank] for rank, lines in traced.items())
    assert after(differences(tmp_path / "run" / "trace", tmp_path / "whole")) == []
    assert "goes back into the queue" in job.output


@pytest.mark.full
def test_two_jobs_on_the_same_nodes(cluster: Cluster, tmp_path: Path, oracle) -> None:
    """One loses a rank; the other does not notice. Each has its own port, secret, events and files."""
    configuration = longer("tp2_dp2_fp32", 60)
    jobs = [submit(cluster, tmp_path / name, configuration, "--oversubscribe") for name in ("a", "b")]
    for job in jobs:
        job.wait_for_step(3)
    assert all(job.state == "RUNNING" for job in jobs)
    secrets = {(job.folder / "job" / "secret").read_text() for job in jobs}
    ports = {json.loads((job.folder / "job" / "agents.json").read_text())["agents"][0][2] for job in jobs}
    assert len(secrets) == len(ports) == 2
    for job in jobs:
        job.wait_until_freed()
        assert job.job_dir.outcome() == (0, ""), job.output
        assert differences(job.folder / "trace", oracle(configuration)) == []


def direct(tmp_path: Path, path: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The script run by hand in an environment like a job's."""
    known = {
        "PATH": path,
        "SLURM_JOB_ID": "1",
        "SLURM_JOB_NODELIST": "n[1-2]",
        "SLURM_NNODES": "2",
        "GPUS_PER_NODE": "1",
    }
    known |= {"SLURM_SUBMIT_DIR": str(tmp_path), **environment}
    return subprocess.run(
        ["/bin/bash", str(SBATCH), "train.py"], env=known, cwd=tmp_path, capture_output=True, text=True, timeout=60
    )


def test_without_scontrol_it_fails_loudly(tmp_path: Path) -> None:
    result = direct(tmp_path, str(tmp_path))
    assert result.returncode == 2
    assert "scontrol is not on PATH" in result.stderr


def test_a_first_node_that_does_not_resolve_fails_loudly(cluster: Cluster, tmp_path: Path) -> None:
    known = {"SLURM_CONF": cluster.environment["SLURM_CONF"], "HEAD_ADDRESS": "no-such-host.invalid"}
    result = direct(tmp_path, os.environ["PATH"], **known)
    assert result.returncode == 2
    assert "no-such-host.invalid does not resolve" in result.stderr


@pytest.mark.full
def test_a_job_that_cannot_start_gives_its_nodes_back(cluster: Cluster, tmp_path: Path) -> None:
    """Megatron refuses an option: the job's exit status is the launcher's, and nothing is held."""
    job = submit(cluster, tmp_path, longer("tp2_dp2_fp32", 5, "--no-such-option"))
    job.wait_until_freed()
    assert job.state == "FAILED"
    assert job.job_dir.outcome() != (exits.LEFT, "") and "no-such-option" in job.output, job.output
