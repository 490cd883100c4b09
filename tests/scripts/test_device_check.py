"""scripts/device_check.sh where there is no GPU: it says so and checks nothing; on the CPU stand-in it runs to its end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.device_check.report import Check, table, write
from tests.support.template import ROOT

SCRIPT = ROOT / "scripts" / "device_check.sh"


def run(out: Path, *arguments: str, timeout: float = 60, **variables: str) -> subprocess.CompletedProcess[str]:
    """The script, with this Python, writing to ``out``."""
    environment = os.environ | {"OUT": str(out), "PYTHON": sys.executable, "TMPDIR": str(out.parent)} | variables
    return subprocess.run(
        ["/bin/bash", str(SCRIPT), *arguments], env=environment, capture_output=True, text=True, timeout=timeout
    )


def test_without_cuda_nothing_is_checked_and_it_says_so(tmp_path):
    result = run(tmp_path / "out", CUDA_VISIBLE_DEVICES="")
    assert result.returncode == 2
    assert "no CUDA here" in result.stderr and "nothing checked" in result.stderr
    assert not list(tmp_path.iterdir())


def test_without_torch_it_says_what_to_do(tmp_path):
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "python3").write_text("#!/bin/sh\nexit 1\n")
    (bare / "python3").chmod(0o755)
    copy = tmp_path / "copy" / "scripts" / "device_check.sh"
    copy.parent.mkdir(parents=True)
    copy.write_text(SCRIPT.read_text())
    environment = {"PATH": f"{bare}:/usr/bin:/bin"}
    result = subprocess.run(["/bin/bash", str(copy)], env=environment, capture_output=True, text=True, timeout=60)
    assert result.returncode == 2
    assert "no torch in any Python here: nothing checked" in result.stderr


def test_wrong_options_are_refused(tmp_path):
    for arguments, message in (
        (["--nonsense"], "--nonsense: unknown"),
        (["--wheels", "/none"], "/none: no such folder"),
    ):
        result = run(tmp_path / "out", *arguments)
        assert result.returncode == 2 and message in result.stderr


def test_the_table_and_the_file_say_the_same(tmp_path):
    checks = [Check("copies", "rate", "3 GiB/s"), Check("restore", "differ", "1", "0", False)]
    assert table(checks).splitlines()[-1].split() == ["restore", "differ", "1", "0", "FAILED"]
    write(tmp_path / "a" / "b.json", {"device": "x"}, checks)
    assert [c["held"] for c in json.loads((tmp_path / "a" / "b.json").read_text())["checks"]] == [None, False]


@pytest.mark.full
def test_on_the_stand_in_all_of_it_runs(tmp_path):
    result = run(tmp_path / "out", "--stand-in", timeout=400)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "says nothing of a GPU" in result.stdout
    checks = json.loads((tmp_path / "out" / "docs" / "results" / "device-check.json").read_text())["checks"]
    assert {check["part"] for check in checks} == {"copies", "overlap", "restore", "groups", "training"}
    wanted = [check for check in checks if check["part"] in ("restore", "training") and check["wanted"]]
    assert len(wanted) == 5 and all(check["held"] for check in wanted)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
