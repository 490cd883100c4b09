"""Fan-out: each way reaches everybody once, and the chosen one is the cheapest by the cost model."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_resilience.routing.cost import Cluster
from megatron_resilience.routing.fanout import (
    Way,
    broadcast_from,
    broadcast_phases,
    broadcast_to,
    choose_way,
    seconds,
)
from megatron_resilience.routing.problem import Problem
from megatron_resilience.vps.catalogue import Catalogue
from megatron_resilience.vps.layout import Layout
from megatron_resilience.vps.space import StateSpace
from megatron_resilience.vps.tensors import Kind, LogicalTensor, Place
from tests.routing.exchange import exchange
from tests.vps.strategies import few


@few(60)
@given(st.integers(1, 9), st.integers(1, 60))
def test_a_broadcast_reaches_everybody_once_and_in_order(sources, owners):
    have = dict.fromkeys(range(min(sources, owners)), 0)
    for phase in range(1, broadcast_phases(sources, owners) + 1):
        passed = [(a, b) for a in range(owners) for b, when in broadcast_to(sources, owners, a) if when == phase]
        assert all(have.get(a, phase) < phase for a, _ in passed), "passes on what it has not got"
        assert len({a for a, _ in passed}) == len(passed), "serves two in one phase"
        for a, b in passed:
            assert b not in have
            assert broadcast_from(sources, b) == (a, phase)
            have[b] = phase
    assert sorted(have) == list(range(owners))


@few(60)
@given(st.floats(1, 1e12), st.integers(1, 20), st.integers(1, 200), st.sampled_from([0.0, 30e-6, 1.0]))
def test_the_chosen_way_is_the_cheapest(size, sources, owners, latency):
    cluster = Cluster(network_latency=latency)
    way = choose_way(size, sources, owners, cluster)
    assert seconds(way, size, sources, owners, cluster) == min(seconds(w, size, sources, owners, cluster) for w in Way)


def one_to_eight(rows):
    """A frozen tensor of one rank that eight ranks on other nodes need."""
    catalogue = Catalogue("one", 0, 0, (LogicalTensor("w", (rows, 1024), "float32", Kind.FROZEN, Place.FIRST),))
    source, target = StateSpace(catalogue, Layout()), StateSpace(catalogue, Layout(dp=8))
    return Problem(source, target, np.array([0]), np.arange(1, 9), Cluster(ranks_per_node=1))


@pytest.mark.parametrize(
    ("rows", "phases", "from_source"),
    # 4 MB per owner: latency hardly counts, so parts; 4 kB: latency is all, so a tree.
    [(1024, {0, 1}, 1024 * 4096), (1, {0, 1, 2, 3}, 4096)],
    ids=["scatter", "broadcast"],
)
def test_a_source_of_many_sends_once(rows, phases, from_source):
    problem = one_to_eight(rows)
    sent, plans, _ = exchange(problem)
    assert sent == 8 * rows * 4096, "everybody still receives each element once"
    assert {int(p) for plan in plans.values() for p in plan.receives.phase} == phases
    assert plans[0].sends.total_bytes == from_source
    assert max(plan.sends.total_bytes for plan in plans.values()) <= 3 * rows * 4096
