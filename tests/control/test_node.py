"""Which processes a node has, epoch by epoch; the zygote is a socket here, and nothing is started."""

import os
import socket
from dataclasses import replace

import pytest

from megatron_resilience.control.channel import Channel
from megatron_resilience.control.node import Node
from megatron_resilience.control.options import LaunchOptions
from megatron_resilience.topology.epoch import Epoch


@pytest.fixture
def node():
    ours, theirs = Channel.pair()
    options = LaunchOptions(
        **{**dict.fromkeys(LaunchOptions.__dataclass_fields__), "script": "x.py", "script_args": ("--lr", "1")}
    )
    made = Node(
        "a", "127.0.0.1", options, ours, lambda process: None, lambda process: HEARD.append(last_words(process))
    )
    HEARD.clear()
    made.enter(FIRST)
    yield made, theirs
    for process in [*made.ranks.values(), *made.next.values()]:
        process.channel.close()
        process.stacks.close()
    ours.close()
    theirs.close()


HEARD = []
"""By rank that has ended, what its channel still held."""


def last_words(process):
    """All that is left in a channel."""
    words = []
    while (received := process.channel.receive(wait=False)) is not None:
        words.append(received[0])
    return process.rank, words


FIRST = Epoch(1, "", ("a", "b"), 2, fresh=True)
NEXT = replace(FIRST, number=2, fresh=False, world=2, layout="TP1·PP2·DP2", ranks=4, before=FIRST)


def started(theirs):
    """Arguments of what the zygote was asked for."""
    theirs.sock.setblocking(False)
    out = []
    while True:
        try:
            message, _ = theirs.receive()
        except BlockingIOError:
            return out
        out.append(message["argv"])


def test_the_next_world_starts_beside_this_one_with_its_layout(node):
    made, theirs = node
    started(theirs)
    made.prepare_next(NEXT)
    assert {p.world for p in made.ranks.values()} == {1} and {p.world for p in made.next.values()} == {2}
    for argv in started(theirs):
        assert argv[argv.index("--pipeline-model-parallel-size") + 1] == "2" and "--lr" in argv
    made.take_next(NEXT)
    assert made.world == 2 and {p.world for p in made.ranks.values()} == {2} and not made.next


def test_what_a_rank_said_last_is_heard_though_its_end_is_known_before(node):
    made, theirs = node
    theirs.sock.setblocking(False)
    process = made.ranks[1]
    ends = {}
    for ticket in (1, 2):
        _, (end, *others) = theirs.receive()
        ends[ticket] = Channel(socket.socket(fileno=end))
        for fd in others:
            os.close(fd)
    made.zygote_said({"kind": "started", "ticket": 2, "pid": 4711}, [])
    ends[2].send({"kind": "fatal", "error": "no room"})
    for end in ends.values():
        end.close()
    assert made.zygote_said({"kind": "exited", "pid": 4711, "status": 2}, []) == (process, 2)
    assert HEARD == [(1, [{"kind": "fatal", "error": "no room"}])]
    assert 1 not in made.ranks and process.channel.sock.fileno() == -1


def test_a_world_that_is_given_up_leaves_this_one(node):
    made, _ = node
    old = dict(made.ranks)
    made.prepare_next(NEXT)
    made.end_next()
    assert made.ranks == old and not made.next and made.next_epoch is None


def world(number, layout):
    """Another world of four ranks on a and b."""
    return replace(
        NEXT, number=number, world=number, layout=layout, before=replace(NEXT, number=number - 1, before=None)
    )


def park(node, layout, keeps, epoch=1):
    """All ranks stand still, and say what may become of them."""
    for process in node.ranks.values():
        node.parked(process, epoch, layout, keeps)


