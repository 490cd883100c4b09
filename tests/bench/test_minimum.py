"""The bench's count of what must move, on changes of layout whose answer is known without it."""

from dataclasses import asdict

import pytest

from megatron_resilience.bench._minimum import least_bytes
from megatron_resilience.vps.families import ModelShape, build_catalogue
from megatron_resilience.vps.layout import parse_layout

SHAPE = ModelShape(name="small", hidden=16, layers=4, ffn=64, heads=4, vocabulary=64)


def told(before, after, per_node=2):
    catalogue = build_catalogue(SHAPE)
    source, target = (asdict(parse_layout(text)) for text in (before, after))
    same = {"catalogue": catalogue.to_json(), "sharded": True, "ranks_per_node": per_node}
    return {**same, "source": source, "target": target}, catalogue.state_bytes


@pytest.mark.parametrize("layout", ["TP2 DP2", "PP2 DP2", "DP4"])
def test_nothing_moves_where_nothing_changes(layout):
    problem, _ = told(layout, layout)
    assert least_bytes(problem)[0] == 0


def test_nothing_moves_within_a_node():
    problem, _ = told("TP2 DP2", "PP2 DP2", per_node=4)
    assert least_bytes(problem) == (0, 0)


def test_a_new_node_needs_all_that_it_owns():
    problem, whole = told("DP2", "DP4")
    # Half of the state, padding apart.
    assert least_bytes(problem)[0] == pytest.approx(whole / 2, rel=0.1)


def test_the_order_of_nodes_matters():
    # Megatron's buffers begin with the last layer: the first half of the shards is what the last stage needs.
    problem, whole = told("TP2 DP2", "PP2 DP2")
    here, best = least_bytes(problem)
    assert best < 0.25 * whole < 0.75 * whole < here
