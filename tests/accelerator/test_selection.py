"""Which accelerator is chosen, and what is refused."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from megatron_resilience import accelerator
from megatron_resilience.megatron_adapter import versions
from tests.support.template import ROOT, plain_environment


def test_the_same_object_each_time():
    assert accelerator.select("cpu") is accelerator.select("cpu")
    assert accelerator.select("cpu").distributed_backend == "gloo"


def test_unknown_name():
    with pytest.raises(ValueError, match="'tpu' is unknown; use one of auto, cpu, cuda"):
        accelerator.select("tpu")


def test_unknown_environment(monkeypatch):
    monkeypatch.setenv(accelerator.ENVIRONMENT_VARIABLE, "gpu")
    with pytest.raises(ValueError, match="MEGATRON_RESILIENCE_ACCELERATOR='gpu'"):
        accelerator.install_from_environment()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu():
    assert accelerator.select("auto").name == "cpu"
    with pytest.raises(RuntimeError, match="torch sees no GPU"):
        accelerator.select("cuda")


@pytest.mark.parametrize(("choice", "patched"), [("none", False), ("cpu", True)])
def test_environment_decides(choice, patched):
    code = "import megatron_resilience.autoload, torch; print(torch.cuda.device_count.__module__)"
    environment = plain_environment() | {accelerator.ENVIRONMENT_VARIABLE: choice}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip().startswith("megatron_resilience") is patched, done.stdout


def test_streams_must_be_complete():
    with pytest.raises(ValueError, match=r"found: \['device'\]"):
        accelerator.select("cpu").set_rng_streams({"device": torch.get_rng_state()})


@pytest.mark.parametrize("found", ["0.18.3", "0.20.0", "1.19.0", "core_r0.19"])
def test_unknown_megatron_is_refused(found):
    with pytest.raises(versions.UnsupportedMegatron, match=f"found megatron-core {found}; .* supports 0.19.x"):
        versions.check(found)


def test_the_installed_megatron_is_known():
    assert versions.check().startswith("0.19.")


def test_a_checkout_shadows_the_wheel(tmp_path, monkeypatch):
    core = tmp_path / "megatron" / "core"
    core.mkdir(parents=True)
    (core / "__init__.py").touch()
    (core / "package_info.py").write_text("__version__ = '0.17.1'\n")
    environment = plain_environment()
    environment["PYTHONPATH"] = f"{tmp_path}:{environment['PYTHONPATH']}"
    done = subprocess.run(
        [sys.executable, "-c", "import megatron_resilience.autoload"],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode != 0
    assert "found megatron-core 0.17.1; megatron-resilience supports 0.19.x" in done.stderr
