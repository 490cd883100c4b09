"""Commands without a job: what they say, and their exit statuses."""

import socket

import pytest

from megatron_resilience import exits
from megatron_resilience.control.cli import main
from megatron_resilience.control.client import Client
from megatron_resilience.control.jobdir import JobDir
from megatron_resilience.errors import ControlError
from megatron_resilience.observe.events import EventLog


@pytest.fixture(autouse=True)
def _plain(monkeypatch):
    for name in ("MEGATRON_RESILIENCE_JOB_DIR", "MEGATRON_RESILIENCE_SECRET"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Client.__init__, "__defaults__", (0.2,))


@pytest.fixture
def folder(tmp_path):
    made = JobDir(tmp_path / "job")
    made.prepare()
    return made


@pytest.mark.parametrize("command", [["status"], ["events"], ["outcome"], ["drain", "n1"], ["swap", "n1"]])
def test_which_job_is_asked(capsys, tmp_path, command):
    assert main(command) == 2
    assert "which job?" in capsys.readouterr().err
    assert main([command[0], "--job-dir", str(tmp_path / "none"), *command[1:]]) == 2
    assert "is not a folder" in capsys.readouterr().err


def test_a_job_that_does_not_answer(folder, capsys):
    folder.secret()
    assert main(["status", "--job-dir", str(folder.path)]) == 3
    assert "no address of an agent is known" in capsys.readouterr().err
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        folder.write_agents("n0", {"n0": bound.getsockname()})
        assert main(["status", "--job-dir", str(folder.path)]) == 3
    assert "does not answer" in capsys.readouterr().err


def test_a_job_that_has_ended(folder, capsys):
    folder.end(75, "saved")
    assert main(["drain", "--job-dir", str(folder.path), "n1"]) == 3
    assert "ended with status 75: saved" in capsys.readouterr().err
    assert main(["outcome", "--job-dir", str(folder.path)]) == 75


def test_an_outcome_that_nobody_could_tell(folder):
    assert main(["outcome", "--job-dir", str(folder.path)]) == exits.FAILED


def test_the_folder_may_come_from_the_environment(folder, capsys, monkeypatch):
    monkeypatch.setenv("MEGATRON_RESILIENCE_JOB_DIR", str(folder.path))
    EventLog(folder.events_file("n0"), "n0").write("training", epoch=1)
    EventLog(folder.events_file("n1"), "n1").write("stacks", text="long")
    assert main(["events", "--kind", "training"]) == 0
    (shown,) = capsys.readouterr().out.splitlines()
    assert shown.endswith("epoch=1")


def test_an_agent_named_by_hand_needs_the_secret(capsys):
    assert main(["status", "--agent", "head:1"]) == 2
    assert "--secret-file" in capsys.readouterr().err
    assert main(["status", "--agent", "head"]) == 2
    assert "--agent head: expected HOST:PORT" in capsys.readouterr().err


def test_a_leader_that_is_elsewhere_is_asked_there(folder):
    """The first agent follows and says who leads; that one answers."""
    import asyncio
    import threading

    from megatron_resilience.control.peers import accept

    ready, ports = threading.Event(), []

    async def serve_two():
        async def talk(reader, writer, answer):
            peer = await accept(reader, writer, b"s")
            if await peer.receive() is not None:
                peer.send(answer())
                await peer.flush()
            peer.close()

        follower = await asyncio.start_server(
            lambda r, w: talk(r, w, lambda: {"kind": "elsewhere", "address": ["127.0.0.1", ports[1]]}), "127.0.0.1", 0
        )
        leader = await asyncio.start_server(
            lambda r, w: talk(r, w, lambda: {"kind": "answer", "done": True, "text": "here"}), "127.0.0.1", 0
        )
        ports.extend(server.sockets[0].getsockname()[1] for server in (follower, leader))
        ready.set()
        await stop.wait()
        follower.close()
        leader.close()

    loop, stop = asyncio.new_event_loop(), asyncio.Event()
    thread = threading.Thread(target=lambda: loop.run_until_complete(serve_two()))
    thread.start()
    try:
        assert ready.wait(10)
        assert Client(lambda: [("127.0.0.1", ports[0])], b"s", 10.0).ask("status")["text"] == "here"
        with pytest.raises(ControlError, match="another"):
            Client(lambda: [("127.0.0.1", ports[1])], b"t", 0.2).ask("status")
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(10)
        loop.close()
