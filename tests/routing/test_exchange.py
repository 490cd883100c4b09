"""A simulated exchange, all endpoints in one process, for every ordered pair of layouts."""

import pytest

from megatron_resilience.routing.cost import Cluster
from megatron_resilience.routing.problem import relayout
from megatron_resilience.vps.families import build_catalogue
from tests.routing.exchange import exchange
from tests.vps.models import DENSE, LAYOUTS, MOE, fits, spaces


@pytest.mark.parametrize("shape", [DENSE, MOE], ids=["dense", "moe"])
@pytest.mark.parametrize("source", LAYOUTS, ids=str)
def test_all_ordered_pairs_of_layouts(shape, source):
    catalogue = build_catalogue(shape)
    if not fits(catalogue, source):
        pytest.skip("layout is for MoE models")
    every = spaces(catalogue)
    mine = next(s for s in every if s.layout == source)
    for target in every:
        moved, *_ = exchange(relayout(mine, target, cluster=Cluster(ranks_per_node=4)))
        assert (moved == 0) if target.layout == source else True


@pytest.mark.parametrize("shape", [DENSE, MOE], ids=["dense", "moe"])
def test_a_lost_rank_is_served_by_its_replica(shape):
    every = spaces(build_catalogue(shape))
    for source in (s for s in every if s.layout.world >= 8):
        for target in (s for s in every if s.layout.world <= source.layout.world - 2):
            exchange(relayout(source, target, lost=(2, 3), cluster=Cluster(ranks_per_node=2)))
