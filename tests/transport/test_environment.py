"""Variables that would end the survivors are refused before anything starts; the safe ones are set."""

import pytest

from megatron_resilience.control.cli import main
from megatron_resilience.transport.environment import ENVIRONMENT, problems


@pytest.mark.parametrize(
    ("environment", "named"),
    [
        ({}, None),
        (dict(ENVIRONMENT), None),
        ({"TORCH_NCCL_BLOCKING_WAIT": "0"}, None),
        ({"TORCH_NCCL_BLOCKING_WAIT": "1"}, "TORCH_NCCL_BLOCKING_WAIT"),
        ({"NCCL_ASYNC_ERROR_HANDLING": "1"}, "NCCL_ASYNC_ERROR_HANDLING"),
        ({"TORCH_NCCL_ENABLE_MONITORING": "1"}, "TORCH_NCCL_ENABLE_MONITORING"),
    ],
)
def test_problems_name_the_variable_and_the_remedy(environment, named):
    found = problems(environment)
    assert len(found) == (named is not None)
    assert all(text.startswith(f"{named}=") and text.endswith(f"unset {named}") for text in found)


def test_launch_refuses_them(monkeypatch, capsys):
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    assert main(["launch", "--nnodes", "2", "--local-nodes", __file__, "--deadpool"]) == 2
    assert "unset TORCH_NCCL_ASYNC_ERROR_HANDLING" in capsys.readouterr().err
