"""Every ready setting is read, judged, and not refused; what is wrong in a file is named."""

import json

import pytest

from megatron_resilience.control.cli import main
from megatron_resilience.errors import ConfigurationError
from megatron_resilience.files import folder
from megatron_resilience.preflight.estimate import estimate
from megatron_resilience.preflight.job import known_jobs, load_job
from megatron_resilience.preflight.rules import job_rules
from megatron_resilience.vps.families import load_model

WANTED = {"laptop", "one-node", "1.3b", "7b", "13b", "65b", "70b", "30b-moe", "235b-moe"}


def test_all_of_them_are_there():
    assert set(known_jobs()) == WANTED


@pytest.mark.parametrize("name", sorted(WANTED))
def test_ready_settings_are_fit(name):
    job = load_job(name)
    taken = estimate(job)
    assert [f.text for f in job_rules(job, taken) if f.refused] == []
    assert all(node not in keepers for node, keepers in taken.keepers.items())


@pytest.mark.parametrize("path", sorted((folder("configs") / "models").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_model_is_read(path):
    assert load_model(path.stem).state_bytes > 0


def test_the_command(capsys):
    assert main(["preflight", "--anywhere", "70b"]) == 0
    assert "0 by 1, 2" in capsys.readouterr().out
    assert main(["preflight", "--anywhere", "--json", "70b"]) == 0
    assert json.loads(capsys.readouterr().out)["refused"] == []


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("model: tiny\nlayout: DP4\nnodes: 2\n", "ranks_per_node missing"),
        ("modle: tiny\n", "unknown modle"),
        ("model: tiny\nlayout: DQ4\nnodes: 2\nranks_per_node: 2\n", "'DQ4' in layout"),
        ("model: tiny\nlayout: DP4\nnodes: 2\nranks_per_node: 2\ndeadpool: {copies: 1}\n", "unknown deadpool.copies"),
        (
            "model: tiny\nlayout: DP4\nnodes: 2\nranks_per_node: 2\ndeadpool: {replicas: -1}\n",
            "--deadpool-replicas is -1",
        ),
        ("- 1\n", "expected a mapping"),
    ],
)
def test_what_is_wrong_in_a_file_is_named(tmp_path, text, says):
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(ConfigurationError, match=says):
        load_job(str(path))


def test_unknown_settings(capsys):
    assert main(["preflight", "8b"]) == 2
    assert "one of 1.3b, 13b" in capsys.readouterr().err
