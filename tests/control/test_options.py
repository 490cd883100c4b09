"""Bad input is refused with the option's name, what was found, and what to do."""

import argparse

import pytest

from megatron_resilience.control.launcher import job_secret
from megatron_resilience.control.options import add_arguments, failure_domain, from_namespace
from megatron_resilience.errors import ConfigurationError


def parse(*argv, environment=None):
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return from_namespace(parser.parse_args([*argv, __file__, "--lr", "1"]), environment or {})


def test_sizes_count_spares_in():
    options = parse("--nnodes", "3", "--spares", "1", "--nproc-per-node", "2", "--local-nodes")
    assert (options.slots, options.world_size, options.script_args) == (2, 4, ("--lr", "1"))


def test_slurm_gives_the_node_rank():
    options = parse("--nnodes", "2", "--rdzv-endpoint", "head:2900", environment={"SLURM_NODEID": "1"})
    assert options.node_rank == 1


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--nnodes", "2", "--spares", "2", "--local-nodes"], "--spares is 2 and --nnodes 2"),
        (["--nnodes", "0"], "must be at least 1"),
        (["--nnodes", "2"], "needs --rdzv-endpoint"),
        (["--nnodes", "2", "--rdzv-endpoint", "head:2900"], "--node-rank is needed"),
        (["--nnodes", "2", "--rdzv-endpoint", "head", "--node-rank", "0"], "expected HOST:PORT"),
        (["--nnodes", "2", "--local-nodes", "--node-rank", "1"], "leave out --node-rank"),
    ],
)
def test_contradictions(argv, says):
    with pytest.raises(ConfigurationError, match=says):
        parse(*argv)


def test_a_secret_that_others_can_read_is_refused(tmp_path):
    path = tmp_path / "secret"
    path.write_text("s")
    path.chmod(0o644)
    with pytest.raises(ConfigurationError, match="mode 0644"):
        job_secret(parse("--nnodes", "1", "--secret-file", str(path)))
    path.chmod(0o600)
    assert job_secret(parse("--nnodes", "1", "--secret-file", str(path))) == b"s"


def test_a_job_of_several_launchers_needs_a_secret(monkeypatch):
    monkeypatch.delenv("MEGATRON_RESILIENCE_SECRET", raising=False)
    with pytest.raises(ConfigurationError, match="--secret-file"):
        job_secret(parse("--nnodes", "2", "--rdzv-endpoint", "head:2900", "--node-rank", "0"))


def test_a_host_is_in_the_rack_that_lists_it(tmp_path):
    path = tmp_path / "racks.yaml"
    path.write_text("west: [h1, h2]\neast: [h3, h4]\n")
    assert failure_domain(path, {"h3", "h3.cluster"}) == "east"
    assert failure_domain(None, {"h3"}) == ""


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("west: [h1]\neast: [h2]", "h3 is in no rack"),
        ("west: [h3]\neast: [h3]", "h3 is in west and east"),
        ("west: h3", "expected lines of the form"),
        ("[h3]", "expected lines of the form"),
        ("west: [", "--failure-domains"),
    ],
)
def test_a_map_of_racks_that_leaves_doubt_is_refused(tmp_path, text, says):
    path = tmp_path / "racks.yaml"
    path.write_text(text)
    with pytest.raises(ConfigurationError, match=says):
        failure_domain(path, {"h3"})
