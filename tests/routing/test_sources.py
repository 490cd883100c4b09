"""The load of replicas: even within each set that can serve a demand, and near the best possible overall."""

import itertools

import numpy as np
import pytest
from hypothesis import given

from megatron_resilience.routing.cost import Cluster
from megatron_resilience.routing.plan import plan_endpoint
from megatron_resilience.routing.problem import Problem, relayout
from megatron_resilience.routing.regions import outgoing
from megatron_resilience.routing.sources import FAR, PIECES_PER_SHARE, demand, legs, pools
from megatron_resilience.vps.families import ModelShape, build_catalogue
from megatron_resilience.vps.layout import parse_layout
from megatron_resilience.vps.space import StateSpace
from tests.routing.problems import problems
from tests.vps.strategies import few, many

ALLOWED = 1.25


def loads_of_sets(problem):
    """Per (source shard, pool): bytes sent in phase 0 by each candidate, and the largest piece."""
    out = {}
    done = set()
    for rank in np.flatnonzero(problem.source_at >= 0).tolist():
        for region in outgoing(problem, rank):
            if (region.source, region.target) in done:
                continue
            done.add((region.source, region.target))
            holders = region.holders(problem)
            for number, pool in pools(problem, region, holders).items():
                key = (region.source, number)
                load, _ = out.setdefault(key, [dict.fromkeys(pool.candidates.tolist(), 0), 0])
                for endpoint in pool.candidates.tolist():
                    for leg in legs(problem, region, holders, endpoint):
                        node = leg.destination // problem.cluster.ranks_per_node
                        if leg.source != endpoint or leg.phase or (number not in (FAR, node)):
                            continue
                        if number == FAR and leg.destination not in pool.owners:
                            continue
                        size = leg.boxes.numel * problem.source.catalogue.columns.bytes_per_element[leg.boxes.tensor]
                        load[endpoint] += int(size.sum())
                        out[key][1] = max(out[key][1], int(size.max()))
    return out


def check_even(problem):
    """No candidate of a set sends more than its share, but for the size of one piece."""
    for (shard, number), (load, piece) in loads_of_sets(problem).items():
        total = sum(load.values())
        if len(load) > 1:
            assert total == demand(problem, shard).total[number]
        assert max(load.values()) <= total / len(load) * (1 + 1 / PIECES_PER_SHARE) + piece, (shard, number, load)


@few(15)
@given(problems())
def test_replicas_share_a_demand_evenly(problem):
    check_even(problem)


@pytest.mark.full
@many()
@given(problems(most=16))
def test_thousands_of_demands_are_shared_evenly(problem):
    check_even(problem)


MODEL = ModelShape(
    "medium", layers=8, hidden=256, ffn=1024, heads=16, query_groups=8, vocabulary=5000, gated=True, bias=False,
    norm_bias=False, tied=False,
)  # fmt: skip
MIXED = ModelShape(
    "mixed", layers=8, hidden=256, ffn=1024, heads=16, query_groups=8, vocabulary=5000, gated=True, bias=False,
    norm_bias=False, tied=False, experts=8, expert_ffn=256, router_bias=True,
)  # fmt: skip
CASES = [
    (MODEL, "TP2·DP4", "TP4·DP4", False, 1),
    (MODEL, "TP2·PP2·DP4", "TP4·PP4·DP2", False, 4),
    (MODEL, "TP8·DP2", "TP4·PP2·DP4", True, 1),
    (MODEL, "TP8·PP2·DP2", "TP4·PP4·DP2", True, 4),
    (MIXED, "TP2·DP8·EP4", "TP4·DP8·EP2", True, 4),
    (MIXED, "DP8·EP4", "TP2·DP8·EP8·ETP1", False, 1),
]


def best_possible(problem, far):
    """Least bytes that the busiest source must send in phase 0, over all ways to choose sources (Hall's bound)."""
    demands = {}
    for rank in np.flatnonzero(problem.source_at >= 0).tolist():
        for region in outgoing(problem, rank):
            for number, pool in pools(problem, region, region.holders(problem)).items():
                if (number == FAR) == far:
                    key = frozenset(pool.candidates.tolist())
                    demands.setdefault(key, {})[region.source, region.target, number] = pool.served(
                        int(region.bytes.sum())
                    )
    total = {key: sum(parts.values()) for key, parts in demands.items()}
    families = {frozenset().union(*c) for n in (1, 2) for c in itertools.combinations(total, n)}
    families.add(frozenset().union(*total))
    return max((sum(v for k, v in total.items() if k <= group) / len(group) for group in families if group), default=0)


@pytest.mark.parametrize(
    ("shape", "source", "target", "sharded", "per_node"), CASES, ids=[f"{c[1]}-{c[2]}-{c[3]}" for c in CASES]
)
def test_the_busiest_source_is_near_the_best_possible(shape, source, target, sharded, per_node):
    catalogue = build_catalogue(shape)
    spaces = [StateSpace(catalogue, parse_layout(text), sharded) for text in (source, target)]
    straight = relayout(*spaces, cluster=Cluster(ranks_per_node=per_node))
    # Newcomers on other nodes: everything travels.
    first = -(-spaces[0].layout.world // per_node) * per_node
    problem = Problem(*spaces, straight.source_at, first + np.arange(spaces[1].layout.world), straight.cluster, 4096)
    for each in (straight, problem):
        load = {True: {}, False: {}}
        for endpoint in np.unique(each.source_at).tolist():
            sends = plan_endpoint(each, endpoint).sends
            for peer, phase, size in zip(sends.peer.tolist(), sends.phase.tolist(), sends.bytes.tolist(), strict=True):
                far = peer // per_node != endpoint // per_node
                if phase == 0:
                    load[far][endpoint] = load[far].get(endpoint, 0) + size
        for far, by_endpoint in load.items():
            if by_endpoint:
                best = best_possible(each, far)
                print(f"far={far} busiest {max(by_endpoint.values())} best possible {best:.0f}")
                assert max(by_endpoint.values()) <= ALLOWED * best + each.grain