def test_a_world_that_is_left_is_kept_for_its_return(node):
    made, theirs = node
    first = dict(made.ranks)
    park(made, "TP2·PP1·DP2", 1)
    assert made.prepare_next(NEXT) == []
    made.take_next(NEXT)
    assert made.aside == {"TP2·PP1·DP2": first} and not any(p.killed for p in first.values())
    second = dict(made.ranks)
    park(made, NEXT.layout, 1, epoch=2)
    started(theirs)
    back = world(3, "TP2·PP1·DP2")
    assert made.prepare_next(back) == [0, 1] and made.next == first and started(theirs) == []
    made.take_next(back)
    assert made.ranks == first and made.aside == {NEXT.layout: second} and made.world == 3
    assert {p.world for p in first.values()} == {3} and {p.ready_epoch for p in first.values()} == {3}


def test_no_more_worlds_are_kept_than_ranks_say(node):
    made, _ = node
    seen = []
    for number, layout in enumerate(("TP1·PP2·DP2", "TP1·PP1·DP4", "TP4·PP1·DP1"), 2):
        seen.append(dict(made.ranks))
        park(made, f"left {number}", 2, epoch=number - 1)
        made.prepare_next(world(number, layout))
        made.take_next(world(number, layout))
    assert made.aside == {"left 3": seen[1], "left 4": seen[2]}
    assert all(p.killed for p in seen[0].values()), "the one that was left first"
    made.end_all()
    assert not made.aside and all(p.killed for ranks in seen for p in ranks.values())


def test_a_node_that_leaves_keeps_nothing(node):
    made, _ = node
    first = dict(made.ranks)
    park(made, "TP2·PP1·DP2", 2)
    made.prepare_next(NEXT)
    made.take_next(NEXT)
    made.leave()
    assert not made.aside and all(p.killed for p in first.values())
    second = dict(made.ranks)
    park(made, NEXT.layout, 2, epoch=2)
    made.prepare_next(world(3, "TP2·PP1·DP2"))
    made.take_next(world(3, "TP2·PP1·DP2"))
    assert not made.aside and all(p.killed for p in second.values())


def test_a_kept_world_whose_processes_have_all_died_is_none(node):
    made, _ = node
    for number, process in enumerate(made.ranks.values(), 1):
        made.zygote_said({"kind": "started", "ticket": number, "pid": -number}, [])
        assert process.pid == -number
    park(made, "left", 2)
    made.prepare_next(NEXT)
    made.take_next(NEXT)
    assert list(made.aside) == ["left"]
    for pid in (-1, -2):
        assert made.zygote_said({"kind": "exited", "pid": pid, "status": -9}, []) is None
    assert not made.aside


def test_who_may_not_be_kept_ends(node):
    """A rank that writes for people says 0, and starts anew beside those that were kept; so does one that parked another time."""
    made, theirs = node
    first = dict(made.ranks)
    made.parked(first[0], 1, "TP2·PP1·DP2", 1)
    made.parked(first[1], 1, "TP2·PP1·DP2", 0)
    made.prepare_next(NEXT)
    made.take_next(NEXT)
    assert made.aside == {"TP2·PP1·DP2": {0: first[0]}} and first[1].killed
    started(theirs)
    assert made.prepare_next(world(3, "TP2·PP1·DP2")) == [0]
    assert len(started(theirs)) == 1 and made.next[1] is not first[1]
    made.take_next(world(3, "TP2·PP1·DP2"))
    park(made, "TP2·PP1·DP2", 1, epoch=3)
    lost = replace(world(4, ""), number=5, lost=("b",))
    made.prepare_next(replace(world(5, "DP2"), number=6, ranks=2, before=lost))
    made.take_next(replace(world(5, "DP2"), number=6, ranks=2))
    assert first[0].killed and not made.aside, "it waits for another epoch of its own world"


def test_no_process_of_one_world_is_told_to_train_in_another(node):
    """The leader made the switch and died with the word of it: what comes next is an epoch of the new world."""
    made, _ = node
    made.prepare_next(NEXT)
    coming = dict(made.next)
    made.enter(replace(NEXT, number=3, before=None))
    assert made.ranks == coming
    made.enter(replace(FIRST, number=4, fresh=False))
    assert {p.world for p in made.ranks.values()} == {1}, "new processes"
