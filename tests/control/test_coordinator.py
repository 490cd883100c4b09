"""Decisions, without a process or a socket."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from megatron_resilience.control import events as e
from megatron_resilience.control.coordinator import Coordinator
from megatron_resilience.control.epochs import FRUITLESS_LIMIT
from megatron_resilience.control.membership import Evidence
from megatron_resilience.control.record import Phase, Settings
from megatron_resilience.deadpool.recovery import Holding

SETTINGS = Settings(nnodes=3, spares=1, nproc_per_node=2)


def act(machine, *events, now=0.0):
    """All actions that events lead to."""
    return [action for event in events for action in machine.handle(event, now)]


def only(actions, kind):
    """The one action of a kind."""
    (found,) = [a for a in actions if isinstance(a, kind)]
    return found


def joined(epoch, generation=0, world=4):
    return [e.RankJoined(rank, epoch, generation) for rank in range(world)]


def running(settings=SETTINGS):
    """A machine in RUNNING, epoch 1, nodes a and b, spare c."""
    machine = Coordinator(settings)
    act(machine, *(e.NodeJoined(node, order) for order, node in enumerate("abcd"[: settings.nnodes])))
    act(machine, *joined(1))
    machine.first_step()
    assert machine.phase is Phase.RUNNING
    return machine


def holdings(machine, generation, nodes="ac"):
    epoch = machine.epoch
    ready = [e.RankReady(rank, epoch.number) for rank in range(4)]
    kept = {"a": [(0, 0), (1, 1), (2, 0), (3, 1)], "c": []}
    held = [
        e.NodeHoldings(n, epoch.number, tuple(Holding(r, generation, 0, k, n) for r, k in kept.get(n, [])))
        for n in nodes
    ]
    return [*ready, *held]


def test_a_job_starts_when_all_nodes_are_there_with_spares_left_over():
    machine = Coordinator(SETTINGS)
    assert not [a for a in act(machine, e.NodeJoined("b", 1), e.NodeJoined("a", 0)) if isinstance(a, e.Publish)]
    epoch = only(act(machine, e.NodeJoined("c", 2)), e.Publish).epoch
    assert (epoch.number, epoch.slots, epoch.fresh) == (1, ("a", "b"), True)
    assert machine.waiting_spares == ["c"]


def test_a_missing_spare_does_not_hold_the_job_up_for_ever():
    machine = Coordinator(SETTINGS)
    act(machine, e.NodeJoined("a", 0), e.NodeJoined("b", 1))
    assert not act(machine, e.Tick(), now=SETTINGS.join_grace_s - 1)
    assert only(act(machine, e.Tick(), now=SETTINGS.join_grace_s + 1), e.Publish).epoch.slots == ("a", "b")


def test_a_lost_node_is_replaced_and_its_state_comes_from_its_partner():
    machine = running()
    epoch = only(act(machine, e.NodeLost("b", Evidence.CLOSED)), e.Publish).epoch
    assert (epoch.number, epoch.slots, epoch.newcomers, epoch.fresh) == (2, ("a", "c"), (2, 3), False)
    plan = only(act(machine, *holdings(machine, 9)), e.SendPlan).plan
    assert (plan.generation, [s.holder for s in plan.sources]) == (9, [0, 1, 0, 1])
    act(machine, *joined(2, 9))
    assert machine.phase is Phase.RUNNING


def test_a_loss_during_a_recovery_starts_it_again():
    machine = running(replace(SETTINGS, nnodes=4, spares=2))
    act(machine, e.NodeLost("b", Evidence.CLOSED))
    epoch = only(act(machine, e.NodeLost("c", Evidence.CLOSED)), e.Publish).epoch
    assert (epoch.number, epoch.slots, epoch.newcomers) == (3, ("a", "d"), (2, 3))


def test_what_belongs_to_an_older_epoch_is_ignored():
    machine = running()
    act(machine, e.NodeLost("b", Evidence.CLOSED))
    late = [*joined(1, 5), e.RankReady(0, 1), e.RankBroken(0, 1, "late"), e.RankFinished(0, 1)]
    assert act(machine, *late) == []
    assert act(machine, e.Tick(), now=100.0) == []
    assert machine.phase is Phase.RECOVERING


def test_no_spare_stops_the_job_with_one_message():
    machine = running(replace(SETTINGS, nnodes=2, spares=0))
    stop = only(act(machine, e.NodeLost("b", Evidence.CLOSED)), e.Stop)
    assert stop.status == 1
    assert "no spare is left" in stop.message


def test_a_silent_half_may_not_go_on():
    machine = running(replace(SETTINGS, nnodes=2, spares=0))
    assert "may be training without us" in only(act(machine, e.NodeLost("b", Evidence.SILENT)), e.Stop).message


def test_a_dead_rank_on_a_healthy_node_is_started_again_once_per_generation():
    machine = running()
    epoch = only(act(machine, e.RankExited("b", 3, 1, -9, generation=5)), e.Publish).epoch
    assert (epoch.slots, epoch.newcomers) == (("a", "b"), (3,))
    again = act(machine, e.RankExited("b", 3, 2, -9, generation=5))
    assert "second time in the same step" in only(again, e.Stop).message


def test_a_rank_that_refuses_its_arguments_ends_the_job_at_once():
    machine = Coordinator(SETTINGS)
    act(machine, *(e.NodeJoined(node, order) for order, node in enumerate("abc")))
    assert only(act(machine, e.RankExited("a", 0, 1, 2, -1)), e.Stop).status == 2


def test_a_death_before_anything_is_protected_starts_everyone_again():
    machine = Coordinator(SETTINGS)
    act(machine, *(e.NodeJoined(node, order) for order, node in enumerate("abc")))
    epoch = only(act(machine, e.NodeLost("a", Evidence.CLOSED)), e.Publish).epoch
    assert (epoch.fresh, epoch.slots) == (True, ("c", "b"))


def test_broken_connections_without_a_death_renew_the_world_after_a_grace():
    machine = running()
    assert act(machine, e.RankBroken(1, 1, "reset by peer"), now=10.0) == []
    assert act(machine, e.Tick(), now=10.0 + SETTINGS.broken_grace_s / 2) == []
    epoch = only(act(machine, e.Tick(), now=10.1 + SETTINGS.broken_grace_s), e.Publish).epoch
    assert (epoch.slots, epoch.newcomers) == (("a", "b"), ())


def test_recoveries_that_lead_nowhere_end():
    machine = running()
    for attempt in range(FRUITLESS_LIMIT + 1):
        actions = act(machine, e.RankBroken(0, machine.epoch.number, "x"), now=10.0 * attempt)
        actions = act(machine, e.Tick(), now=10.0 * attempt + 5)
    assert "did not lead to a completed step" in only(actions, e.Stop).message


def test_a_good_end():
    machine = running()
    act(machine, *(e.RankFinished(rank, 1) for rank in range(4)))
    ends = act(machine, *(e.RankExited("ab"[rank // 2], rank, 1, 0, 10) for rank in range(4)))
    assert only(ends, e.Stop).status == 0


def test_a_successor_goes_on_where_the_leader_was():
    machine = running()
    act(machine, e.NodeLost("b", Evidence.CLOSED))
    heir = Coordinator.from_json(SETTINGS, machine.to_json())
    assert heir.to_json() == machine.to_json()
    only(act(heir, *holdings(heir, 4)), e.SendPlan)


EVENTS = st.one_of(
    st.builds(e.NodeJoined, st.sampled_from("abcde"), st.integers(0, 4)),
    st.builds(e.NodeLost, st.sampled_from("abcde"), st.sampled_from(Evidence)),
    st.builds(
        e.RankExited,
        st.sampled_from("abc"),
        st.integers(0, 3),
        st.integers(1, 4),
        st.sampled_from([0, 1, -9]),
        st.just(3),
    ),
    st.builds(e.RankReady, st.integers(0, 3), st.integers(1, 4)),
    st.builds(e.RankJoined, st.integers(0, 3), st.integers(1, 4), st.just(3)),
    st.builds(e.RankBroken, st.integers(0, 3), st.integers(1, 4), st.just("x")),
    st.builds(e.RankFinished, st.integers(0, 3), st.integers(1, 4)),
    st.builds(e.SwapAsked, st.sampled_from("abcd"), st.booleans()),
    st.builds(e.EndAsked, st.just("why")),
    st.builds(e.NodeAiling, st.sampled_from("abcd"), st.just("why")),
    st.builds(e.Tick),
)


@given(st.lists(EVENTS, max_size=60))
def test_whatever_happens_epochs_grow_and_slots_are_living_and_distinct(events):
    machine, number = Coordinator(SETTINGS), 0
    for moment, event in enumerate(events):
        for action in machine.handle(event, float(moment)):
            if isinstance(action, e.Publish):
                assert action.epoch.number == number + 1
                number = action.epoch.number
                assert len(set(action.epoch.slots)) == SETTINGS.slots
                assert not set(action.epoch.slots) & set(machine.gone)
                assert not set(action.epoch.slots) & set(machine.drained)
        heir = Coordinator.from_json(SETTINGS, machine.to_json())
        assert heir.to_json() == machine.to_json()


def test_a_rank_whose_node_fails_again_and_again_moves_to_a_spare():
    machine = running()
    for generation in (5, 6):
        act(machine, e.RankExited("b", 3, machine.epoch.number, -9, generation))
        act(machine, *joined(machine.epoch.number, generation))
        machine.first_step()
    epoch = only(act(machine, e.RankExited("b", 2, machine.epoch.number, -9, 7)), e.Publish).epoch
    assert (epoch.slots, epoch.newcomers) == (("a", "c"), (2, 3))
    assert machine.waiting_spares == ["b"], "better than none, but the last to be taken"


def test_a_node_whose_ranks_all_die_is_replaced():
    machine = running()
    act(machine, e.RankExited("b", 3, 1, -9, generation=5))
    epoch = only(act(machine, e.RankExited("b", 2, 2, -9, generation=5)), e.Publish).epoch
    assert (epoch.slots, epoch.newcomers) == (("a", "c"), (2, 3))


def test_without_copies_elsewhere_a_living_node_is_not_left():
    machine = running()
    act(machine, e.RankExited("b", 3, 1, -9, generation=5))
    act(machine, *(replace(event, replicas=0) for event in joined(2, 5)))
    act(machine, e.RankExited("b", 3, 2, -9, generation=6))
    epoch = only(act(machine, e.RankExited("b", 2, 3, -9, generation=6)), e.Publish).epoch
    assert epoch.slots == ("a", "b")


def test_an_unkillable_rank_takes_its_node_along():
    machine = running()
    epoch = only(act(machine, e.RankUnkillable("b", 3)), e.Publish).epoch
    assert epoch.slots == ("a", "c")
    act(machine, e.NodeLost("b", Evidence.CLOSED))
    assert "does not end" in only(act(machine, e.RankUnkillable("c", 2)), e.Stop).message


def test_when_all_wait_the_connections_are_renewed():
    machine = running()
    epoch = only(act(machine, e.AllWait(1, "why", 7)), e.Publish).epoch
    assert (epoch.slots, epoch.newcomers) == (("a", "b"), ())
    assert not act(machine, e.AllWait(1, "why", 7)), "it is over"


def test_when_all_wait_again_in_the_same_step_the_job_stops():
    """Though it completes steps in between, because it begins at an older generation: the same step would end so again."""
    machine = running()
    for epoch, generation in ((1, 7), (2, 9)):
        only(act(machine, e.AllWait(epoch, "why", generation)), e.Publish)
        act(machine, *joined(epoch + 1, 6))
        machine.first_step()
    machine = Coordinator.from_json(SETTINGS, machine.to_json())
    assert "for the second time in the same step" in only(act(machine, e.AllWait(3, "why", 7)), e.Stop).message


def test_the_last_message_tells_the_story():
    machine = running(replace(SETTINGS, max_restarts=1))
    act(machine, e.RankExited("b", 3, 1, -9, generation=5))
    act(machine, *joined(2, 5))
    text = only(act(machine, e.RankExited("a", 0, 2, -11, generation=6)), e.Stop).message
    assert "rank 0 ended with signal 11" in text and "before that: [2] rank 3 ended with signal 9" in text
