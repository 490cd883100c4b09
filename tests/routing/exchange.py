"""A simulated exchange in one process: every endpoint's plan, its own memory, messages as bytes on a wire.

Storage is what ranks really have: one-dimensional shards, read and written through strided views. Every element is
labelled by its logical index in the whole model, so an element in a wrong place shows.
"""

import functools
from dataclasses import replace

import numpy as np

from megatron_resilience.routing.plan import Moves, plan_endpoint
from megatron_resilience.vps.local import local_labels, local_views

UNSET = -2


def bases(catalogue):
    """Label of the first element of each tensor."""
    sizes = [int(np.prod(t.canonical_shape)) for t in catalogue.tensors]
    return np.concatenate([[0], np.cumsum(sizes)])


@functools.lru_cache(maxsize=4096)
def storage_of(space, rank):
    """Labels by (tensor, copy) as ``rank`` stores them, -1 in padding."""
    inst, layout, base = space.instances, space.layout, bases(space.catalogue)
    out = {}
    for expert, grid in ((False, layout.dense), (True, layout.expert)):
        tp, ep, shard, pp = layout.coordinates(grid, rank)
        for row in range(len(inst.tensor)):
            t = int(inst.tensor[row])
            if bool(space.is_expert[t]) != expert or (expert and inst.ep[row] != ep):
                continue
            if (inst.pp[row] != pp and not space.on_all_stages[t]) or inst.tp[row] not in (-1, tp):
                continue
            low, high = space.owned_range(np.array([row]), np.array([shard]))
            labels = local_labels(space, rank, t).ravel()[int(low[0]) : int(high[0])]
            out[t, int(inst.copy[row])] = np.where(labels >= 0, labels + base[t], -1)
    return out


def indices(space, moves, ranks):
    """Per row, (tensor, copy) and the index of its elements in the storage of its rank in ``ranks``."""
    out = [None] * len(moves)
    boxes = moves.boxes
    for rank in np.unique(ranks).tolist():
        rows = np.flatnonzero(ranks == rank)
        at = local_views(space, rank, boxes.take(rows))
        for i, row in enumerate(rows.tolist()):
            (o, c, k), (so, sc, sk) = at.sizes[i].tolist(), at.strides[i].tolist()
            inner = np.arange(0, c * sc, sc)[:, None] + np.arange(0, k * sk, sk)
            index = (at.offset[i] + np.arange(0, o * so, so)[:, None] + inner.ravel()).ravel()
            out[row] = ((int(boxes.tensor[row]), int(boxes.copy[row])), index)
    return out


def take(moves, mask):
    """Some rows of ``moves``."""
    return Moves(moves.boxes.take(mask), *(c[mask] for c in (moves.peer, moves.phase, moves.rank, moves.bytes)))


def source_copies(problem, moves):
    """The same moves with the copy of the source that feeds them."""
    copy = problem.source_copy[moves.boxes.copy, moves.boxes.tensor]
    return replace(moves, boxes=replace(moves.boxes, copy=copy))


def missing_bytes(problem):
    """Bytes of the elements that endpoints need and cannot read where they are, of the copy that feeds each."""
    width, total = problem.target.catalogue.columns.bytes_per_element, 0
    for rank, endpoint in enumerate(problem.target_at.tolist()):
        had = {}
        for source in problem.readable(endpoint):
            for key, labels in storage_of(problem.source, source).items():
                had.setdefault(key, []).append(labels)
        for (tensor, copy), labels in storage_of(problem.target, rank).items():
            if problem.source.instances.first[tensor] >= 0:
                fed_by = tensor, int(problem.source_copy[copy, tensor])
                lacks = np.setdiff1d(labels[labels >= 0], np.concatenate(had.get(fed_by, [np.empty(0, int)])))
                total += lacks.size * int(width[tensor])
    return total


def exchange(problem, memory=None):
    """Run the plans of all endpoints. Asserts that every element is written once, and is the right one.

    Args:
        memory: storage by source rank, as an exchange before this one left it; default: as the labels say.

    Returns:
        (bytes on the wire, plans by endpoint, storage by target rank)
    """
    source, target = problem.source, problem.target
    endpoints = np.unique(np.concatenate([problem.source_at[problem.source_at >= 0], problem.target_at]))
    if problem.shelves:
        endpoints = np.union1d(problem.target_at, np.array(problem.couriers, np.int64))
    endpoints = endpoints.astype(int).tolist()
    plans = {e: plan_endpoint(problem, e) for e in endpoints}
    served = memory or {r: storage_of(source, r) for r in np.flatnonzero(problem.source_at >= 0).tolist()}
    expected = {r: storage_of(target, r) for r in range(target.layout.world)}
    got = {r: {k: np.full(v.shape, UNSET) for k, v in s.items()} for r, s in expected.items()}
    times = {r: {k: np.zeros(v.shape, int) for k, v in s.items()} for r, s in expected.items()}
    rank_of = {e: r for r, e in enumerate(problem.target_at.tolist())}

    def write(rank, key, index, data):
        got[rank][key][index] = data
        times[rank][key][index] += 1

    for endpoint, plan in plans.items():
        keeps, mine = source_copies(problem, plan.keeps), rank_of.get(endpoint, 0)
        assert np.isin(keeps.rank, problem.readable(endpoint)).all()
        read = indices(source, keeps, keeps.rank)
        put = indices(target, plan.keeps, np.full(len(keeps), mine))
        for rank, (key, index), (place, into) in zip(keeps.rank.tolist(), read, put, strict=True):
            write(mine, place, into, served[rank][key][index])
    sent = 0
    for phase in sorted({int(p) for plan in plans.values() for p in np.unique(plan.sends.phase)}):
        wire = {}
        space, memory = (target, got) if phase else (source, served)
        for endpoint, plan in plans.items():
            sends = take(plan.sends, plan.sends.phase == phase)
            sends = sends if phase else source_copies(problem, sends)
            has = np.flatnonzero(problem.target_at == endpoint) if phase else problem.readable(endpoint)
            assert np.isin(sends.rank, has).all(), "reads memory that it does not have"
            assert (sends.peer != endpoint).all()
            for i, (key, index) in enumerate(indices(space, sends, sends.rank)):
                wire.setdefault((endpoint, int(sends.peer[i])), []).append(memory[int(sends.rank[i])][key][index])
            sent += sends.total_bytes
        wire = {pair: np.concatenate(parts) for pair, parts in wire.items()}
        assert all((data >= 0).all() for data in wire.values()), "sends what it does not have"
        used = dict.fromkeys(wire, 0)
        for endpoint, plan in plans.items():
            receives = take(plan.receives, plan.receives.phase == phase)
            for i, (key, index) in enumerate(indices(target, receives, receives.rank)):
                pair = (int(receives.peer[i]), endpoint)
                write(int(receives.rank[i]), key, index, wire[pair][used[pair] : used[pair] + index.size])
                used[pair] += index.size
        assert used == {pair: data.size for pair, data in wire.items()}, "a message longer than what is read"
    for rank, storage in expected.items():
        created = plans[int(problem.target_at[rank])].creates
        for key, labels in storage.items():
            name = target.catalogue.tensors[key[0]].name
            real = (labels >= 0) & (key[0] not in created)
            assert (times[rank][key] == real).all(), f"{name}: an element arrives never or twice"
            assert (got[rank][key][real] == labels[real]).all(), f"{name}: an element in the wrong place"
    return sent, plans, got
