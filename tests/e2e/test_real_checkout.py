"""``pretrain_gpt.py`` of a Megatron-LM checkout, untouched and with the patch: a node is killed, and nothing else changes.

    MEGATRON_LM=DIR bash scripts/test.sh --real

The oracle is the patched script under plain torchrun, without ``--deadpool``: the untouched one cannot run without a GPU. The
checkout compiles its data helpers into itself (``make``), as it does at any start.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from megatron_resilience.control.cli import main
from megatron_resilience.megatron_adapter.plugin import TRACE
from megatron_resilience.megatron_adapter.versions import SUPPORTED
from megatron_resilience.observe.trace import differences, losses
from tests.support.configurations import CONFIGURATIONS
from tests.support.job import Job, end, kill_node
from tests.support.template import ROOT, plain_environment

pytestmark = [pytest.mark.e2e, pytest.mark.full]

PATCH = ROOT / "patches" / "core_v0.19.0" / "pretrain_gpt.diff"
ITERATIONS = 16
CONFIGURATION = CONFIGURATIONS["tp2_dp2_bf16_overlap"]
ARGV = [*CONFIGURATION.argv, "--train-iters", str(ITERATIONS)]


class Program:
    """A process in a group of its own, with the interface of ``template.Child``: its imports are the checkout's."""

    def __init__(self, command: Sequence[str], trace: Path, output: Path) -> None:
        self._output = output
        # `make` must find this interpreter's python3.
        path = os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])
        environment = plain_environment() | {"PATH": path, TRACE: str(trace)}
        with output.open("w") as file:
            self._process = subprocess.Popen(
                [sys.executable, *command], env=environment, stdout=file, stderr=file, process_group=0
            )
        self.pid = self._process.pid

    @property
    def output(self) -> str:
        return self._output.read_text(errors="replace")

    def poll(self) -> int | None:
        return self._process.poll()

    def wait(self, timeout: float) -> int:
        return self._process.wait(timeout)

    def kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def checkout() -> Path:
    """The checkout's folder.

    Skips, and says why, without one or with another release.
    """
    if not os.environ.get("MEGATRON_LM"):
        pytest.skip("MEGATRON_LM is not set: name a checkout of Megatron-LM core_v0.19.0 to test its pretrain_gpt.py")
    folder = Path(os.environ["MEGATRON_LM"]).resolve()
    info = folder / "megatron" / "core" / "package_info.py"
    if not info.is_file() or not (folder / "pretrain_gpt.py").is_file():
        pytest.skip(f"MEGATRON_LM={folder} is no checkout of Megatron-LM: {info} or pretrain_gpt.py is missing")
    found = dict(re.findall(r"^(MAJOR|MINOR|PATCH) = (\d+)", info.read_text(), re.MULTILINE))
    release = f"{found.get('MAJOR')}.{found.get('MINOR')}"
    if release not in SUPPORTED:
        pytest.skip(
            f"MEGATRON_LM={folder} is release {release}; {PATCH.parent.name} is the one that there is a patch for"
        )
    return folder


@pytest.fixture(scope="module")
def patched(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkout with the patch, as a folder of links to it."""
    folder = tmp_path_factory.mktemp("patched")
    for entry in checkout.iterdir():
        if entry.name not in ("pretrain_gpt.py", ".git"):
            (folder / entry.name).symlink_to(entry)
    shutil.copy(checkout / "pretrain_gpt.py", folder)
    assert main(["patch", str(folder)]) == 0
    assert (folder / "pretrain_gpt.py").read_text() != (checkout / "pretrain_gpt.py").read_text()
    return folder


@pytest.fixture(scope="module")
def oracle(patched: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The trace of an undisturbed run without ``--deadpool``."""
    folder = tmp_path_factory.mktemp("oracle")
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(CONFIGURATION.world_size)]
    program = Program([*torchrun, str(patched / "pretrain_gpt.py"), *ARGV], folder / "trace", folder / "log")
    try:
        assert program.wait(300) == 0, program.output[-6000:]
    finally:
        end(program)
    said = f"oracle: torchrun, {PATCH.parent.name} with the patch, without --deadpool: {ITERATIONS} iterations"
    print(f"{said}, loss {losses(folder / 'trace')[ITERATIONS]:.6f}")
    return folder / "trace"


@contextlib.contextmanager
def launched(script: Path, folder: Path) -> Iterator[Job]:
    """The script under the launcher, with ``--deadpool``; what is left of it at the end is killed."""
    launch = ["-m", "megatron_resilience.control.cli", "launch", "--nnodes", "3", "--spares", "1", "--local-nodes"]
    launch += ["--nproc-per-node", "2", "--events", str(folder / "events.jsonl"), str(script), *ARGV, "--deadpool"]
    program = Program(launch, folder / "trace", folder / "log")
    try:
        yield Job(program, folder)
    finally:
        end(program)


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("how", ["untouched", "patched"])
def test_a_node_is_killed(checkout: Path, patched: Path, oracle: Path, tmp_path: Path, how: str, victim: int) -> None:
    script = {"untouched": checkout, "patched": patched}[how] / "pretrain_gpt.py"
    with launched(script, tmp_path) as running:
        running.wait_for_step(5)
        time.sleep(0.05)
        kill_node(running.agents()[victim])
        running.finish()
    assert differences(running.trace, oracle) == []
    (event,) = running.of_kind("recovered")
    assert event["steps_again"] <= 1
    print(f"{how} pretrain_gpt.py, megatron-resilience launch ... --deadpool, node n{victim} killed:")
    print("\n".join(line for line in running.child.output.splitlines() if line.startswith("[megatron-resilience]")))
    print(f"against the oracle: equal to the bit, {ITERATIONS} iterations on {CONFIGURATION.world_size} ranks")


def test_the_untouched_script_is_the_releases_own(checkout: Path) -> None:
    """The patch applies to it, so it is the one that the patch was made for, and nobody has put our import into it."""
    script = checkout / "pretrain_gpt.py"
    assert "megatron_resilience" not in script.read_text()
    subprocess.run(["git", "apply", "--check", "--unidiff-zero", str(PATCH)], cwd=checkout, check=True)
