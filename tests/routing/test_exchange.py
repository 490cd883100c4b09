"""A simulated exchange, all endpoints in one process, for every ordered pair of layouts."""

import numpy as np
import pytest

from megatron_resilience.routing.plan import plan_endpoint
from megatron_resilience.routing.problem import relayout
from megatron_resilience.vps.families import build_catalogue
from tests.vps.models import DENSE, LAYOUTS, MOE, fits, index_of, label_arrays, spaces


def exchange(problem):
    """Run the plans of all endpoints; returns bytes on the wire. Asserts that every element arrives once."""
    catalogue = problem.source.catalogue
    labels = label_arrays(catalogue)
    names = [t.name for t in catalogue.tensors]
    endpoints = np.unique(np.concatenate([problem.source_at[problem.source_at >= 0], problem.target_at]))
    plans = {int(e): plan_endpoint(problem, int(e)) for e in endpoints}
    wire, sent = {}, 0
    for endpoint, plan in plans.items():
        held = {}
        for rank in np.flatnonzero(problem.source_at == endpoint):
            boxes = problem.source.boxes_of(int(rank))
            for i in range(len(boxes)):
                key = names[boxes.tensor[i]]
                held.setdefault(key, np.full(labels[key].shape, -1))[index_of(boxes, i)] = labels[key][
                    index_of(boxes, i)
                ]
        for peer in np.unique(plan.sends.peer).tolist():
            rows = np.flatnonzero(plan.sends.peer == peer)
            assert peer != endpoint
            data = [held[names[plan.sends.boxes.tensor[i]]][index_of(plan.sends.boxes, i)] for i in rows]
            assert all((d >= 0).all() for d in data), "sends what it does not hold"
            wire[(endpoint, peer)] = np.concatenate([d.ravel() for d in data])
            sent += int(plan.sends.bytes[rows].sum())
        for i in range(len(plan.keeps)):
            assert (held[names[plan.keeps.boxes.tensor[i]]][index_of(plan.keeps.boxes, i)] >= 0).all()
    for rank, endpoint in enumerate(problem.target_at.tolist()):
        plan = plans[endpoint]
        got = {}
        for move, messages in ((plan.receives, True), (plan.keeps, False)):
            position = {}
            for i in range(len(move)):
                name = names[move.boxes.tensor[i]]
                index = index_of(move.boxes, i)
                key = (name, int(move.boxes.copy[i]))
                into = got.setdefault(key, [np.full(labels[name].shape, -1), np.zeros(labels[name].shape, int)])
                size = int(move.boxes.numel[i])
                if messages:
                    peer = int(move.peer[i])
                    at = position.get(peer, 0)
                    into[0][index] = wire[(peer, endpoint)][at : at + size].reshape(into[0][index].shape)
                    position[peer] = at + size
                else:
                    into[0][index] = labels[name][index]
                into[1][index] += 1
            if messages:
                for peer, used in position.items():
                    assert used == wire.pop((peer, endpoint)).size, "message longer than what is read"
        boxes = problem.target.boxes_of(rank)
        expected = {}
        for i in range(len(boxes)):
            name = names[boxes.tensor[i]]
            key = (name, int(boxes.copy[i]))
            expected.setdefault(key, np.zeros(labels[name].shape, int))[index_of(boxes, i)] += 1
        assert expected.keys() == got.keys()
        for key, (values, times) in got.items():
            assert (times == expected[key]).all(), f"{key}: an element arrives never or twice"
            assert (values[times > 0] == labels[key[0]][times > 0]).all(), f"{key}: value in the wrong place"
    assert not wire, f"messages that nobody receives: {list(wire)[:3]}"
    return sent


@pytest.mark.parametrize("shape", [DENSE, MOE], ids=["dense", "moe"])
@pytest.mark.parametrize("source", LAYOUTS, ids=str)
def test_all_ordered_pairs_of_layouts(shape, source):
    catalogue = build_catalogue(shape)
    if not fits(catalogue, source):
        pytest.skip("layout is for MoE models")
    every = spaces(catalogue)
    mine = next(s for s in every if s.layout == source)
    for target in every:
        moved = exchange(relayout(mine, target, ranks_per_node=4))
        assert (moved == 0) if target.layout == source else True


@pytest.mark.parametrize("shape", [DENSE, MOE], ids=["dense", "moe"])
def test_a_lost_rank_is_served_by_its_replica(shape):
    every = spaces(build_catalogue(shape))
    for source in (s for s in every if s.layout.world >= 8):
        for target in (s for s in every if s.layout.world <= source.layout.world - 2):
            exchange(relayout(source, target, lost=(2, 3), ranks_per_node=2))
