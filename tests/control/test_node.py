"""Which processes a node has, epoch by epoch; the zygote is a socket here, and nothing is started."""

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
    made = Node("a", "127.0.0.1", options, ours, lambda process: None)
    made.enter(FIRST)
    yield made, theirs
    for process in [*made.ranks.values(), *made.next.values()]:
        process.channel.close()
        process.stacks.close()
    ours.close()
    theirs.close()


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


def test_a_world_that_is_given_up_leaves_this_one(node):
    made, _ = node
    old = dict(made.ranks)
    made.prepare_next(NEXT)
    made.end_next()
    assert made.ranks == old and not made.next and made.next_epoch is None


def test_no_process_of_one_world_is_told_to_train_in_another(node):
    """The leader made the switch and died with the word of it: what comes next is an epoch of the new world."""
    made, _ = node
    made.prepare_next(NEXT)
    coming = dict(made.next)
    made.enter(replace(NEXT, number=3, before=None))
    assert made.ranks == coming
    made.enter(replace(FIRST, number=4, fresh=False))
    assert {p.world for p in made.ranks.values()} == {1}, "new processes"
