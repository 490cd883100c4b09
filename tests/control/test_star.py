"""Who leads when the agent that led is gone, over real connections; only the processes of the nodes are left out."""

import asyncio
import contextlib
from dataclasses import asdict, replace

import pytest
import torch  # noqa: F401  (takes longer than a heartbeat: as in an agent, it is there before the loop runs)

from megatron_resilience.control import events as e
from megatron_resilience.control.addresses import bind
from megatron_resilience.control.options import LaunchOptions
from megatron_resilience.control.peers import connect
from megatron_resilience.control.record import Phase
from megatron_resilience.control.star import Member, Star
from megatron_resilience.control.switching import Wish
from megatron_resilience.errors import ControlError
from megatron_resilience.observe.events import EventLog, read_events

HOME = "127.0.0.1"
PATIENCE_S = 60.0


class Node:
    """Stands for an agent: what its star tells it, and what its ranks would have said."""

    def __init__(
        self, number: int, nodes: int, endpoint, listener, log, secret=b"s", heartbeat_timeout_s=5.0, spares=0
    ):
        self.heard, self.ended, self.words, self.prepares = [], None, [], None
        self.tasks: set[asyncio.Task] = set()
        options = LaunchOptions(
            nnodes=nodes,
            spares=spares,
            nproc_per_node=1,
            node_rank=number,
            rdzv_endpoint=None,
            local_nodes=False,
            node_addr=None,
            max_restarts=3,
            heartbeat_timeout_s=heartbeat_timeout_s,
            spare_skeletons=None,
            failure_domains=None,
            events=None,
            secret_file=None,
            job_dir=None,
            script="train.py",
            script_args=(),
        )
        name = f"n{number}"
        me = Member(name, number, HOME, name)
        self.star = Star(options, me, endpoint, secret, listener, EventLog(log, name), None, self)

    def from_leader(self, message):
        self.heard.append(message)

    def said(self):
        return list(self.words)

    def unfinished_switch(self):
        return self.prepares

    def finish(self, status, message):
        self.ended = (status, message)

    def spawn(self, coroutine):
        task = asyncio.get_running_loop().create_task(coroutine)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def die(self):
        """As the kernel does it: everything it had open is closed, and it does no more."""
        self.star.finishing = True
        for task in list(self.tasks):
            task.cancel()
        self.star.close()
        for peer in [*self.star._followers.values(), self.star._to_leader]:
            if peer is not None:
                peer.close()

    @property
    def epoch(self):
        """The newest one it was told of."""
        return next((m["epoch"] for m in reversed(self.heard) if m["kind"] == "epoch"), None)


async def until(condition):
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def star_of(nodes: int, log, **more):
    """All agents of a job, connected, each told of the first epoch."""
    listener = bind(HOME, 0)
    endpoint = (HOME, listener.getsockname()[1])
    agents = [Node(i, nodes, endpoint, listener if i == 0 else None, log, **more) for i in range(nodes)]
    try:
        for agent in agents:
            await agent.star.listen()
        agents[0].star.begin()
        for agent in agents[1:]:
            await agent.star.join()
        await until(lambda: all(agent.epoch for agent in agents))
        yield agents
    finally:
        for agent in agents:
            await agent.die()


def leaders(agents):
    return [i for i, agent in enumerate(agents) if agent.star.leader is not None]


def test_all_are_told_of_the_first_epoch(tmp_path):
    async def run():
        async with star_of(3, tmp_path / "log") as agents:
            assert leaders(agents) == [0]
            assert [agent.epoch["number"] for agent in agents] == [agents[0].epoch["number"]] * 3

    asyncio.run(run())


def test_the_next_in_order_leads_and_hears_again_what_ranks_said(tmp_path):
    log = tmp_path / "log"

    async def run():
        async with star_of(3, log) as agents:
            number = agents[0].epoch["number"]
            agents[2].words = [{"kind": "noted", "epoch": number, "word": "again"}]
            await until(lambda: agents[1].star._state["state"] and len(agents[1].star._state["addresses"]) == 3)
            await agents[0].die()
            await until(lambda: leaders(agents[1:]) == [0] and not agents[2].star.alone)
            # It has everything that its predecessor knew, and reports the death itself.
            await until(lambda: "n0" not in agents[1].star.leader.machine.alive)
            assert set(agents[1].star.leader.machine.alive) == {"n1", "n2"}
            await until(lambda: [e for e in read_events(log) if e["kind"] == "noted"])

    asyncio.run(run())
    events = read_events(log)
    assert [event["by"] for event in events if event["kind"] == "leader"] == ["n1"]
    assert [(event["by"], event["node"]) for event in events if event["kind"] == "noted"] == [("n1", "n2")]


@contextlib.asynccontextmanager
async def succession(log, last_word):
    """Four agents, of which the first dies; the second succeeds it, the third is late, the fourth is there.

    Args:
        last_word: called with the four; what the first then tells the others, it tells the third alone.

    Yields the four and an event that lets the third come.
    """
    async with star_of(4, log, spares=2) as agents:
        first, second, third, _ = (agent.star for agent in agents)
        await until(lambda: all(len(a.star._state["addresses"]) == 4 for a in agents))
        come, succeed = asyncio.Event(), third._succeed

        async def late(*gone):
            await come.wait()
            await succeed(*gone)

        third._succeed = late
        untold = {node: first._followers.pop(node) for node in ("n1", "n3")}
        last_word(agents)
        first._followers.update(untold)
        await until(lambda: third._state["version"] == first.leader.version)
        await agents[0].die()
        await until(lambda: second.leader is not None and "n3" in second._followers)
        yield agents, come


