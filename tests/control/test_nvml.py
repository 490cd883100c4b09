"""The real nvidia-ml-py over a library that plays the driver's (tests/support/fake_nvml.c), in a process of its own."""

import shutil
import subprocess
import sys

import pytest

from megatron_resilience.control.nvml import _visible
from tests.support.template import ROOT

PROGRAM = """
import ctypes, sys
fake = ctypes.CDLL(sys.argv[1])      # its name is libnvidia-ml.so.1, so nvidia-ml-py finds this one
from megatron_resilience.control.health import judge
from megatron_resilience.control.nvml import Devices
def put(name, value, index=0, kind=ctypes.c_int):
    (kind * 2).in_dll(fake, "fake_" + name)[index] = value
devices = Devices.open()
before = devices.read()
print(before[0])
def step(text):
    global before
    now = devices.read()
    print(text, [(a.grave, a.text) for a in judge(before, now)])
    before = now
step("quiet")
ctypes.c_int.in_dll(fake, "fake_xid_device").value = 1
ctypes.c_int.in_dll(fake, "fake_xid").value = 79
step("xid")
put("uncorrected", 2, 1, ctypes.c_ulonglong)
step("ecc")
put("links", 3)
step("links")
put("temperature", 87)
step("hot")
put("rows_failed", 1)
step("rows")
put("lost", 1, 1)
step("lost")
ctypes.c_int.in_dll(fake, "fake_ecc_supported").value = 0
print("unsupported", devices.read()[0].uncorrected)
"""


def run(*argv: str, **environment: str) -> list[str]:
    result = subprocess.run(
        [sys.executable, "-c", *argv], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()


def test_two_devices(tmp_path):
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler (cc) to build the library that plays the driver's")
    library = tmp_path / "libnvidia-ml.so.1"
    source = str(ROOT / "tests" / "support" / "fake_nvml.c")
    subprocess.run(
        [compiler, "-shared", "-fPIC", f"-Wl,-soname,{library.name}", "-o", str(library), source], check=True
    )
    first, *steps = run(PROGRAM, str(library))
    assert first == (
        "Reading(name='device 0 (GPU-0)', lost=False, xids=(), uncorrected=0, remap_failed=False, links=4, temperature_c=50, "
        "shutdown_c=90)"
    )
    assert steps == [
        "quiet []",
        "xid [(True, 'device 1 (GPU-1): XID 79, the device has fallen off the bus')]",
        "ecc [(True, 'device 1 (GPU-1): 2 memory errors that could not be corrected')]",
        "links [(True, 'device 0 (GPU-0): 3 of 4 NVLinks are up')]",
        "hot [(False, 'device 0 (GPU-0): 87 degrees, it switches itself off at 90')]",
        "rows [(True, 'device 0 (GPU-0): a bad row of its memory cannot be replaced')]",
        "lost [(True, 'device 1 (GPU-1): lost, the driver cannot reach it')]",
        "unsupported None",
    ]


@pytest.mark.skipif(shutil.which("nvidia-smi") is not None, reason="there is a driver here")
def test_without_a_driver_there_is_nothing_to_read():
    assert run("from megatron_resilience.control.nvml import Devices; print(Devices.open())") == ["None"]


def test_devices_of_other_jobs_are_not_looked_at():
    assert _visible(1, "GPU-abc", None) and _visible(1, "GPU-abc", "0,1") and _visible(1, "GPU-abc", "GPU-ab")
    assert not _visible(1, "GPU-abc", "0,2") and not _visible(1, "GPU-abc", "")
