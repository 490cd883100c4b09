"""``pytest --full``: a long run that shows how far it is, goes on where it was interrupted, and can be divided.

* A test that passed on exactly this content of the repository (and these versions of Python, torch and Megatron) is not
  run again; ``--fresh`` forgets what passed. What passed is in ``runs/full/``, one file per content, one line per test,
  written as each test ends.
* ``--shard i/n`` runs the i-th of n parts. Parts depend on the tests alone, so that n machines run each test once; a
  part is a stretch of the tests in their order, so that most of a configuration's tests share one oracle.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import subprocess
import time
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pytest

BUDGET_S = 90 * 60
"""What a whole run may take on 2 cores."""
_COSTS = (("full", 14.0), ("e2e", 7.0))
_COST = 0.2
_IGNORED = {"__pycache__", "runs", "build", "dist"}


def add_options(parser: pytest.Parser) -> None:
    """The command line's."""
    group = parser.getgroup("full", "the wide matrix (scripts/test.sh --full)")
    group.addoption("--full", action="store_true", help="show progress, and skip what passed on this content already")
    group.addoption("--fresh", action="store_true", help="with --full: forget what passed")
    group.addoption("--shard", type=shard, metavar="I/N", help="with --full: run the I-th of N parts")


def configure(config: pytest.Config) -> None:
    """Registers the plugin if it was asked for."""
    if config.getoption("full"):
        folder = config.rootpath / "runs" / "full"
        record = Record(folder, content_digest(config.rootpath))
        config.pluginmanager.register(FullRun(record, config.getoption("shard"), config.getoption("fresh")))
    elif config.getoption("fresh") or config.getoption("shard"):
        raise pytest.UsageError("--fresh and --shard do nothing without --full: add it")


def shard(text: str) -> tuple[int, int]:
    """``"2/5"`` is ``(2, 5)``."""
    index, _, count = text.partition("/")
    if not (index.isdigit() and count.isdigit() and 1 <= int(index) <= int(count)):
        raise argparse.ArgumentTypeError(f"{text!r} is no shard: expected I/N with 1 <= I <= N, such as 2/5")
    return int(index), int(count)


def in_shard(costs: Sequence[float], index: int, count: int) -> list[bool]:
    """Which tests are in a shard: it has those whose middle lies in its part of the total cost."""
    total, before, result = sum(costs), 0.0, []
    for cost in costs:
        result.append(int((before + cost / 2) * count / total) + 1 == index)
        before += cost
    return result


def content_digest(root: Path) -> str:
    """Of every file that git tracks or would add, with its name and whether it is executable, and of versions."""
    digest = hashlib.blake2b(digest_size=10)
    for name in ("torch", "megatron-core"):
        try:
            digest.update(f"{name} {version(name)}\n".encode())
        except PackageNotFoundError:
            digest.update(f"no {name}\n".encode())
    digest.update(platform.python_version().encode())
    for path in sorted(_files(root)):
        if path.is_file():
            data = path.read_bytes()
            digest.update(f"\n{path.relative_to(root)} {len(data)} {os.access(path, os.X_OK)}\n".encode())
            digest.update(data)
    return digest.hexdigest()


def _files(root: Path) -> Iterator[Path]:
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        listed = subprocess.run(command, cwd=root, capture_output=True, check=True).stdout.decode()
    except (OSError, subprocess.CalledProcessError):
        # Not a checkout.
        for path in root.rglob("*"):
            parts = path.relative_to(root).parts
            if not any(part.startswith(".") or part in _IGNORED for part in parts):
                yield path
    else:
        yield from (root / name for name in listed.split("\0") if name)


