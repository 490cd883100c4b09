"""An environment for one pair, made from nothing and removed afterwards, however that ends."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from megatron_resilience.control.zygote import die_with_parent
from megatron_resilience.errors import ConfigurationError
from scripts.compatibility.pairs import Pair

ROOT = Path(__file__).resolve().parents[2]
_PREFIX = "compatibility-"
_TOOLS = ("pytest", "hypothesis", "tensorboard")
_INSTALL_S, _CHECK_S = 1500, 120


@dataclass(frozen=True)
class Finished:
    """How a command ended."""

    code: int
    output: str


class Environment:
    """A virtual environment and a copy of the repository.

    Attributes:
        source: the copy.
    """

    def __init__(self, folder: Path) -> None:
        self.source = folder / "source"
        self._venv = folder / "venv"
        self.python = self._venv / "bin" / "python"

    def install(self, pair: Pair) -> Finished:
        """Puts the pair and this package there."""
        copy_repository(self.source)
        made = run([find_python(pair.python), "-m", "venv", str(self._venv)], _CHECK_S, self.source)
        if made.code != 0:
            return made
        if shutil.which("uv"):
            # Keeps what it has downloaded for the next pair.
            pip = ["uv", "pip", "install", "--quiet", "--python", str(self.python)]
        else:
            pip = [str(self.python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-compile"]
        wanted = [f"torch=={pair.torch}", f"megatron-core=={pair.megatron}", "--editable", str(self.source), *_TOOLS]
        return run([*pip, *wanted], _INSTALL_S, self.source)

    def refusal(self) -> str:
        """What this package says of the pair at the start of a job; empty if it takes it."""
        program = (
            "import torch; from megatron_resilience.errors import UnsupportedError\n"
            "from megatron_resilience.megatron_adapter import versions\n"
            "try: versions.check(); versions.check_torch(torch.__version__)\n"
            "except UnsupportedError as error: print(f'REFUSED {error}')\n"
        )
        done = self.python_run("-c", program, timeout=_CHECK_S)
        if done.code != 0:
            raise RuntimeError(f"torch or megatron-core cannot be imported:\n{done.output[-3000:]}")
        found = re.search(r"^REFUSED (.*)", done.output, re.MULTILINE)
        return found.group(1) if found else ""

    def python_run(self, *arguments: str, timeout: float) -> Finished:
        """Runs the environment's Python in the copy."""
        return run([str(self.python), *arguments], timeout, self.source)


@contextlib.contextmanager
def environment() -> Iterator[Environment]:
    """A fresh one; afterwards nothing of it is left. What a killed run left behind is removed too."""
    base = Path(tempfile.gettempdir())
    for left in base.glob(f"{_PREFIX}*"):
        number = left.name.removeprefix(_PREFIX).split("-")[0]
        if number.isdigit() and not psutil.pid_exists(int(number)):
            shutil.rmtree(left, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=base))
    try:
        yield Environment(folder)
    finally:
        shutil.rmtree(folder)


def end_in_good_order() -> None:
    """Makes the signals that end a process end it by way of its ``finally`` clauses."""

    def leave(signum: int, _: object) -> None:
        raise SystemExit(128 + signum)

    for signum in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(signum, leave)


def run(command: Sequence[str], timeout: float, cwd: Path) -> Finished:
    """Runs a command; what it has started ends with it. Beyond ``timeout`` seconds its code is 124, as with timeout(1)."""
    # Nothing is compiled at the installation: without bytecode every process would compile torch and Megatron anew.
    left_out = ("PYTEST_", "PYTHONPATH", "PYTHONDONTWRITEBYTECODE", "VIRTUAL_ENV")
    variables = {name: value for name, value in os.environ.items() if not name.startswith(left_out)}
    process = subprocess.Popen(
        command,
        cwd=cwd,
        env=variables,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        # Also when this process is killed, or told to end before it knows the child's number.
        preexec_fn=functools.partial(die_with_parent, os.getpid()),
    )
    try:
        output, _ = process.communicate(timeout=timeout)
        return Finished(process.returncode, output)
    except subprocess.TimeoutExpired:
        _kill(process)
        return Finished(124, f"{process.communicate()[0]}\nnot done within {timeout:.0f} s")
    finally:
        _kill(process)
        process.wait()


def _kill(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def find_python(version: str) -> str:
    """An interpreter of that ``major.minor``.

    Raises:
        ConfigurationError: there is none.
    """
    name, pyenv = f"python{version}", Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    for candidate in [*sorted(map(str, pyenv.glob(f"{version}.*/bin/python"))), shutil.which(name)]:
        if (
            candidate
            and subprocess.run([candidate, "-c", "import venv, ensurepip"], capture_output=True).returncode == 0
        ):
            return candidate
    raise ConfigurationError(f"no {name} here: install it (uv python install {version}, or pyenv install {version})")


def copy_repository(target: Path) -> None:
    """What git tracks or would add, as it is now."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, target / name)
