"""A simulated exchange, all endpoints in one process, for every ordered pair of layouts: 21 dense ones, 29 with MoE."""

import functools
from dataclasses import replace

import pytest

from megatron_resilience.routing.cost import Cluster
from megatron_resilience.routing.problem import relayout
from megatron_resilience.vps.families import build_catalogue
from tests.routing.exchange import exchange, missing_bytes
from tests.vps.models import DENSE, LAYOUTS, MOE, fits, spaces

SHAPES = {"dense": DENSE, "moe": MOE}
SOURCES = [
    pytest.param(name, layout, id=f"{name}-{layout}")
    for name, shape in SHAPES.items()
    for layout in LAYOUTS
    if fits(build_catalogue(shape), layout)
]
PARTS = 14
"""Of a run that is not full, each source goes to every fourteenth target, starting at another one."""


@functools.cache
def every(name):
    """All spaces of a model, shared by the tests."""
    return spaces(build_catalogue(SHAPES[name]))


def check_pair(source, target):
    """Every element in its place, and to each rank goes what it lacks and no more."""
    problem = relayout(source, target, cluster=Cluster(ranks_per_node=4))
    moved, *_ = exchange(problem)
    assert moved == missing_bytes(problem)
    assert moved == 0 or target.layout != source.layout


def test_there_are_enough_layouts():
    assert len(every("dense")) >= 20
    assert len(every("moe")) >= 20


@pytest.mark.parametrize(("name", "layout"), SOURCES)
def test_pairs_of_layouts(name, layout):
    layouts = [space.layout for space in every(name)]
    number = layouts.index(layout)
    source = every(name)[number]
    for target in [source, *every(name)[number % PARTS :: PARTS]]:
        check_pair(source, target)


@pytest.mark.full
@pytest.mark.parametrize(("name", "layout"), SOURCES)
def test_all_ordered_pairs_of_layouts(name, layout):
    source = next(space for space in every(name) if space.layout == layout)
    for target in every(name):
        check_pair(source, target)


@pytest.mark.parametrize("step", [pytest.param(1, marks=pytest.mark.full, id="all"), pytest.param(23, id="some")])
@pytest.mark.parametrize("name", SHAPES)
def test_a_lost_rank_is_served_by_its_replica(name, step):
    pairs = [
        (source, target)
        for source in every(name)
        if source.layout.world >= 8
        for target in every(name)
        if target.layout.world <= source.layout.world - 2
    ]
    assert pairs
    for source, target in pairs[::step]:
        exchange(relayout(source, target, lost=(2, 3), cluster=Cluster(ranks_per_node=2)))


@pytest.mark.parametrize("name", SHAPES)
def test_shelves_of_a_node_are_read_by_all_of_it(name):
    """Snapshots in a node's memory: nothing is sent within a node, and what must travel travels once per node's need."""
    layouts = every(name)
    for number, source in enumerate(layouts):
        for target in layouts[number % 9 :: 9]:
            plain = relayout(source, target, cluster=Cluster(ranks_per_node=4))
            last = -(-max(source.layout.world, target.layout.world) // 4)
            owning = {int(e) // 4 for e in plain.target_at}
            couriers = tuple(n * 4 for n in range(last) if n not in owning)
            shelves = replace(plain, shelves=True, couriers=couriers)
            moved, plans, _ = exchange(shelves)
            assert moved <= exchange(plain)[0]
            for plan in plans.values():
                first = plan.sends.phase == 0
                assert (plan.sends.peer[first] // 4 != plan.endpoint // 4).all(), "sent within a node"
