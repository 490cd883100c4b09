"""Stages: the peak stays within the budget at every moment, and what cannot fit is refused."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_resilience.routing.plan import plan_endpoint
from megatron_resilience.routing.program import program
from megatron_resilience.routing.schedule import xor_rounds
from megatron_resilience.routing.staging import (
    SMALLEST_CHUNK,
    Budget,
    DoesNotFit,
    exchange_count,
    fit_budget,
    largest_state,
)
from tests.routing.exchange import storage_of
from tests.routing.problems import problems
from tests.vps.strategies import few, many


def bytes_of(space, rank):
    """State of one rank as stored, counted array by array."""
    return sum(a.size * space.catalogue.tensors[t].bytes_per_element for (t, _), a in storage_of(space, rank).items())


def check_peak(problem, spare):
    """Walk through every endpoint's program and add up what lies in memory at each exchange."""
    old, new = largest_state(problem.source), largest_state(problem.target)
    limit = new + spare
    need = new + 2 * SMALLEST_CHUNK
    if limit < need:
        with pytest.raises(DoesNotFit, match="use a larger DP, TP or PP, or more memory"):
            fit_budget(problem, limit)
        return
    budget = fit_budget(problem, limit)
    assert budget.peak <= limit
    assert budget.old_on_device == (limit >= need + old)
    assert budget.chunk >= SMALLEST_CHUNK
    # The real chunk would take everything in one exchange; a tiny one shows the cutting.
    for chunk in (64, budget.chunk):
        for rank, endpoint in enumerate(problem.target_at.tolist()):
            plan = plan_endpoint(problem, endpoint)
            served = np.flatnonzero(problem.source_at == endpoint).tolist()
            own = [r for r in served if r == endpoint]
            state = bytes_of(problem.target, rank)
            state += sum(bytes_of(problem.source, r) for r in own) if budget.old_on_device else 0
            steps = list(program(plan, xor_rounds(0), chunk))
            assert len(steps) == exchange_count(plan, chunk)
            for step in steps:
                staged = [c for c in (step.outgoing, step.incoming) if c]
                assert all(0 < c.size <= chunk and c.size == (c.end - c.begin).sum() for c in staged)
                assert state + sum(c.size for c in staged) <= budget.peak - 2 * budget.chunk + 2 * chunk <= limit
            moved = sum(s.outgoing.size for s in steps if s.outgoing), sum(s.incoming.size for s in steps if s.incoming)
            assert moved == (plan.sends.total_bytes, plan.receives.total_bytes)


SPARES = st.one_of(st.integers(0, 3 * SMALLEST_CHUNK), st.integers(0, 1 << 32))


@few(15)
@given(problems(), SPARES)
def test_the_peak_stays_within_the_budget(problem, spare):
    check_peak(problem, spare)


@pytest.mark.full
@many()
@given(problems(most=16), SPARES)
def test_thousands_of_peaks_stay_within_the_budget(problem, spare):
    check_peak(problem, spare)


def test_the_peak_counts_the_old_state_where_it_lies_on_the_device():
    on_device = Budget(limit=1000, old=300, new=200, old_on_device=True, chunk=64)
    assert on_device.peak == 300 + 200 + 128
    assert Budget(1000, 300, 200, False, 64).peak == 200 + 128
