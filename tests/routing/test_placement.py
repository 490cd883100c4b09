"""Keeping bytes in place: fewer travel, never more, whole nodes stay together."""

import numpy as np
from hypothesis import given

from megatron_resilience.routing.cost import Cluster
from megatron_resilience.routing.placement import keep_in_place
from megatron_resilience.routing.plan import plan_endpoint
from megatron_resilience.routing.problem import relayout
from megatron_resilience.vps.families import build_catalogue
from megatron_resilience.vps.layout import Layout
from megatron_resilience.vps.space import StateSpace
from tests.routing.exchange import exchange
from tests.routing.problems import problems
from tests.vps.models import DENSE
from tests.vps.strategies import few


def travels(problem):
    """Bytes that all endpoints receive."""
    return sum(plan_endpoint(problem, e).receives.total_bytes for e in problem.target_at.tolist())


def test_survivors_of_a_lost_node_keep_what_they_have():
    catalogue = build_catalogue(DENSE)
    # Nodes are pipeline stages; without the first node, two stages of two ranks are left of four.
    spaces = [StateSpace(catalogue, Layout(pp=4, dp=2)), StateSpace(catalogue, Layout(pp=2, dp=2))]
    problem = relayout(*spaces, lost=(0, 1), cluster=Cluster(ranks_per_node=2))
    assert problem.target_at.tolist() == [2, 3, 4, 5]
    shuffled = relayout(*spaces, cluster=Cluster(ranks_per_node=2))
    shuffled.target_at[:] = [6, 7, 0, 1]
    kept = keep_in_place(shuffled)
    assert travels(kept) < travels(shuffled)
    assert (kept.target_at // 2).tolist() == [0, 0, 3, 3]
    exchange(kept)


def test_a_mirrored_numbering_is_put_right():
    space = StateSpace(build_catalogue(DENSE), Layout(tp=2, pp=2, dp=2))
    problem = relayout(space, space, cluster=Cluster(ranks_per_node=2))
    problem.target_at[:] = problem.target_at[::-1].copy()
    # An embedding that both ends of the pipeline have is fed from its like, so even it stays.
    assert travels(problem) > 0
    assert travels(keep_in_place(problem)) == 0


@few(15)
@given(problems())
def test_never_more_bytes_and_whole_nodes(problem):
    kept = keep_in_place(problem)
    assert sorted(kept.target_at.tolist()) == sorted(problem.target_at.tolist())
    assert travels(kept) <= travels(problem)
    width = problem.cluster.ranks_per_node
    for run in range(0, len(kept.target_at) - width + 1, width):
        before = np.unique(problem.target_at[run : run + width] // width)
        if len(before) == 1:
            assert len(np.unique(kept.target_at[run : run + width] // width)) == 1
