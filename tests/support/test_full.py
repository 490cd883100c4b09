"""``pytest --full`` in a project of its own: progress, resumption, shards."""

import os
import subprocess
import sys

import pytest

from tests.support.full import content_digest, duration, in_shard, shard
from tests.support.template import ROOT

CONFTEST = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from tests.support import full

def pytest_addoption(parser):
    full.add_options(parser)

def pytest_configure(config):
    full.configure(config)
"""
TESTS = """
import os
import pytest

@pytest.mark.parametrize("number", range(6))
def test_number(number):
    with open("ran", "a") as file:
        file.write(f"{number} ")
    if os.environ.get("DIE_AT") == str(number):
        os._exit(9)
    assert os.environ.get("FAIL_AT") != str(number)
"""


@pytest.fixture
def project(tmp_path):
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_it.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = --strict-markers\nmarkers =\n    e2e\n    full\n")
    return tmp_path


def run(project, *arguments, **environment):
    """Runs pytest there; returns exit status, output, and the numbers of the tests that ran."""
    # Where the tests take their notes is no part of the content.
    notes = project.parent / f"{project.name}-notes"
    notes.mkdir(exist_ok=True)
    (notes / "ran").unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--rootdir", str(project), str(project)]
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment = clean | environment | {"PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [*command, *arguments], cwd=notes, env=environment, capture_output=True, text=True, check=False
    )
    ran = (notes / "ran").read_text().split() if (notes / "ran").exists() else []
    return done.returncode, done.stdout + done.stderr, ran


def test_every_test_says_how_far_the_run_is(project):
    status, output, ran = run(project, "--full")
    assert status == 0, output
    assert ran == list("012345")
    assert "6 tests, 0 of them passed on this content already, 6 to run" in output
    lines = [line for line in output.splitlines() if line.startswith("[full] ") and " so far, about " in line]
    assert [line.split(",")[0] for line in lines] == [f"[full] {n} of 6" for n in range(1, 7)]


def test_it_goes_on_where_it_was_killed(project):
    status, _, ran = run(project, "--full", DIE_AT="3")
    assert status == 9
    assert ran == list("0123")
    status, output, ran = run(project, "--full")
    assert status == 0
    assert ran == list("345")
    assert "6 tests, 3 of them passed on this content already, 3 to run" in output


def test_what_failed_is_run_again(project):
    status, output, _ = run(project, "--full", FAIL_AT="2")
    assert status == 1
    assert "failed" in output
    status, _, ran = run(project, "--full")
    assert (status, ran) == (0, ["2"])


def test_a_complete_run_is_a_success_when_asked_again(project):
    assert run(project, "--full")[0] == 0
    assert run(project, "--full")[::2] == (0, [])
    assert run(project, "--full", "--fresh")[::2] == (0, list("012345"))


def test_changed_content_counts_for_nothing(project):
    assert run(project, "--full")[0] == 0
    (project / "other.py").write_text("a = 1\n")
    assert run(project, "--full")[::2] == (0, list("012345"))


def test_shards_run_every_test_once(project):
    ran = [run(project, "--full", "--shard", f"{index}/3")[2] for index in (1, 2, 3)]
    assert ran == [["0", "1"], ["2", "3"], ["4", "5"]]
    # To start one shard again is not to start all again.
    assert run(project, "--full", "--fresh", "--shard", "2/3")[2] == ["2", "3"]
    assert run(project, "--full")[::2] == (0, [])


@pytest.mark.parametrize("text", ["0/3", "4/3", "1", "a/b", "-1/2"])
def test_impossible_shards_are_refused(text):
    with pytest.raises(Exception, match="no shard: expected I/N"):
        shard(text)


def test_shards_without_full_are_refused(project):
    status, output, ran = run(project, "--shard", "1/2")
    assert (status, ran) == (4, [])
    assert "do nothing without --full" in output


def test_shards_are_balanced_and_disjoint():
    costs = [0.2] * 300 + [7.0] * 80 + [14.0] * 190
    for count in (1, 2, 3, 7):
        parts = [in_shard(costs, index, count) for index in range(1, count + 1)]
        assert all(sum(choice) == 1 for choice in zip(*parts, strict=True))
        shares = [sum(cost for cost, own in zip(costs, part, strict=True) if own) for part in parts]
        assert max(shares) - min(shares) <= 2 * max(costs)


def test_the_digest_knows_names_content_and_untracked_files(tmp_path):
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    (tmp_path / ".gitignore").write_text("ignored\n")
    seen = {content_digest(tmp_path)}
    (tmp_path / "new").write_text("a")
    seen.add(content_digest(tmp_path))
    (tmp_path / "new").write_text("b")
    seen.add(content_digest(tmp_path))
    (tmp_path / "new").rename(tmp_path / "other")
    seen.add(content_digest(tmp_path))
    assert len(seen) == 4
    (tmp_path / "ignored").write_text("c")
    assert content_digest(tmp_path) in seen


def test_durations_are_readable():
    assert [duration(s) for s in (12.4, 200, 3900)] == ["12 s", "3 m 20 s", "1 h 05 m"]