class Record:
    """Which tests passed on a content, and how long each took on any.

    Args:
        folder: made if missing.
        digest: of the content.
    """

    def __init__(self, folder: Path, digest: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / f"{digest}.jsonl"
        self.passed: set[str] = set()
        self.seconds: dict[str, float] = {}
        for path in sorted(folder.glob("*.jsonl"), key=lambda p: p.stat().st_mtime):
            for line in path.read_text().splitlines():
                self._read(line, path == self.path)

    def _read(self, line: str, current: bool) -> None:
        try:
            entry = json.loads(line)
        except json.JSONDecodeError:
            # Cut off by an interruption.
            return
        if "seconds" in entry:
            self.seconds[entry["test"]] = entry["seconds"]
        if current:
            (self.passed.add if entry["passed"] else self.passed.discard)(entry["test"])

    def note(self, test: str, passed: bool, seconds: float) -> None:
        """A test has ended."""
        self._append({"test": test, "passed": passed, "seconds": round(seconds, 2)})

    def forget(self, tests: list[str]) -> None:
        """They are to be run again."""
        for test in tests:
            if test in self.passed:
                self.passed.discard(test)
                self._append({"test": test, "passed": False})

    def _append(self, entry: dict[str, Any]) -> None:
        # One write per line: several shards may share the file.
        with self.path.open("a") as file:
            file.write(json.dumps(entry) + "\n")


class FullRun:
    """The plugin: selects, shows, records."""

    def __init__(self, record: Record, part: tuple[int, int] | None, fresh: bool) -> None:
        self._record = record
        self._part = part
        self._fresh = fresh
        self._costs: dict[str, float] = {}
        self._spent: dict[str, float] = {}
        self._outcome: dict[str, str] = {}
        self._known = 0
        self._started = time.monotonic()
        self._reporter: Any = None

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Leaves out other shards' tests, and those that passed."""
        self._reporter = config.pluginmanager.get_plugin("terminalreporter")
        chosen = list(items)
        if self._part is not None and items:
            mine = in_shard([cost(item) for item in items], *self._part)
            chosen = [item for item, own in zip(items, mine, strict=True) if own]
        if self._fresh:
            self._record.forget([item.nodeid for item in chosen])
        todo = [item for item in chosen if item.nodeid not in self._record.passed]
        self._known = len(chosen) - len(todo)
        self._costs = {item.nodeid: cost(item) for item in todo}
        config.hook.pytest_deselected(items=[item for item in items if item not in set(todo)])
        items[:] = todo
        self._started = time.monotonic()

    def pytest_collection_finish(self) -> None:
        """Says what is ahead."""
        part = "" if self._part is None else f"shard {self._part[0]} of {self._part[1]}: "
        ahead = f"{part}{self._known + len(self._costs)} tests, {self._known} of them passed on this content already"
        self._say(f"{ahead}, {len(self._costs)} to run, about {duration(self._remaining())}")

    @pytest.hookimpl(wrapper=True)
    def pytest_report_teststatus(self) -> Any:
        """Counts as usual, prints nothing: the lines below say more than dots."""
        result = yield
        return (result[0], "", "")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Adds up a test's phases."""
        self._spent[report.nodeid] = self._spent.get(report.nodeid, 0.0) + report.duration
        if self._outcome.get(report.nodeid, "passed") == "passed":
            self._outcome[report.nodeid] = report.outcome

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        """Records a test, and says how far the run is."""
        outcome, seconds = self._outcome[nodeid], self._spent[nodeid]
        self._record.note(nodeid, outcome == "passed", seconds)
        so_far = duration(time.monotonic() - self._started)
        done = f"{len(self._outcome)} of {len(self._costs)}"
        self._say(
            f"{done}, {so_far} so far, about {duration(self._remaining())} to go: {outcome} {nodeid} {seconds:.1f} s"
        )

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """Nothing left to run is a success; a run beyond its budget says so."""
        if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and self._known:
            session.exitstatus = pytest.ExitCode.OK
        took = time.monotonic() - self._started
        if took > BUDGET_S:
            self._say(f"this took {duration(took)}; the whole run should take at most {duration(BUDGET_S)}")

    def _remaining(self) -> float:
        """Seconds: as long as each took last time, else by its kind and the pace of those that are done."""
        ended = [test for test in self._outcome if test in self._costs]
        guess = sum(self._costs[test] for test in ended)
        pace = sum(self._spent[test] for test in ended) / guess if guess > _COSTS[0][1] else 1.0
        ahead = [test for test in self._costs if test not in self._outcome]
        return sum(self._record.seconds.get(test, self._costs[test] * pace) for test in ahead)

    def _say(self, text: str) -> None:
        if self._reporter is not None:
            self._reporter.ensure_newline()
            self._reporter.write_line(f"[full] {text}")


def cost(item: pytest.Item) -> float:
    """Seconds that a test may take, by its kind alone."""
    return next((seconds for mark, seconds in _COSTS if item.get_closest_marker(mark)), _COST)


def duration(seconds: float) -> str:
    """``"1 h 05 m"``, ``"3 m 20 s"``, ``"12 s"``."""
    whole = round(seconds)
    if whole >= 3600:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} m"
    return f"{whole // 60} m {whole % 60:02d} s" if whole >= 60 else f"{whole} s"
