"""The template itself: failures are reported, nothing survives."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.template import ROOT, Template, plain_environment

PROGRAMS = "tests.accelerator.test_template"


def fail_on_rank_one() -> int:
    """Rank 1 fails at once, the others sleep."""
    if os.environ["RANK"] == "1":
        return 7
    time.sleep(60)
    return 0


def leave_an_orphan() -> None:
    """Starts a process in a session of its own and ends."""
    child = subprocess.Popen(["sleep", "60"], start_new_session=True)
    print(child.pid, flush=True)


def sleep() -> None:
    """Until killed."""
    print("asleep", sys.argv[1:], flush=True)
    time.sleep(60)


def gone(pid: int) -> bool:
    """True if the process has ended, reaped or not."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_one_failure_ends_all(template):
    results = template.run_ranks(3, [], target=f"{PROGRAMS}:fail_on_rank_one", timeout=30)
    assert [result.returncode for result in results] == [-9, 7, -9]


def test_timeout_shows_output_and_kills(template):
    with pytest.raises(TimeoutError, match=r"asleep \['--x'\]"):
        template.run_ranks(2, ["--x"], target=f"{PROGRAMS}:sleep", timeout=0.5)


def test_a_process_id_that_comes_again_is_another_process(template):
    first = template.fork("os:getpid")
    first.wait(30)
    for _ in range(20):
        try:
            Path("/proc/sys/kernel/ns_last_pid").write_text(str(first.pid - 1))
        except OSError as error:
            pytest.skip(f"the next process id cannot be chosen here: {error}")
        second = template.fork(f"{PROGRAMS}:sleep")
        try:
            if second.pid == first.pid:
                assert second.poll() is None
                return
        finally:
            second.kill_group()
            second.wait(30)
    pytest.skip("somebody else took the process id each time")


def test_orphans_are_seen(template):
    child = template.fork(f"{PROGRAMS}:leave_an_orphan")
    assert child.wait(30) == 0
    orphan = int(child.output)
    assert template.orphans() == [orphan]
    assert template.kill_orphans() == [orphan]
    assert gone(orphan)


def test_ranks_die_with_a_killed_pytest(tmp_path):
    """A pytest that is killed runs no finaliser."""
    code = (
        "import time; from tests.support.template import Template\n"
        f"child = Template().fork('{PROGRAMS}:sleep')\n"
        "while 'asleep' not in child.output: time.sleep(0.01)\n"
        "print(child.pid, child._template._process.pid, flush=True); time.sleep(60)"
    )
    environment = plain_environment() | {"TMPDIR": str(tmp_path)}
    parent = subprocess.Popen(
        [sys.executable, "-c", code], env=environment, cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    with parent:
        assert parent.stdout is not None
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        parent.kill()
    deadline = time.monotonic() + 10
    while not all(gone(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(pids) == 2 and all(gone(pid) for pid in pids)


def test_closing_ends_everything():
    with Template() as template:
        child = template.fork(f"{PROGRAMS}:sleep")
        folder = template._folder.name
    assert gone(child.pid)
    assert not os.path.exists(folder)
