"""Decisions about a change of layout, without a process or a socket."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_resilience.control import events as e
from megatron_resilience.control.coordinator import Coordinator
from megatron_resilience.control.membership import Evidence
from megatron_resilience.control.record import Phase, Settings
from megatron_resilience.control.switching import Fallback, Wish, target_of
from megatron_resilience.deadpool.recovery import Holding
from megatron_resilience.errors import ConfigurationError
from tests.control.test_coordinator import SETTINGS, act, joined, only, running

WISH = Wish("TP1·PP2·DP2", 4, at=7)


def none_of(actions, *kinds):
    return not [a for a in actions if isinstance(a, kinds)]


def held(epoch, limits):
    return [e.RankHeld(rank, epoch, limit) for rank, limit in enumerate(limits)]


def prepared(epoch, ranks=4):
    return [e.RankPrepared(rank, epoch) for rank in range(ranks)]


def parked(epoch, generation, ranks=4):
    return [e.RankParked(rank, epoch, generation, rank % 2) for rank in range(ranks)]


def moving(wish=WISH):
    """A machine whose change is at its last stage: everything is on its way."""
    machine = running()
    act(machine, e.SwitchAsked(wish), *held(1, [4, 5, 4, 4]))
    act(machine, *prepared(2), *parked(1, 7))
    assert machine.switch is not None and machine.switch.moving
    return machine


def test_a_change_of_layout_from_the_wish_to_the_end():
    machine = running()
    actions = act(machine, e.SwitchAsked(WISH))
    target = only(actions, e.Prepare).epoch
    assert (target.number, target.world, target.layout, target.ranks) == (2, 2, "TP1·PP2·DP2", 4)
    assert target.before.number == 1 and target.newcomers == (0, 1, 2, 3)
    only(actions, e.Hold)
    assert machine.epoch.number == 1, "training goes on"
    assert none_of(act(machine, *held(1, [4, 5, 4])), e.StopAt)
    assert only(act(machine, e.RankHeld(3, 1, 4)), e.StopAt).generation == 7
    assert none_of(act(machine, *prepared(2)), e.SendPlan)
    plan = only(act(machine, *parked(1, 7)), e.SendPlan).plan
    assert (plan.epoch, plan.generation) == (2, 7)
    assert [(s.holder, s.slot) for s in plan.sources] == [(0, 0), (1, 1), (2, 0), (3, 1)]
    assert none_of(act(machine, *joined(2, 7)[:3]), e.Switched) and machine.epoch.number == 1
    assert only(act(machine, joined(2, 7)[3]), e.Switched).epoch.number == 2
    assert machine.epoch.layout == "TP1·PP2·DP2" and machine.epoch.before is None
    assert machine.phase is Phase.RUNNING and machine.switch is None


def test_as_soon_as_possible_agrees_when_the_new_world_is_ready():
    machine = running()
    assert none_of(act(machine, e.SwitchAsked(replace(WISH, at=0))), e.Hold)
    only(act(machine, *prepared(2)), e.Hold)
    assert only(act(machine, *held(1, [9, 10, 9, 9])), e.StopAt).generation == 10
    only(act(machine, *parked(1, 10)), e.SendPlan)


@pytest.mark.parametrize("at", [0, 7])
def test_without_room_for_two_worlds_the_old_one_parks_before_the_new_one_is_prepared(at):
    machine = running()
    machine.exclusive = True
    asked = act(machine, e.SwitchAsked(replace(WISH, at=at)))
    only(asked, e.Hold)
    assert none_of(asked, e.Prepare)
    stop = only(act(machine, *held(1, [4, 5, 4, 4])), e.StopAt).generation
    assert stop == max(at, 5)
    assert none_of(act(machine, *parked(1, stop)[:3]), e.Prepare, e.SendPlan)
    assert none_of(last := act(machine, parked(1, stop)[3]), e.SendPlan)
    assert only(last, e.Prepare).epoch.number == 2
    assert only(act(machine, *prepared(2)), e.SendPlan).plan.generation == stop
    only(act(machine, *joined(2, stop)), e.Switched)
    assert Coordinator.from_json(SETTINGS, machine.to_json()).exclusive


@given(st.lists(st.integers(0, 20), min_size=4, max_size=4), st.integers(1, 20))
def test_nobody_is_asked_to_stop_where_somebody_has_been(limits, at):
    machine = running()
    act(machine, e.SwitchAsked(replace(WISH, at=at)))
    stop = only(act(machine, *held(1, limits)), e.StopAt).generation
    assert stop >= at
    # A rank goes no further than its limit until it hears: it has not entered the step after `stop`.
    assert all(stop >= limit for limit in limits)
    assert stop in (at, *limits)


@pytest.mark.parametrize(
    "event",
    [
        e.RankExited("a", 1, 2, 1, -1),
        e.RankBroken(1, 2, "gloo"),
        e.RankFatal(1, "parameters differ", 2),
        e.RankFinished(0, 1),
    ],
)
def test_a_failure_of_the_new_world_leaves_the_old_one_training(event):
    machine = moving()
    events = [e.RankFinished(r, 1) for r in range(4)] if isinstance(event, e.RankFinished) else [event]
    actions = act(machine, *events)
    only(actions, e.Abandon)
    assert none_of(actions, e.Stop, e.Publish)
    assert machine.epoch.number == 1 and machine.switch is None
    assert not act(machine, *joined(2, 7)), "what the new world still says is nothing"


def test_a_node_that_dies_in_the_middle_is_replaced_in_the_old_layout():
    machine = moving()
    actions = act(machine, e.NodeLost("b", Evidence.CLOSED))
    only(actions, e.Abandon)
    epoch = only(actions, e.Publish).epoch
    assert (epoch.number, epoch.slots, epoch.layout, epoch.before) == (3, ("a", "c"), "", None)
    assert epoch.world == 1


def test_a_recovery_after_the_change_stays_in_the_new_layout():
    machine = moving()
    act(machine, *joined(2, 7))
    epoch = only(act(machine, e.RankExited("a", 1, 2, -9, 8)), e.Publish).epoch
    assert (epoch.number, epoch.layout, epoch.world, epoch.newcomers) == (3, WISH.layout, 2, (1,))


def test_a_wait_that_takes_too_long_ends():
    machine = moving()
    only(act(machine, e.Tick(), now=1e6), e.Abandon)


def test_a_world_that_is_never_ready_is_given_up_while_the_old_one_trains():
    machine = running()
    act(machine, e.SwitchAsked(replace(WISH, at=0)))
    assert none_of(machine.handle(e.Tick(), 800.0), e.Abandon)
    only(machine.handle(e.Tick(), 1000.0), e.Abandon)
    assert machine.switch is None and machine.phase is Phase.RUNNING


def test_a_change_that_is_ready_waits_for_its_iteration_as_long_as_it_takes():
    machine = running()
    act(machine, e.SwitchAsked(WISH), *prepared(2))
    assert none_of(machine.handle(e.Tick(), 1e6), e.Abandon)


def test_wishes_that_cannot_be():
    machine = running()
    act(machine, e.SwitchAsked(WISH))
    (note,) = act(machine, e.SwitchAsked(WISH))
    assert note.fields["why"] == "another change is under way"
    epoch, domains = running().epoch, dict(zip("abc", "xxy", strict=True))
    with pytest.raises(ConfigurationError, match="takes 4 nodes of 2, but only 3 are there"):
        target_of(Wish("DP8", 8), epoch, ["c"], 2, domains, 1)
    with pytest.raises(ConfigurationError, match="z is not among the nodes"):
        target_of(Wish("DP4", 4, ("a", "z")), epoch, ["c"], 2, domains, 1)
    with pytest.raises(ConfigurationError, match="a, b alone, and --deadpool-replicas 1"):
        target_of(Wish("DP4", 4), epoch, ["c"], 2, domains, 1)
    assert target_of(Wish("DP4", 4, ("c", "a")), epoch, ["c"], 2, domains, 1).slots == ("c", "a")
    assert target_of(Wish("DP6", 6), epoch, ["c"], 2, domains, 1).slots == ("a", "b", "c")


def test_a_wish_during_a_recovery_waits_for_its_end():
    machine = running()
    act(machine, e.RankExited("a", 1, 1, -9, 3))
    assert not act(machine, e.SwitchAsked(WISH))
    only(act(machine, *joined(2, 3)), e.Prepare)


def test_the_next_entry_of_a_schedule_is_known_before_its_world_begins():
    """Or it would come too late where it follows at the next generation: the ranks are told to stop right after go."""
    machine = moving()
    back = Wish("TP2·PP1·DP2", 4, at=8)
    assert not act(machine, e.SwitchAsked(back, world=2))
    actions = act(machine, *joined(2, 7))
    kinds = [type(a) for a in actions]
    assert kinds.index(e.Switched) < kinds.index(e.Prepare) < kinds.index(e.Hold)
    assert only(act(machine, *held(2, [7, 7, 8, 7])), e.StopAt).generation == 8


def test_a_world_that_never_began_has_asked_for_nothing():
    machine = moving()
    wish = e.SwitchAsked(Wish("TP2·PP1·DP2", 4, at=8), world=2)
    act(machine, wish)
    act(machine, e.RankExited("a", 1, 1, -9, 7))
    assert none_of(act(machine, *joined(3, 7)), e.Prepare) and machine.switch is None
    # Its words may come late.
    assert not act(machine, wish) and machine.switch is None


def test_a_change_to_what_is_there_is_refused():
    machine = moving()
    act(machine, *joined(2, 7))
    answer = only(act(machine, e.SwitchAsked(WISH, 5)), e.Answer)
    assert not answer.done and "TP1·PP2·DP2 already, on a, b" in answer.text


def test_a_successor_knows_what_was_asked_for():
    machine = running()
    act(machine, e.RankExited("a", 1, 1, -9, 3), e.SwitchAsked(WISH))
    heir = Coordinator.from_json(SETTINGS, json.loads(json.dumps(machine.to_json())))
    assert heir.wish == WISH
    only(act(heir, *joined(2, 3)), e.Prepare)


@pytest.mark.parametrize("event", [e.NodeAiling("c", "it is hot"), e.SwapAsked("c", True, 1)])
def test_a_successor_is_told_of_everything_that_changes(event):
    machine = running()
    told = machine.to_json()
    act(machine, event)
    assert machine.to_json() != told


def test_a_successor_knows_which_numbers_were_given():
    machine = running()
    act(machine, e.SwitchAsked(WISH))
    heir = Coordinator.from_json(SETTINGS, machine.to_json())
    epoch = only(act(heir, e.RankExited("a", 1, 1, -9, 3)), e.Publish).epoch
    assert epoch.number == 3, "the abandoned world had number 2"


def without_spares():
    """A machine of three nodes of one rank that train, with layouts for fewer."""
    machine = running(Settings(nnodes=3, spares=0, nproc_per_node=1))
    act(machine, *joined(1, world=3))
    machine.first_step()
    act(machine, e.FallbacksKnown(1, {3: Fallback("DP3", 3), 2: Fallback("DP2", 2)}))
    return machine


def copies(epoch, generation):
    """Of three ranks on a, b, c, each kept by the next: what a and c hold when b is gone."""
    return [
        e.NodeHoldings("a", epoch, (Holding(0, generation, 0, 0, "a"), Holding(2, generation, 1, 0, "a"))),
        e.NodeHoldings("c", epoch, (Holding(2, generation, 1, 2, "c"), Holding(1, generation, 0, 2, "c"))),
    ]


def shrinking():
    machine = without_spares()
    lost = only(act(machine, e.NodeLost("b", Evidence.CLOSED)), e.Publish).epoch
    assert (lost.number, lost.lost, lost.slots) == (2, ("b",), ("a", "b", "c"))
    target = only(act(machine, *copies(2, 9)), e.Prepare).epoch
    assert (target.layout, target.slots, target.sources, target.lost) == ("DP2", ("a", "c"), (0, 2, 2), ())
    return machine


def test_without_spares_the_survivors_go_on_in_a_smaller_layout_and_grow_again():
    machine = shrinking()
    plan = only(act(machine, *prepared(3, 2)), e.SendPlan).plan
    assert (plan.epoch, plan.generation, [s.holder for s in plan.sources]) == (3, 9, [0, 2, 2])
    only(act(machine, *joined(3, 9, world=2)), e.Switched)
    assert machine.phase is Phase.RUNNING and machine.epoch.lost == ()
    assert not act(machine, e.Tick(), now=1.0)
    act(machine, e.NodeJoined("d", 3))
    grown = only(act(machine, e.Tick(), now=2.0), e.Prepare).epoch
    assert (grown.layout, grown.slots) == ("DP3", ("a", "c", "d"))
    act(machine, *prepared(4, 3), *[e.RankHeld(r, 3, 20) for r in range(2)], *parked(3, 20, 2))
    only(act(machine, *joined(4, 20, world=3)), e.Switched)
    assert machine.grow_to is None


def test_a_smaller_world_that_fails_is_tried_again():
    machine = shrinking()
    actions = act(machine, e.RankExited("a", 0, 3, 1, -1))
    only(actions, e.Abandon)
    again = only(actions, e.Publish).epoch
    assert again.lost == ("b",)
    only(act(machine, *copies(again.number, 9)), e.Prepare)


def test_what_no_copy_is_left_of_ends_the_job():
    machine = without_spares()
    act(machine, e.NodeLost("b", Evidence.CLOSED))
    held = copies(2, 9)
    stop = only(act(machine, held[0], replace(held[1], holdings=held[1].holdings[:1])), e.Stop)
    assert "lacks rank 1" in stop.message


def test_nodes_take_the_places_in_which_the_least_moves():
    epoch, domains = running().epoch, dict(zip("abc", "abc", strict=True))
    assert target_of(Wish("PP2 DP2", 4, order=(1, 0)), epoch, ["c"], 2, domains, 1).slots == ("b", "a")
    assert target_of(Wish("PP2 DP2", 4, ("a", "b"), order=(1, 0)), epoch, ["c"], 2, domains, 1).slots == ("a", "b")
    assert target_of(Wish("DP6", 6, order=(1, 0)), epoch, ["c"], 2, domains, 1).slots == ("a", "b", "c")
