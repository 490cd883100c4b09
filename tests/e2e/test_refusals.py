"""What cannot work is refused before anything is touched: one clear message, no traceback, nothing left behind."""

import socket

import pytest

from tests.support.configurations import CONFIGURATIONS
from tests.support.job import LAUNCHER, job
from tests.support.template import plain_environment

pytestmark = pytest.mark.e2e

KNOWN = CONFIGURATIONS["tp2_dp2_fp32"]


@pytest.mark.parametrize(
    ("extra", "says"),
    [
        (("--deadpool", "--inprocess-restart"), "--inprocess-restart"),
        (("--deadpool", "--use-torch-fsdp2"), "--use-torch-fsdp2"),
        (("--deadpool", "--nccl-ub"), "--nccl-ub"),
        (("--deadpool", "--deadpool-replicas", "5"), "or --deadpool-replicas 1"),
        (("--deadpool-verify", "true"), "does nothing without --deadpool"),
    ],
)
def test_flags(template, tmp_path, extra, says):
    with job(template, tmp_path, KNOWN, extra=extra) as running:
        assert running.child.wait(60) == 2
        assert says in running.child.output
        assert "Traceback" not in running.child.output


def test_deadpool_without_the_launcher(template, tmp_path):
    (result,) = template.run_ranks(1, ["--deadpool", *KNOWN.argv])
    assert result.returncode != 0
    assert "megatron-resilience launch" in result.output


def test_a_port_in_use(template, tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        endpoint = f"127.0.0.1:{taken.getsockname()[1]}"
        with job(template, tmp_path, KNOWN, launch=["--rdzv-endpoint", endpoint]) as running:
            assert running.child.wait(30) == 2
            assert f"cannot listen on {endpoint}" in running.child.output


def test_an_unwritable_folder(template, tmp_path):
    with job(template, tmp_path, KNOWN, launch=["--events", "/proc/nowhere/events.jsonl"]) as running:
        assert running.child.wait(30) == 2
        assert "--events" in running.child.output


def test_help_has_a_group_of_its_own(template, tmp_path):
    (result,) = template.run_ranks(1, ["--help"])
    assert result.returncode == 0
    assert "megatron-resilience:" in result.output
    assert "--deadpool-max-stall" in result.output


def test_an_unknown_script(template, tmp_path):
    child = template.fork(LAUNCHER, ["launch", "--nnodes", "1", "nowhere.py"], env=plain_environment())
    assert child.wait(30) == 2
    assert "nowhere.py" in child.output
