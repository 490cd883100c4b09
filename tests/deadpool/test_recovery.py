"""The newest generation that everybody's state is held of, from the nearest holder."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_resilience.deadpool.recovery import Holding, RestorePlan, Source, plan_restore
from megatron_resilience.errors import StateError

NODES = ["a", "a", "b", "b"]


def own(rank, generation, slot=0):
    return Holding(rank, generation, slot, rank, NODES[rank])


def kept(rank, generation, keeper, slot=1):
    return Holding(rank, generation, slot, keeper, NODES[keeper])


def test_own_copies_first_replicas_for_the_rest():
    holdings = [own(0, 8), own(1, 8), own(0, 7, 1), own(1, 7, 1), kept(2, 8, 0), kept(3, 8, 1), kept(2, 7, 0, 0)]
    plan = plan_restore(3, NODES, holdings)
    assert plan == RestorePlan(3, 8, (Source(0, 0), Source(1, 0), Source(0, 1), Source(1, 1)))
    assert RestorePlan.from_json(plan.to_json()) == plan


def test_an_incomplete_newer_generation_is_not_used():
    holdings = [own(0, 8), own(1, 8), own(0, 7, 1), own(1, 7, 1), kept(2, 7, 0), kept(3, 7, 1), kept(3, 8, 1, 0)]
    assert plan_restore(2, NODES, holdings).generation == 7


def test_what_is_missing_is_named():
    with pytest.raises(StateError, match="generation 8 lacks rank 2"):
        plan_restore(2, NODES, [own(0, 8), own(1, 8), kept(3, 8, 1)])
    with pytest.raises(StateError, match="nobody holds any"):
        plan_restore(2, NODES, [])


@given(st.sets(st.tuples(st.integers(0, 3), st.integers(5, 7), st.booleans())))
def test_newest_covered_generation(present):
    keeper = {0: 2, 1: 3, 2: 0, 3: 1}
    holdings = [kept(r, g, keeper[r]) if replica else own(r, g) for r, g, replica in present]
    covered = [g for g in (5, 6, 7) if {r for r, h, _ in present if h == g} == {0, 1, 2, 3}]
    if not covered:
        with pytest.raises(StateError):
            plan_restore(1, NODES, holdings)
        return
    plan = plan_restore(1, NODES, holdings)
    assert plan.generation == max(covered)
    for rank, source in enumerate(plan.sources):
        assert (rank, plan.generation, source.holder != rank) in present
        assert source.holder == rank or (rank, plan.generation, False) not in present
