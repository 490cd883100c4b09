"""Copies always lie on another node, and nobody keeps more than their share."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_resilience.deadpool.placement import partners
from megatron_resilience.errors import ConfigurationError


@given(st.integers(2, 5), st.integers(1, 4), st.data())
def test_elsewhere_and_balanced(nodes, per_node, data):
    world = nodes * per_node
    where = [f"n{rank // per_node}" for rank in range(world)]
    # Any partition into equal data-parallel groups, contiguous or not.
    size = data.draw(st.sampled_from([s for s in range(1, world + 1) if world % s == 0]))
    order = data.draw(st.permutations(range(world)))
    groups = [order[i : i + size] for i in range(0, world, size)]
    chosen = partners(where, groups)
    assert all(where[keeper] != where[rank] for rank, keeper in enumerate(chosen))
    assert sorted(chosen) == list(range(world)), "every rank keeps exactly one copy"


def test_along_the_data_parallel_ring_where_it_leaves_the_node():
    assert partners(["a", "a", "b", "b"], [[0, 2], [1, 3]]) == [2, 3, 0, 1]


def test_one_node_is_refused_with_the_remedy():
    with pytest.raises(ConfigurationError, match="at least 2 nodes"):
        partners(["a", "a"], [[0, 1]])
