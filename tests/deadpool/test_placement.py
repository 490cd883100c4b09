"""Copies always lie in other failure domains, and nobody keeps more than their share."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_resilience.deadpool.placement import partners
from megatron_resilience.errors import ConfigurationError


def groups_of(data, world):
    """Any partition into equal data-parallel groups, contiguous or not."""
    size = data.draw(st.sampled_from([s for s in range(1, world + 1) if world % s == 0]))
    order = data.draw(st.permutations(range(world)))
    return [order[i : i + size] for i in range(0, world, size)]


@given(st.integers(2, 5), st.integers(1, 4), st.data())
def test_one_copy_is_elsewhere_and_balanced(nodes, per_node, data):
    where = [f"n{rank // per_node}" for rank in range(nodes * per_node)]
    chosen = partners(where, where, groups_of(data, len(where)))
    assert all(where[keeper] != where[rank] for rank, (keeper,) in enumerate(chosen))
    assert sorted(keeper for (keeper,) in chosen) == list(range(len(where))), "every rank keeps exactly one copy"


@given(st.lists(st.integers(1, 3), min_size=2, max_size=5), st.integers(1, 3), st.integers(0, 3), st.data())
def test_all_copies_of_a_rank_are_in_different_domains(racks, per_node, replicas, data):
    """Racks of any sizes; nodes of a rack need not be neighbours."""
    if replicas >= len(racks):
        replicas = len(racks) - 1
    rack_of = data.draw(st.permutations([rack for rack, size in enumerate(racks) for _ in range(size)]))
    nodes = [f"n{rank // per_node}" for rank in range(len(rack_of) * per_node)]
    domains = [f"rack{rack_of[rank // per_node]}" for rank in range(len(nodes))]
    chosen = partners(nodes, domains, groups_of(data, len(nodes)), replicas)
    for rank, kept in enumerate(chosen):
        assert len({domains[rank], *(domains[k] for k in kept)}) == replicas + 1


@given(st.integers(1, 3), st.integers(2, 4), st.integers(1, 3), st.integers(1, 3))
def test_equal_racks_share_the_load(nodes_per_rack, racks, per_node, replicas):
    replicas = min(replicas, racks - 1)
    nodes = [f"n{rank // per_node}" for rank in range(nodes_per_rack * racks * per_node)]
    domains = [f"rack{rank // per_node // nodes_per_rack}" for rank in range(len(nodes))]
    chosen = partners(nodes, domains, [[rank] for rank in range(len(nodes))], replicas)
    load = Counter(keeper for kept in chosen for keeper in kept)
    assert set(load.values()) == {replicas}


def test_along_the_data_parallel_ring_where_it_leaves_the_node():
    where = ["a", "a", "b", "b"]
    assert partners(where, where, [[0, 2], [1, 3]]) == [(2,), (3,), (0,), (1,)]


def test_data_parallel_neighbours_in_one_rack_are_passed_over():
    nodes = ["a", "b", "c", "d"]
    assert partners(nodes, ["r", "r", "s", "s"], [[0, 1, 2, 3]]) == [(2,), (3,), (0,), (1,)]


@pytest.mark.parametrize(
    ("domains", "replicas", "remedy"),
    [
        (["a", "a"], 1, "at least 2 nodes"),
        (["a", "b"], 2, "--deadpool-replicas 1"),
    ],
)
def test_too_few_nodes_are_refused_with_the_remedy(domains, replicas, remedy):
    with pytest.raises(ConfigurationError, match=remedy):
        partners(domains, domains, [[0, 1]], replicas)


def test_too_few_racks_are_refused():
    with pytest.raises(ConfigurationError, match="--failure-domains"):
        partners(["a", "b", "c"], ["r", "r", "r"], [[0, 1, 2]], 1)
