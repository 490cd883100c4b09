"""Random routing problems: two layouts of a random model, holders that died or moved, clusters of any shape."""

import numpy as np
from hypothesis import assume
from hypothesis import strategies as st

from megatron_resilience.routing.cost import Cluster
from megatron_resilience.routing.holders import NOWHERE
from megatron_resilience.routing.problem import Problem
from tests.vps.strategies import models


@st.composite
def clusters(draw):
    """Nodes of 1 to 8 ranks; latencies that favour each way of fan-out."""
    return Cluster(
        ranks_per_node=draw(st.sampled_from([1, 2, 4, 8, 1000])),
        network_latency=draw(st.sampled_from([0.0, 30e-6, 1.0])),
        network_bandwidth=draw(st.sampled_from([20e9, 1e3])),
    )


@st.composite
def problems(draw, most=12, cluster=None):
    """From one layout to another: endpoints shuffled, some shards served by another endpoint, some lost."""
    source, target = draw(models(2, most))
    old, new = source.layout.world, target.layout.world
    source_at = np.arange(old)
    for rank in draw(st.lists(st.integers(0, old - 1), max_size=3, unique=True)):
        source_at[rank] = draw(st.sampled_from([NOWHERE, *range(old)]))
    pool = draw(st.permutations(range(max(old, new)))) if draw(st.booleans()) else range(max(old, new))
    target_at = np.array(list(pool)[:new])
    grain = draw(st.sampled_from([1, 100, 1 << 16]))
    problem = Problem(source, target, source_at, target_at, cluster or draw(clusters()), grain)
    try:
        problem.check_covered()
    except ValueError:
        assume(False)
    return problem
