"""The command that `launch` takes is judged as it stands."""

import pytest

from megatron_resilience.control.cli import main
from megatron_resilience.preflight.estimate import estimate
from megatron_resilience.preflight.job import load_job

LAUNCH = ["--nnodes", "9", "--spares", "1", "--nproc-per-node", "8", "--rdzv-endpoint", "head:29400", "--anywhere"]
LLAMA_7B = [
    "--num-layers",
    "32",
    "--hidden-size",
    "4096",
    "--ffn-hidden-size",
    "11008",
    "--num-attention-heads",
    "32",
    "--vocab-size",
    "32000",
    "--swiglu",
    "--position-embedding-type",
    "rope",
    "--normalization",
    "RMSNorm",
    "--disable-bias-linear",
    "--untie-embeddings-and-output-weights",
    "--bf16",
    "--tensor-model-parallel-size",
    "2",
    "--use-distributed-optimizer",
    "--some-other-option",
    "3",
    "--deadpool",
]


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "pretrain_gpt.py"
    path.touch()
    return str(path)


def test_arguments_and_settings_of_the_same_job_agree(script, capsys):
    assert main(["preflight", *LAUNCH, script, *LLAMA_7B]) == 0
    told = capsys.readouterr().out
    ready = estimate(load_job("7b"))
    for figure in (ready.device_bytes, ready.host_bytes, ready.rank_bytes, ready.sent_bytes):
        assert f"{figure / 2**30:.2f} GiB" in told
    assert "TP2·PP1·DP32 on 8 nodes of 8 ranks, 1 spare" in told


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--deadpool-replicas", "9"], "needs at least|at least 10 nodes"),
        (["--tensor-model-parallel-size", "3"], "64 ranks .* are not a multiple of TP 3"),
        (["--deadpool-hang-timeout", "400"], "REFUSED: --deadpool-hang-timeout is 400 s"),
        (["--num-attention-heads", "33"], "33"),
    ],
)
def test_what_cannot_work_is_refused(script, capsys, more, says):
    assert main(["preflight", *LAUNCH, script, *LLAMA_7B, *more]) == 2
    told = capsys.readouterr()
    import re

    assert re.search(says, told.out + told.err), told


@pytest.mark.parametrize(
    ("left_out", "says"),
    [
        ("--vocab-size", "add --vocab-size"),
        ("--num-layers", "--num-layers is missing"),
        ("--deadpool", "--deadpool is missing"),
    ],
)
def test_what_sizes_depend_on_must_be_there(script, capsys, left_out, says):
    at = LLAMA_7B.index(left_out)
    rest = LLAMA_7B[:at] + LLAMA_7B[at + (1 if left_out == "--deadpool" else 2) :]
    assert main(["preflight", *LAUNCH, script, *rest]) == 2
    assert says in capsys.readouterr().err


def test_settings_and_arguments_do_not_go_together(capsys):
    assert main(["preflight", "--nnodes", "3", "7b"]) == 2
    assert "not both" in capsys.readouterr().err


def test_the_schedule_of_layouts_is_judged_with_it(script, tmp_path, capsys):
    hardware, schedule = tmp_path / "node.yaml", tmp_path / "schedule.yaml"
    hardware.write_text("device_memory_gib: 40\n")
    schedule.write_text("100: TP1 DP64\n")
    change = ["--hotswap-parallelism", "--hotswap-schedule", str(schedule)]
    command = ["preflight", "--hardware", str(hardware), *LAUNCH, script, *LLAMA_7B, *change]
    assert main(command) == 2
    assert "REFUSED: the change from TP2·PP1·DP32 to TP1·PP1·DP64" in capsys.readouterr().out
    assert main([*command, "--hotswap-exclusive-memory"]) == 0
    assert "while TP2·PP1·DP32 becomes TP1·PP1·DP64" in capsys.readouterr().out
