"""Unmodified Megatron trains on the CPU, bit-equal whenever nothing differs."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_resilience.observe import trace
from tests.support.configurations import CONFIGURATIONS, Configuration
from tests.support.template import ROOT, TRAIN_GPT, Template, plain_environment

pytestmark = pytest.mark.e2e


def train(template: Template, configuration: Configuration, folder: Path, **kwargs) -> dict[int, list[dict]]:
    """Runs the configuration in forked ranks and returns their traces."""
    argv = [*configuration.argv, "--trace-dir", str(folder)]
    for result in template.run_ranks(configuration.world_size, argv, **kwargs):
        assert result.returncode == 0, result.output
    return trace.read(folder)


def torchrun(configuration: Configuration, folder: Path, script: str) -> dict[int, list[dict]]:
    """The same with the torchrun command."""
    command = [str(Path(sys.executable).with_name("torchrun")), "--standalone"]
    command += ["--nproc-per-node", str(configuration.world_size), script, *configuration.argv]
    command += ["--trace-dir", str(folder)]
    done = subprocess.run(command, env=plain_environment(), cwd=ROOT, timeout=180, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return trace.read(folder)


def losses(traces: dict[int, list[dict]]) -> list[float]:
    """Of the last rank, which is on the last pipeline stage."""
    return [float.fromhex(line["loss"]["lm loss"]) for line in traces[max(traces)]]


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_two_runs_are_bit_equal(template, tmp_path, name):
    configuration = CONFIGURATIONS[name]
    first = train(template, configuration, tmp_path / "first")
    second = train(template, configuration, tmp_path / "second")
    assert first == second
    assert sorted(first) == list(range(configuration.world_size))
    assert all([line["iteration"] for line in lines] == [1, 2, 3, 4, 5] for lines in first.values())
    assert all(math.isfinite(loss) for loss in losses(first))
    assert losses(first)[-1] < losses(first)[0], "the loss does not fall"


def test_another_seed_is_another_run(template, tmp_path):
    """So that the equality above is not an equality of anything with anything."""
    configuration = CONFIGURATIONS["llama_tp2_sp"]
    other = Configuration(configuration.world_size, (*configuration.argv, "--seed", "4321"))
    assert losses(train(template, configuration, tmp_path / "a")) != losses(train(template, other, tmp_path / "b"))


def test_samples_are_told_apart(template, tmp_path):
    traces = train(template, CONFIGURATIONS["tp2_dp2_fp32"], tmp_path)
    drawn = [sample for lines in traces.values() for line in lines for sample in line["samples"]]
    # 5 iterations of 4 microbatches; tensor-parallel rank 0 of both data-parallel ranks draws.
    assert len(drawn) == len(set(drawn)) == 20
    assert not any(line["samples"] for line in traces[1] + traces[3])
    assert all((tmp_path / f"rank{rank}.jsonl").stat().st_mode & 0o777 == 0o600 for rank in traces)


def test_overlap_uses_several_buckets(template):
    configuration = CONFIGURATIONS["tp2_dp2_bf16_overlap"]
    output = template.run_ranks(configuration.world_size, configuration.argv)[0].output
    line = next(line for line in output.splitlines() if "Number of buckets" in line)
    assert int(line.rsplit(":", 1)[1]) > 1, line


def test_torchrun_is_bit_equal_to_forked_ranks(template, tmp_path):
    configuration = CONFIGURATIONS["tp2_dp2_bf16_overlap"]
    forked = train(template, configuration, tmp_path / "forked")
    assert torchrun(configuration, tmp_path / "torchrun", TRAIN_GPT) == forked


@pytest.mark.full
def test_installing_after_megatron_was_imported_is_bit_equal(template, tmp_path):
    configuration = CONFIGURATIONS["moe_ep2"]
    forked = train(template, configuration, tmp_path / "forked")
    script = str(Path(__file__).with_name("late_install.py"))
    assert torchrun(configuration, tmp_path / "late", script) == forked


def test_replicated_weights_stay_equal_under_dropout(template):
    configuration = CONFIGURATIONS["dropout_tp2"]
    target = "tests.accelerator.programs:train_and_compare_replicas"
    for result in template.run_ranks(configuration.world_size, configuration.argv, target=target):
        assert result.returncode == 0, result.output


def test_loaders_that_draw_from_the_device_stream_are_noticed(template):
    configuration = CONFIGURATIONS["dropout_tp2"]
    target = "tests.accelerator.programs:train_and_compare_replicas"
    results = template.run_ranks(
        configuration.world_size, configuration.argv, target=target, env={"BREAK_DATA_RNG": "1"}
    )
    assert any("drifted apart" in result.output for result in results)
