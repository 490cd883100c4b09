"""Every command says the same thing with the same exit status (megatron_resilience/exits.py)."""

import pytest

from megatron_resilience import exits
from megatron_resilience.control.cli import build_parser, main

IMPOSSIBLE = {
    "launch": ["launch", "--nnodes", "2", "train.py"],
    "plan": ["plan", "--model", "llama2-70b", "--from", "TP8·PP8·DP8", "--to", "TP16·PP8·DP4"],
    "patch": ["patch", "no-such-folder"],
    "preflight": ["preflight", "no-such-settings"],
    "status": ["status"],
    "events": ["events"],
    "drain": ["drain", "n1"],
    "swap": ["swap", "n1"],
    "reshard": ["reshard", "--tp", "2"],
    "outcome": ["outcome"],
}
"""A request to each command that cannot be fulfilled."""


def test_every_command_is_here():
    parser, _ = build_parser()
    (commands,) = (action.choices for action in parser._actions if action.dest == "command")
    assert set(IMPOSSIBLE) == set(commands)


@pytest.mark.parametrize("command", sorted(IMPOSSIBLE))
def test_what_cannot_be_done_is_said_and_exits_with_2(command, capsys, monkeypatch, tmp_path):
    for name in ("MEGATRON_RESILIENCE_JOB_DIR", "MEGATRON_RESILIENCE_SECRET", "SLURM_NODEID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    assert main(IMPOSSIBLE[command]) == exits.IMPOSSIBLE == 2
    assert capsys.readouterr().err


def test_a_wrong_option_exits_with_2(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["status", "--no-such-option"])
    assert ended.value.code == exits.IMPOSSIBLE
    assert "--no-such-option" in capsys.readouterr().err


def test_statuses_are_distinct_and_below_those_of_signals():
    numbers = [value for name, value in vars(exits).items() if name.isupper() and isinstance(value, int)]
    assert sorted(exits.MEANINGS) == sorted(numbers)
    assert len(set(numbers)) == len(numbers) and max(numbers) < 128
