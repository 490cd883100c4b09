"""The compatibility command: its page is what its results give, it leaves nothing behind, and counts what pytest reports."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest

from megatron_resilience.errors import ConfigurationError
from megatron_resilience.megatron_adapter import versions
from scripts.compatibility import __main__ as command
from scripts.compatibility import environment, results
from scripts.compatibility.pairs import PAIRS, Pair
from tests.support.template import ROOT


def test_the_page_is_what_the_results_give():
    assert results.PAGE.read_text() == results.page(results.read()), "run: bash scripts/compatibility.sh --report"


def test_every_supported_release_has_a_pair_that_works():
    """And a release that was found not to work is refused by name."""
    found = list(results.read().values())
    works = {pair["megatron_core"].rsplit(".", 1)[0] for pair in found if pair["verdict"] == results.WORKS}
    assert works == set(versions.SUPPORTED)
    for pair in found:
        if pair["verdict"] != results.WORKS:
            with pytest.raises(versions.UnsupportedMegatron, match=pair["megatron_core"]):
                versions.check(pair["megatron_core"])


def test_the_ends_of_the_range_of_torch_have_run():
    newest = f"0.{max(int(release.split('.')[1]) for release in versions.SUPPORTED)}."
    ran = {
        tuple(map(int, pair["torch"].split(".")[:2]))
        for pair in results.read().values()
        if pair["verdict"] == results.WORKS and pair["megatron_core"].startswith(newest)
    }
    assert min(ran) == versions.TORCH[0] and max(ran) == (versions.TORCH[1][0], versions.TORCH[1][1] - 1)


def test_names_are_unique():
    assert len({pair.name for pair in PAIRS}) == len(PAIRS)


def test_pytests_report_is_counted(tmp_path):
    report = tmp_path / "report.xml"
    report.write_text(
        """<testsuites><testsuite><testcase classname="a" name="one"/>
        <testcase classname="a" name="two"><failure message="x"/></testcase>
        <testcase classname="a" name="three"><skipped message="x"/></testcase>
        <testcase classname="a" name="four"><error message="x"/></testcase></testsuite></testsuites>"""
    )
    assert command.count(report) == {"passed": 1, "failed": 2, "skipped": 1, "failures": ["a::two", "a::four"]}
    assert command.count(tmp_path / "none") == {"passed": 0, "failed": 0, "skipped": 0, "failures": []}


class Made:
    """An environment in which everything goes as told."""

    def __init__(self, refusal: str = "", code: int = 0) -> None:
        self.source, self._refusal, self._code = ROOT, refusal, code

    def install(self, pair: Pair) -> environment.Finished:
        return environment.Finished(self._code, "much\nERROR: no matching distribution")

    def refusal(self) -> str:
        return self._refusal

    def python_run(self, *arguments: str, timeout: float) -> environment.Finished:
        return environment.Finished(0, "3.12.9\n")


def test_a_pair_that_is_refused_runs_no_tests():
    found = command.try_pair(PAIRS[0], Made(refusal="found megatron-core 0.1"))
    assert (found["verdict"], found["detail"], found["suites"]) == (results.REFUSED, "found megatron-core 0.1", {})
    assert found["python"] == "3.12.9"


def test_a_pair_that_does_not_install_says_why():
    found = command.try_pair(PAIRS[0], Made(code=1))
    assert (found["verdict"], found["detail"]) == (results.MISSING, "ERROR: no matching distribution")


def test_what_was_done_with_this_package_is_not_done_again(tmp_path, monkeypatch):
    monkeypatch.setattr(results, "JSON", tmp_path / "results.json")
    monkeypatch.setattr(results, "PAGE", tmp_path / "page.md")
    monkeypatch.setattr(command, "environment", lambda: __import__("contextlib").nullcontext(Made(refusal="no")))
    tried = []
    monkeypatch.setattr(command, "try_pair", lambda pair, made: tried.append(pair.name) or done(pair))

    def done(pair):
        return {"torch": pair.torch, "megatron_core": pair.megatron, "python": "3", "date": "d", "commit": "c"} | {
            "verdict": results.REFUSED,
            "detail": "",
            "suites": {},
        }

    assert command.main(["--pair", "newest"]) == 0
    assert command.main(["--pair", "newest", "--pair", "middle"]) == 0
    assert tried == ["newest", "middle"]
    assert command.main(["--pair", "middle", "--fresh"]) == 0
    assert tried == ["newest", "middle", "middle"]
    known = json.loads(results.JSON.read_text())
    assert list(known) == ["newest", "middle"]
    known["newest"]["verdict"] = results.FAILS
    results.write(known)
    assert command.main(["--pair", "newest", "--pair", "middle"]) == 0
    assert tried == ["newest", "middle", "middle", "newest"]


def test_an_interpreter_that_is_not_here_is_named():
    with pytest.raises(ConfigurationError, match=r"no python3\.99 here: install it"):
        environment.find_python("3.99")


PROGRAM = """
import sys
from scripts.compatibility.environment import end_in_good_order, environment, run
end_in_good_order()
with environment() as made:
    made.source.mkdir()
    print(made.source.parent, flush=True)
    run([sys.executable, "-c", "import time; time.sleep(100)"], 100, made.source)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_nothing_is_left_however_it_ends(tmp_path, monkeypatch, number):
    """Even SIGKILL: the next run finds what it left."""
    variables = os.environ | {"TMPDIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM], env=variables, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    folder = Path(process.stdout.readline().strip())
    assert folder.is_dir()
    sleeper = wait_for_child(process.pid)
    process.send_signal(number)
    process.wait(20)
    process.stdout.close()
    if number == signal.SIGKILL:
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
        with environment.environment():
            assert len(list(tmp_path.iterdir())) == 1
    assert list(tmp_path.iterdir()) == []
    deadline = time.monotonic() + 10
    while runs(sleeper):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def runs(pid: int) -> bool:
    """A process that is dead, but that nobody has waited for, does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_for_child(pid: int) -> int:
    """Of a process; its first."""
    children = Path(f"/proc/{pid}/task/{pid}/children")
    deadline = time.monotonic() + 20
    while not (found := children.read_text().split()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return int(found[0])