def test_a_successor_takes_over_the_newest_that_any_of_them_was_told(tmp_path):
    async def run():
        ails = e.NodeAiling("n2", "it is tired")
        async with succession(tmp_path / "log", lambda agents: agents[0].star.leader.event(ails)) as (agents, come):
            successor = agents[1].star
            assert "n2" not in successor.leader.machine.ailing
            # Time passes before the one that knows more comes.
            successor.tick()
            come.set()
            await until(lambda: "n0" not in successor.leader.machine.alive)
            assert successor.leader.machine.ailing == {"n2": "it is tired"}
            await until(lambda: agents[3].star._state["state"]["ailing"] == {"n2": "it is tired"})

    asyncio.run(run())


def test_nothing_is_decided_before_a_successor_has_taken_over(tmp_path):
    def training_without_the_first(agents):
        """The job trains on the second and the third when the first one dies."""
        leader = agents[0].star.leader

        def joined():
            for rank in range(2):
                said = {"epoch": leader.machine.epoch.number, "generation": 3}
                leader.event(e.RankJoined(rank, **said, replicas=1, saves=False, exclusive=False))

        joined()
        leader.event(e.SwapAsked("n0", True, 1))
        joined()

    async def run():
        async with succession(tmp_path / "log", training_without_the_first) as (agents, come):
            successor = agents[1].star
            peer = await connect(*successor._addresses["n1"], b"s")
            peer.send({"kind": "ask", "command": "drain", "node": "n1"})
            answer = await peer.receive()
            assert not answer["done"] and "ask again" in answer["text"]
            peer.send({"kind": "ask", "command": "status"})
            assert (await peer.receive())["done"]
            peer.close()
            wish = asdict(Wish("another", 2, at=9))
            agents[3].star.tell_leader({"kind": "wish", "world": 1, "wish": wish})
            await until(lambda: successor._succession.said)
            come.set()
            await until(lambda: successor.leader.machine.switch is not None)
            assert successor.leader.machine.switch.target.layout == "another"
            # The order to give up is for what the dead one had begun; the wish came after it.
            await until(lambda: [m["kind"] for m in agents[3].heard].count("prepare") == 1)
            kinds = [message["kind"] for message in agents[3].heard if message["kind"] in ("abandon", "prepare")]
            assert kinds == ["abandon", "prepare"]

    asyncio.run(run())


def test_a_successor_that_completes_a_change_has_the_next_one_asked_for_again(tmp_path):
    def made(agents):
        """The first one has made a change, has begun the next, and only the third knows of it."""
        leader = agents[0].star.leader
        leader.machine.epoch = replace(leader.machine.epoch, number=2, world=2, slots=("n1", "n2"), layout="another")
        leader.machine.phase = Phase.RUNNING
        leader.publish_again()
        agents[1].prepares = leader.machine.epoch

    async def run():
        async with succession(tmp_path / "log", made) as (agents, come):
            come.set()
            await until(lambda: all("abandon" in [m["kind"] for m in agent.heard] for agent in agents[1:]))
            for agent in agents[1:]:
                heard = [m["kind"] for m in agent.heard if m["kind"] in ("switched", "abandon")]
                assert heard == ["switched", "abandon"]
                assert agent.epoch["number"] == 2

    asyncio.run(run())


def test_a_successor_that_died_with_its_predecessor_is_passed_over(tmp_path):
    async def run():
        async with star_of(5, tmp_path / "log", spares=2, heartbeat_timeout_s=1.0) as agents:
            await until(lambda: agents[2].star._state["state"] and len(agents[2].star._state["addresses"]) == 5)
            await asyncio.gather(agents[0].die(), agents[1].die())
            await until(lambda: agents[2].star.leader is not None)
            await until(lambda: set(agents[2].star.leader.machine.alive) == {"n2", "n3", "n4"})
            assert leaders(agents[2:]) == [0] and not agents[3].star.alone and not agents[4].star.alone

    asyncio.run(run())


def test_a_silent_leader_is_as_good_as_dead(tmp_path):
    async def run():
        # Nobody beats here: the first of the two to lose patience breaks the connection.
        async with star_of(2, tmp_path / "log", heartbeat_timeout_s=0.5) as agents:
            await until(lambda: agents[1].star.leader is not None or "n1" not in agents[0].star.leader.machine.alive)

    asyncio.run(run())


def test_another_secret_does_not_come_in(tmp_path):
    async def run():
        async with star_of(1, tmp_path / "log") as (first,):
            stranger = Node(1, 2, first.star._endpoint, None, None, secret=b"t")
            await stranger.star.listen()
            try:
                with contextlib.suppress(ControlError):
                    await stranger.star.join()
                    await until(lambda: stranger.ended)
                    assert stranger.ended[0] == 1 and "--secret-file" in stranger.ended[1]
                assert stranger.star.alone or stranger.ended
                assert set(first.star.leader.machine.alive) == {"n0"}
            finally:
                await stranger.die()

    asyncio.run(run())


def test_nobody_answers(tmp_path, monkeypatch):
    monkeypatch.setattr("megatron_resilience.control.star._FIRST_S", 0.2)

    async def run():
        listener = bind(HOME, 0)
        port = listener.getsockname()[1]
        listener.close()
        alone = Node(1, 2, (HOME, port), None, None)
        await alone.star.listen()
        try:
            with pytest.raises(ControlError, match=f"no agent answers at {HOME}:{port}"):
                await alone.star.join()
        finally:
            await alone.die()

    asyncio.run(run())
