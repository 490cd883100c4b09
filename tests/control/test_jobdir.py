"""The folder by which people find a job: private, and written by many at once."""

import concurrent.futures

import pytest

from megatron_resilience.control.jobdir import JobDir, read_secret
from megatron_resilience.errors import ConfigurationError
from megatron_resilience.observe.events import EventLog, line, read_events


@pytest.fixture
def folder(tmp_path):
    made = JobDir(tmp_path / "job")
    made.prepare()
    return made


def test_all_agents_make_the_same_secret(folder):
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        secrets = {f.result() for f in [pool.submit(JobDir(folder.path).secret) for _ in range(64)]}
    assert len(secrets) == 1 and len(secrets.pop()) >= 32
    assert [path.name for path in folder.path.iterdir() if path.is_file()] == ["secret"], "nothing is left over"


def test_everything_in_it_is_private(folder):
    folder.secret()
    folder.write_agents("n0", {"n0": ("127.0.0.1", 1)})
    folder.end(0, "")
    EventLog(folder.events_file("n0"), "n0").write("x")
    for path in folder.path.rglob("*"):
        assert path.stat().st_mode & 0o077 == 0, path


def test_a_folder_that_others_can_enter_is_refused(tmp_path):
    (tmp_path / "open").mkdir(mode=0o755)
    with pytest.raises(ConfigurationError, match="chmod 700"):
        JobDir(tmp_path / "open").prepare()


def test_a_secret_that_others_read_or_that_is_empty_is_refused(tmp_path):
    path = tmp_path / "secret"
    path.write_text("abc")
    path.chmod(0o644)
    with pytest.raises(ConfigurationError, match="--x has mode 0644"):
        read_secret(path, "--x")
    path.chmod(0o600)
    path.write_text("\n")
    with pytest.raises(ConfigurationError, match="is empty"):
        read_secret(path, "--x")


def test_the_leader_is_asked_first(folder):
    assert folder.read_agents() == []
    folder.write_agents("n1", {"n0": ("a", 1), "n1": ("b", 2)})
    assert folder.read_agents() == [("b", 2), ("a", 1)]


def test_an_outcome_belongs_to_one_run(folder):
    assert folder.outcome() is None
    folder.write_agents("n0", {"n0": ("a", 1)})
    folder.end(75, "saved")
    assert folder.outcome() == (75, "saved") and folder.read_agents() == []
    folder.begin()
    assert folder.outcome() is None


def test_a_full_disk_does_not_stop_training(folder, capfd):
    with folder.best_effort():
        raise OSError(28, "No space left on device")
    assert "training goes on" in capfd.readouterr().err


def test_events_of_all_agents_are_read_in_order(folder):
    for number, node in enumerate(("n1", "n0", "n1")):
        EventLog(folder.events_file(node), node).write("tick", number=number)
    found = read_events(folder.path / "events")
    assert sorted(event["number"] for event in found) == [0, 1, 2]
    assert [event["time"] for event in found] == sorted(event["time"] for event in found)


def test_an_event_is_one_line_for_people():
    shown = line({"time": 0.25, "kind": "stacks", "by": "n0", "text": "a\nb" * 500, "marks": {"0": {}}})
    assert "\n" not in shown and "marks" not in shown and len(shown) < 300 and ".25  n0" in shown
