"""A simulated exchange in one process: every endpoint's plan, its own memory, messages as bytes on a wire.

Storage is what ranks really have: one-dimensional shards, read and written through strided views. Every element is
labelled by its logical index in the whole model, so an element in a wrong place shows.
"""

import numpy as np

from megatron_resilience.routing.plan import plan_endpoint
from megatron_resilience.vps.local import local_labels, local_views

UNSET = -2


def bases(catalogue):
    """Label of the first element of each tensor."""
    sizes = [int(np.prod(t.canonical_shape)) for t in catalogue.tensors]
    return np.concatenate([[0], np.cumsum(sizes)])


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


def views(space, rank, moves, rows, storage):
    """Strided numpy views of ``moves`` rows in ``storage``; ``copy`` says in which copy's."""
    boxes = moves.boxes.take(rows)
    at = local_views(space, rank, boxes)
    for i in range(len(rows)):
        array = storage[int(boxes.tensor[i]), int(boxes.copy[i])]
        yield np.lib.stride_tricks.as_strided(
            array[at.offset[i] :], at.sizes[i].tolist(), (at.strides[i] * array.itemsize).tolist()
        )


def source_copies(problem, moves):
    """The same moves with the copy of the source that feeds them."""
    from dataclasses import replace

    copy = problem.source_copy[moves.boxes.copy, moves.boxes.tensor]
    return replace(moves, boxes=replace(moves.boxes, copy=copy))


def exchange(problem):
    """Run the plans of all endpoints. Asserts that every element is written once, and is the right one.

    Returns:
        (bytes on the wire, plans by endpoint)
    """
    source, target = problem.source, problem.target
    endpoints = np.unique(np.concatenate([problem.source_at[problem.source_at >= 0], problem.target_at])).tolist()
    plans = {e: plan_endpoint(problem, e) for e in endpoints}
    served = {r: storage_of(source, r) for r in np.flatnonzero(problem.source_at >= 0).tolist()}
    expected = {r: storage_of(target, r) for r in range(target.layout.world)}
    got = {r: {k: np.full(v.shape, UNSET) for k, v in s.items()} for r, s in expected.items()}
    times = {r: {k: np.zeros(v.shape, int) for k, v in s.items()} for r, s in expected.items()}
    rank_of = {e: r for r, e in enumerate(problem.target_at.tolist())}

    def write(moves, rows, data):
        """Write consecutive parts of ``data``; returns how many elements were used."""
        used = 0
        for i in rows:
            rank = int(moves.rank[i])
            (into,) = views(target, rank, moves, np.array([i]), got[rank])
            into[...] = data[used : used + into.size].reshape(into.shape)
            (count,) = views(target, rank, moves, np.array([i]), times[rank])
            count += 1
            used += into.size
        return used

    for endpoint, plan in plans.items():
        keeps = source_copies(problem, plan.keeps)
        for i in range(len(plan.keeps)):
            assert problem.source_at[keeps.rank[i]] == endpoint
            (data,) = views(source, int(keeps.rank[i]), keeps, np.array([i]), served[int(keeps.rank[i])])
            into = np.array([i])
            (place,) = views(target, rank_of[endpoint], plan.keeps, into, got[rank_of[endpoint]])
            place[...] = data
            (count,) = views(target, rank_of[endpoint], plan.keeps, into, times[rank_of[endpoint]])
            count += 1
    sent = 0
    for phase in sorted({int(p) for plan in plans.values() for p in np.unique(plan.sends.phase)}):
        wire = {}
        for endpoint, plan in plans.items():
            sends = source_copies(problem, plan.sends) if phase == 0 else plan.sends
            for i in np.flatnonzero(plan.sends.phase == phase).tolist():
                rank, peer = int(sends.rank[i]), int(sends.peer[i])
                assert peer != endpoint
                space, memory, at = (
                    (source, served, problem.source_at) if phase == 0 else (target, got, problem.target_at)
                )
                assert at[rank] == endpoint, "reads memory that it does not have"
                (data,) = views(space, rank, sends, np.array([i]), memory[rank])
                assert (data >= 0).all(), "sends what it does not have"
                wire.setdefault((endpoint, peer), []).append(data.ravel().copy())
                sent += int(sends.bytes[i])
        wire = {pair: np.concatenate(parts) for pair, parts in wire.items()}
        for endpoint, plan in plans.items():
            for peer in np.unique(plan.receives.peer[plan.receives.phase == phase]).tolist():
                rows = np.flatnonzero((plan.receives.phase == phase) & (plan.receives.peer == peer)).tolist()
                data = wire.pop((peer, endpoint))
                assert write(plan.receives, rows, data) == data.size, "message longer than what is read"
        assert not wire, f"messages that nobody receives: {list(wire)[:3]}"
    for rank, storage in expected.items():
        created = plans[int(problem.target_at[rank])].creates
        for key, labels in storage.items():
            name = target.catalogue.tensors[key[0]].name
            real = (labels >= 0) & (key[0] not in created)
            assert (times[rank][key] == real).all(), f"{name}: an element arrives never or twice"
            assert (got[rank][key][real] == labels[real]).all(), f"{name}: an element in the wrong place"
    return sent, plans
