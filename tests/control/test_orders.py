"""What people ask a job for: a node to be swapped or drained, a good end. Decisions only."""

from dataclasses import replace

import pytest

from megatron_resilience import exits
from megatron_resilience.control import events as e
from megatron_resilience.control.coordinator import Coordinator
from megatron_resilience.control.membership import Evidence
from tests.control.test_coordinator import SETTINGS, act, holdings, joined, only, running

FOUR = replace(SETTINGS, nnodes=4, spares=2)


def saving(machine):
    """The same machine, whose ranks have said that they save when told to leave."""
    machine.saves = True
    return machine


def test_a_healthy_node_is_swapped_and_becomes_the_spare():
    machine = running()
    actions = act(machine, e.SwapAsked("a", ticket=7))
    epoch = only(actions, e.Publish).epoch
    assert (epoch.slots, epoch.newcomers, epoch.fresh) == (("c", "b"), (0, 1), False)
    assert only(actions, e.Answer) == e.Answer(7, True, epoch.cause, 2)
    assert machine.waiting_spares == ["a"]
    assert machine.restarts == 0, "a command is no fault"


def test_a_swapped_node_may_come_back():
    machine = running()
    act(machine, e.SwapAsked("a"), *joined(2, 5))
    assert only(act(machine, e.SwapAsked("c")), e.Publish).epoch.slots == ("a", "b")


def test_a_drained_node_is_not_used_again():
    machine = running(FOUR)
    act(machine, e.SwapAsked("a", drain=True), *joined(2, 5))
    assert machine.waiting_spares == ["d"]
    act(machine, e.NodeLost("b", Evidence.CLOSED), *joined(3, 6))
    assert "no spare is left" in only(act(machine, e.NodeLost("d", Evidence.CLOSED)), e.Stop).message


def test_a_drained_spare_costs_no_epoch():
    machine = running()
    actions = act(machine, e.SwapAsked("c", drain=True))
    assert only(actions, e.Answer).done and not [a for a in actions if isinstance(a, e.Publish)]
    assert machine.waiting_spares == []


def test_a_drained_node_that_goes_away_is_no_loss():
    machine = running()
    act(machine, e.SwapAsked("b", drain=True), *joined(2, 5))
    assert not [a for a in act(machine, e.NodeLost("b", Evidence.CLOSED)) if isinstance(a, (e.Publish, e.Stop))]


@pytest.mark.parametrize(
    ("prepare", "node", "says"),
    [
        ([], "x", "no node x"),
        ([], "c", "holds no slot"),
        ([e.NodeLost("c", Evidence.CLOSED)], "a", "no spare waits"),
        ([e.NodeLost("a", Evidence.CLOSED)], "b", "ask again when it is running"),
        ([replace(joined(1)[0], replicas=0)], "a", "--deadpool-replicas 0"),
    ],
)
def test_what_cannot_be_done_is_refused_and_changes_nothing(prepare, node, says):
    machine = running()
    act(machine, *prepare)
    before = machine.to_json()
    (answer,) = act(machine, e.SwapAsked(node))
    assert not answer.done and says in answer.text
    assert machine.to_json() == before


def test_nothing_is_swapped_before_the_job_has_begun():
    (answer,) = act(Coordinator(SETTINGS), e.NodeJoined("a", 0), e.SwapAsked("a", drain=True))[1:]
    assert not answer.done and "not begun" in answer.text


def test_a_good_end_saves_and_says_that_the_same_command_goes_on():
    machine = saving(running())
    only(act(machine, e.EndAsked("time is up")), e.Leave)
    assert act(machine, e.EndAsked("time is up")) == [], "every agent gets the signal"
    act(machine, *(e.RankFinished(rank, 1) for rank in range(4)))
    stop = only(act(machine, *(e.RankExited("ab"[r // 2], r, 1, 0, 10) for r in range(4))), e.Stop)
    assert stop.status == exits.LEFT and "time is up" in stop.message


def test_a_node_that_dies_on_the_way_out_is_replaced_and_the_newcomers_are_told():
    machine = saving(running())
    act(machine, e.EndAsked("time is up"), e.NodeLost("b", Evidence.CLOSED), *holdings(machine, 9))
    heir = Coordinator.from_json(SETTINGS, machine.to_json())
    actions = act(heir, *(replace(event, saves=True) for event in joined(2, 9)))
    assert only(actions, e.Leave).why == "time is up"


def test_an_end_that_loses_work_says_so():
    stop = only(act(running(), e.EndAsked("node b got SIGTERM")), e.Stop)
    assert stop.status == 143 and "--exit-signal-handler" in stop.message


def test_before_training_there_is_nothing_to_save():
    machine = Coordinator(SETTINGS)
    assert only(act(machine, e.NodeJoined("a", 0), e.EndAsked("time is up")), e.Stop).status == exits.LEFT
