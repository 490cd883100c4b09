"""A real Slurm of several virtual nodes on this machine, with folders, key and ports of its own.

One ``slurmd -N nK`` a node. A node dies when its slurmd, slurmstepd and all its tasks are killed together: `Cluster.kill_node`.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil

from tests.support.template import ROOT, free_port

DAEMONS = ("munged", "slurmctld", "slurmd")
_NODE = "VIRTUAL_NODE"
_CONF = """
ClusterName=virtual
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
SwitchType=switch/none
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
ReturnToService=2
SlurmdTimeout=10
SlurmdParameters=config_overrides
KillWait=30
OverTimeLimit=0
JobRequeue=1
SchedulerParameters=batch_sched_delay=0,sched_interval=1
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE:4
"""


def missing() -> str:
    """What keeps a virtual Slurm from running here; empty when nothing does. Installs it where that is possible."""
    if os.geteuid() != 0:
        return "slurmd of several virtual nodes must run as root"
    if _absent() and shutil.which("apt-get") is not None:
        install = ["apt-get", "install", "-qq", "-y", "--no-install-recommends", "slurm-wlm", "munge"]
        for command in (["apt-get", "update", "-qq"], install):
            with contextlib.suppress(subprocess.TimeoutExpired):
                subprocess.run(command, env=os.environ | {"DEBIAN_FRONTEND": "noninteractive"}, timeout=120)
    absent = _absent()
    return f"no {', '.join(absent)} here, and apt-get cannot bring them (slurm-wlm, munge)" if absent else ""


def _absent() -> list[str]:
    path = os.environ.get("PATH", "") + os.pathsep + "/usr/sbin"
    return [name for name in (*DAEMONS, "sbatch", "srun", "scontrol") if shutil.which(name, path=path) is None]


def _depth(process: psutil.Process) -> int:
    try:
        return len(process.parents())
    except psutil.NoSuchProcess:
        return 0


class Cluster:
    """See the module. Use as a context manager.

    Args:
        nodes: how many; they are called n1, n2, ...
    """

    def __init__(self, nodes: int) -> None:
        self.nodes = [f"n{number}" for number in range(1, nodes + 1)]
        self.folder = Path(tempfile.mkdtemp(prefix="slurm-"))
        self._guard = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("slurm_guard.py")), str(self.folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends every daemon, job and process of the cluster."""
        assert self._guard.stdin is not None and self._guard.stdout is not None
        self._guard.stdin.close()
        self._guard.wait(60)
        self._guard.stdout.close()

    @property
    def environment(self) -> dict[str, str]:
        """For Slurm's commands, and what they start."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "PYTEST_", "MEGATRON_RESILIENCE_"))}
        path = os.pathsep.join([str(Path(sys.executable).parent), kept.get("PATH", ""), "/usr/sbin"])
        return kept | {"SLURM_CONF": str(self.folder / "slurm.conf"), "PATH": path, "PYTHONPATH": str(ROOT)}

    def run(self, *argv: str, env: Mapping[str, str] | None = None, cwd: Path | None = None) -> str:
        """Standard output of one of Slurm's commands.

        Raises:
            AssertionError: it failed; with its error.
        """
        result = subprocess.run(
            argv, env=self.environment | dict(env or {}), cwd=cwd, capture_output=True, text=True, timeout=60
        )
        assert result.returncode == 0, f"{argv}: {result.stderr}"
        return result.stdout.strip()

    def job(self, number: str) -> dict[str, str]:
        """What Slurm says of a job; empty when it has forgotten it."""
        shown = subprocess.run(
            ["scontrol", "-o", "show", "job", number], env=self.environment, capture_output=True, text=True, timeout=60
        )
        return dict(pair.split("=", 1) for pair in shown.stdout.split() if "=" in pair)

    def allocated(self) -> list[str]:
        """Nodes that a job holds, or that are still being freed."""
        busy = self.run("sinfo", "-h", "-N", "-o", "%N %t").splitlines()
        return [name for name, state in (text.split() for text in busy) if state.startswith(("alloc", "mix", "comp"))]

    def processes(self, node: str) -> list[psutil.Process]:
        """Everything that runs on a virtual node."""
        marks = (f"{_NODE}={node}", f"SLURMD_NODENAME={node}")
        found = []
        for process in psutil.Process(self._guard.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error, OSError):
                text = Path(f"/proc/{process.pid}/environ").read_bytes().decode(errors="replace").split("\0")
                if set(marks) & set(text):
                    found.append(process)
        return found

    def kill_node(self, node: str) -> None:
        """The node is without power: nothing on it runs any more.

        All stop before one dies, and children die before their parents: srun has a child that outlives it for a moment and
        then ends its job step, and a stopped srun that loses its parent is told to hang up, and ends it too. Nothing does so
        on a node without power.
        """
        stopped: set[int] = set()
        while fresh := [p for p in self.processes(node) if p.pid not in stopped]:
            for victim in fresh:
                stopped.add(victim.pid)
                with contextlib.suppress(psutil.NoSuchProcess):
                    victim.suspend()
        while victims := self.processes(node):
            for victim in sorted(victims, key=_depth, reverse=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    victim.kill()
            psutil.wait_procs(victims, timeout=5)

    def start_node(self, node: str) -> None:
        """Its slurmd, at first or after a death."""
        self._order(["slurmd", "-D", "-N", node], self.folder / f"{node}.out", {_NODE: node})

    def revive(self, node: str) -> None:
        """Power is back on a node that was killed."""
        self.start_node(node)
        self.wait(self._all_idle, "all nodes to be idle", 60)

    def wait(self, condition: Callable[[], Any], what: str, timeout: float = 120) -> Any:
        """Polls until the condition holds; returns its value.

        Raises:
            AssertionError: the time is up; with the daemons' logs.
        """
        deadline = time.monotonic() + timeout
        while not (value := condition()):
            if time.monotonic() > deadline:
                logs = "\n".join(f"--- {p.name}\n{p.read_text()[-3000:]}" for p in sorted(self.folder.glob("*.log")))
                raise AssertionError(f"waited {timeout} s for {what}\n{logs}")
            time.sleep(0.1)
        return value

    def _start(self) -> None:
        (self.folder / "state").mkdir()
        self.folder.chmod(0o755)
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o600)
        host = socket.gethostname().split(".")[0]
        each = [
            f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={free_port()} CPUs=4 RealMemory=1000"
            for node in self.nodes
        ]
        values = {"host": host, "port": free_port(), "user": "root", "folder": self.folder, "nodes": "\n".join(each)}
        (self.folder / "slurm.conf").write_text(_CONF.format(**values))
        files = {name: str(self.folder / f"munge.{name}") for name in ("socket", "pid", "log", "seed")}
        munged = ["munged", "--foreground", "--force", "--key-file", str(key), "--socket", files["socket"]]
        munged += ["--pid-file", files["pid"], "--log-file", files["log"], "--seed-file", files["seed"]]
        self._order(munged, self.folder / "munged.out")
        self.wait(Path(files["socket"]).exists, "munged", 20)
        self._order(["slurmctld", "-D"], self.folder / "slurmctld.out")
        for node in self.nodes:
            self.start_node(node)
        self.wait(self._all_idle, "all nodes to be idle", 60)

    def _all_idle(self) -> bool:
        result = subprocess.run(
            ["sinfo", "-h", "-N", "-o", "%t"], env=self.environment, capture_output=True, text=True, timeout=60
        )
        return result.stdout.split() == ["idle"] * len(self.nodes)

    def _order(self, argv: list[str], log: Path, env: Mapping[str, str] | None = None) -> None:
        assert self._guard.stdin is not None and self._guard.stdout is not None
        command = {"argv": argv, "env": self.environment | dict(env or {}), "log": str(log)}
        self._guard.stdin.write(json.dumps(command) + "\n")
        self._guard.stdin.flush()
        assert self._guard.stdout.readline(), f"{argv[0]} did not start"
