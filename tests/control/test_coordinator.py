"""Decisions, without a process or a socket."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from megatron_resilience.control import coordinator as c
from megatron_resilience.control.membership import Evidence
from megatron_resilience.deadpool.recovery import Holding

SETTINGS = c.Settings(nnodes=3, spares=1, nproc_per_node=2)


def act(machine, *events, now=0.0):
    """All actions that events lead to."""
    return [action for event in events for action in machine.handle(event, now)]


def only(actions, kind):
    """The one action of a kind."""
    (found,) = [a for a in actions if isinstance(a, kind)]
    return found


def joined(epoch, generation=0, world=4):
    return [c.RankJoined(rank, epoch, generation) for rank in range(world)]


def running(settings=SETTINGS):
    """A machine in RUNNING, epoch 1, nodes a and b, spare c."""
    machine = c.Coordinator(settings)
    act(machine, *(c.NodeJoined(node, order) for order, node in enumerate("abcd"[: settings.nnodes])))
    act(machine, *joined(1))
    machine.first_step()
    assert machine.phase is c.Phase.RUNNING
    return machine


def holdings(machine, generation, nodes="ac"):
    epoch = machine.epoch
    ready = [c.RankReady(rank, epoch.number) for rank in range(4)]
    kept = {"a": [(0, 0), (1, 1), (2, 0), (3, 1)], "c": []}
    held = [
        c.NodeHoldings(n, epoch.number, tuple(Holding(r, generation, 0, k, n) for r, k in kept.get(n, [])))
        for n in nodes
    ]
    return [*ready, *held]


def test_a_job_starts_when_all_nodes_are_there_with_spares_left_over():
    machine = c.Coordinator(SETTINGS)
    assert not [a for a in act(machine, c.NodeJoined("b", 1), c.NodeJoined("a", 0)) if isinstance(a, c.Publish)]
    epoch = only(act(machine, c.NodeJoined("c", 2)), c.Publish).epoch
    assert (epoch.number, epoch.slots, epoch.fresh) == (1, ("a", "b"), True)
    assert machine.waiting_spares == ["c"]


def test_a_missing_spare_does_not_hold_the_job_up_for_ever():
    machine = c.Coordinator(SETTINGS)
    act(machine, c.NodeJoined("a", 0), c.NodeJoined("b", 1))
    assert not act(machine, c.Tick(), now=SETTINGS.join_grace_s - 1)
    assert only(act(machine, c.Tick(), now=SETTINGS.join_grace_s + 1), c.Publish).epoch.slots == ("a", "b")


def test_a_lost_node_is_replaced_and_its_state_comes_from_its_partner():
    machine = running()
    epoch = only(act(machine, c.NodeLost("b", Evidence.CLOSED)), c.Publish).epoch
    assert (epoch.number, epoch.slots, epoch.newcomers, epoch.fresh) == (2, ("a", "c"), (2, 3), False)
    plan = only(act(machine, *holdings(machine, 9)), c.SendPlan).plan
    assert (plan.generation, [s.holder for s in plan.sources]) == (9, [0, 1, 0, 1])
    act(machine, *joined(2, 9))
    assert machine.phase is c.Phase.RUNNING


def test_a_loss_during_a_recovery_starts_it_again():
    machine = running(replace(SETTINGS, nnodes=4, spares=2))
    act(machine, c.NodeLost("b", Evidence.CLOSED))
    epoch = only(act(machine, c.NodeLost("c", Evidence.CLOSED)), c.Publish).epoch
    assert (epoch.number, epoch.slots, epoch.newcomers) == (3, ("a", "d"), (2, 3))


def test_what_belongs_to_an_older_epoch_is_ignored():
    machine = running()
    act(machine, c.NodeLost("b", Evidence.CLOSED))
    late = [*joined(1, 5), c.RankReady(0, 1), c.RankBroken(0, 1, "late"), c.RankFinished(0, 1)]
    assert act(machine, *late) == []
    assert act(machine, c.Tick(), now=100.0) == []
    assert machine.phase is c.Phase.RECOVERING


def test_no_spare_stops_the_job_with_one_message():
    machine = running(replace(SETTINGS, nnodes=2, spares=0))
    stop = only(act(machine, c.NodeLost("b", Evidence.CLOSED)), c.Stop)
    assert stop.status == 1
    assert "no spare is left" in stop.message


def test_a_silent_half_may_not_go_on():
    machine = running(replace(SETTINGS, nnodes=2, spares=0))
    assert "may be training without us" in only(act(machine, c.NodeLost("b", Evidence.SILENT)), c.Stop).message


def test_a_dead_rank_on_a_healthy_node_is_started_again_once_per_generation():
    machine = running()
    epoch = only(act(machine, c.RankExited("b", 3, 1, -9, generation=5)), c.Publish).epoch
    assert (epoch.slots, epoch.newcomers) == (("a", "b"), (3,))
    again = act(machine, c.RankExited("b", 3, 2, -9, generation=5))
    assert "second time in the same step" in only(again, c.Stop).message


def test_a_rank_that_refuses_its_arguments_ends_the_job_at_once():
    machine = c.Coordinator(SETTINGS)
    act(machine, *(c.NodeJoined(node, order) for order, node in enumerate("abc")))
    assert only(act(machine, c.RankExited("a", 0, 1, 2, -1)), c.Stop).status == 2


def test_a_death_before_anything_is_protected_starts_everyone_again():
    machine = c.Coordinator(SETTINGS)
    act(machine, *(c.NodeJoined(node, order) for order, node in enumerate("abc")))
    epoch = only(act(machine, c.NodeLost("a", Evidence.CLOSED)), c.Publish).epoch
    assert (epoch.fresh, epoch.slots) == (True, ("c", "b"))


def test_broken_connections_without_a_death_renew_the_world_after_a_grace():
    machine = running()
    assert act(machine, c.RankBroken(1, 1, "reset by peer"), now=10.0) == []
    assert act(machine, c.Tick(), now=10.0 + SETTINGS.broken_grace_s / 2) == []
    epoch = only(act(machine, c.Tick(), now=10.1 + SETTINGS.broken_grace_s), c.Publish).epoch
    assert (epoch.slots, epoch.newcomers) == (("a", "b"), ())


def test_recoveries_that_lead_nowhere_end():
    machine = running()
    for attempt in range(c.FRUITLESS_LIMIT + 1):
        actions = act(machine, c.RankBroken(0, machine.epoch.number, "x"), now=10.0 * attempt)
        actions = act(machine, c.Tick(), now=10.0 * attempt + 5)
    assert "did not lead to a completed step" in only(actions, c.Stop).message


def test_a_good_end():
    machine = running()
    act(machine, *(c.RankFinished(rank, 1) for rank in range(4)))
    ends = act(machine, *(c.RankExited("ab"[rank // 2], rank, 1, 0, 10) for rank in range(4)))
    assert only(ends, c.Stop).status == 0


def test_a_successor_goes_on_where_the_leader_was():
    machine = running()
    act(machine, c.NodeLost("b", Evidence.CLOSED))
    heir = c.Coordinator.from_json(SETTINGS, machine.to_json())
    assert heir.to_json() == machine.to_json()
    only(act(heir, *holdings(heir, 4)), c.SendPlan)


EVENTS = st.one_of(
    st.builds(c.NodeJoined, st.sampled_from("abcde"), st.integers(0, 4)),
    st.builds(c.NodeLost, st.sampled_from("abcde"), st.sampled_from(Evidence)),
    st.builds(
        c.RankExited,
        st.sampled_from("abc"),
        st.integers(0, 3),
        st.integers(1, 4),
        st.sampled_from([0, 1, -9]),
        st.just(3),
    ),
    st.builds(c.RankReady, st.integers(0, 3), st.integers(1, 4)),
    st.builds(c.RankJoined, st.integers(0, 3), st.integers(1, 4), st.just(3)),
    st.builds(c.RankBroken, st.integers(0, 3), st.integers(1, 4), st.just("x")),
    st.builds(c.RankFinished, st.integers(0, 3), st.integers(1, 4)),
    st.builds(c.SwapAsked, st.sampled_from("abcd"), st.booleans()),
    st.builds(c.EndAsked, st.just("why")),
    st.builds(c.NodeAiling, st.sampled_from("abcd"), st.just("why")),
    st.builds(c.Tick),
)


@given(st.lists(EVENTS, max_size=60))
def test_whatever_happens_epochs_grow_and_slots_are_living_and_distinct(events):
    machine, number = c.Coordinator(SETTINGS), 0
    for moment, event in enumerate(events):
        for action in machine.handle(event, float(moment)):
            if isinstance(action, c.Publish):
                assert action.epoch.number == number + 1
                number = action.epoch.number
                assert len(set(action.epoch.slots)) == SETTINGS.slots
                assert not set(action.epoch.slots) & set(machine.gone)
                assert not set(action.epoch.slots) & set(machine.drained)
        heir = c.Coordinator.from_json(SETTINGS, machine.to_json())
        assert heir.to_json() == machine.to_json()


def test_a_rank_whose_node_fails_again_and_again_moves_to_a_spare():
    machine = running()
    for generation in (5, 6):
        act(machine, c.RankExited("b", 3, machine.epoch.number, -9, generation))
        act(machine, *joined(machine.epoch.number, generation))
        machine.first_step()
    epoch = only(act(machine, c.RankExited("b", 2, machine.epoch.number, -9, 7)), c.Publish).epoch
    assert (epoch.slots, epoch.newcomers) == (("a", "c"), (2, 3))
    assert machine.waiting_spares == ["b"], "better than none, but the last to be taken"


def test_a_node_whose_ranks_all_die_is_replaced():
    machine = running()
    act(machine, c.RankExited("b", 3, 1, -9, generation=5))
    epoch = only(act(machine, c.RankExited("b", 2, 2, -9, generation=5)), c.Publish).epoch
    assert (epoch.slots, epoch.newcomers) == (("a", "c"), (2, 3))


def test_without_copies_elsewhere_a_living_node_is_not_left():
    machine = running()
    act(machine, c.RankExited("b", 3, 1, -9, generation=5))
    act(machine, *(replace(event, replicas=0) for event in joined(2, 5)))
    act(machine, c.RankExited("b", 3, 2, -9, generation=6))
    epoch = only(act(machine, c.RankExited("b", 2, 3, -9, generation=6)), c.Publish).epoch
    assert epoch.slots == ("a", "b")


def test_an_unkillable_rank_takes_its_node_along():
    machine = running()
    epoch = only(act(machine, c.RankUnkillable("b", 3)), c.Publish).epoch
    assert epoch.slots == ("a", "c")
    act(machine, c.NodeLost("b", Evidence.CLOSED))
    assert "does not end" in only(act(machine, c.RankUnkillable("c", 2)), c.Stop).message


def test_when_all_wait_the_connections_are_renewed():
    machine = running()
    epoch = only(act(machine, c.AllWait(1, "why")), c.Publish).epoch
    assert (epoch.slots, epoch.newcomers) == (("a", "b"), ())
    assert not act(machine, c.AllWait(1, "why")), "it is over"


def test_the_last_message_tells_the_story():
    machine = running(replace(SETTINGS, max_restarts=1))
    act(machine, c.RankExited("b", 3, 1, -9, generation=5))
    act(machine, *joined(2, 5))
    text = only(act(machine, c.RankExited("a", 0, 2, -11, generation=6)), c.Stop).message
    assert "rank 0 ended with signal 11" in text and "before that: [2] rank 3 ended with signal 9" in text
