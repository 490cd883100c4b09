"""Who owns what, worked out slowly: rank by rank, tensor by tensor, element by element, with the scalar algebra.

Written from the rules (megatron-facts: the distributed optimizer's layout; the docstrings of `vps.tensors`), not from
the vectorised code, of which it shares only `flat_buffer`, `bucket_size` and `stage_of_layers`; these are held against
a live Megatron.
"""

import numpy as np

from megatron_resilience.vps.boxes import boxes_of_range
from megatron_resilience.vps.flat import bucket_size, flat_buffer
from megatron_resilience.vps.stages import stage_of_layers
from megatron_resilience.vps.tensors import Kind, Place


def coordinates(layout, rank, expert):
    """(tp, ep, shard, pp) of a rank by counting through the order, slowest last."""
    whole = layout.world // layout.pp
    if expert:
        sizes = {"tp": layout.expert_tp, "cp": 1, "ep": layout.ep, "pp": layout.pp}
        sizes["dp"] = whole // (layout.expert_tp * layout.ep)
    else:
        sizes = {"tp": layout.tp, "cp": layout.cp, "ep": 1, "pp": layout.pp, "dp": layout.dp}
    at = {}
    for name in layout.order.split("-"):
        at[name] = rank % sizes[name]
        rank //= sizes[name]
    return at["tp"], at["ep"], at["dp"] * sizes["cp"] + at["cp"], at["pp"], sizes["dp"] * sizes["cp"]


def local_rows(tensor, layout, tp):
    """Global index along the cut axis of each local row, -1 for padding."""
    cut = tensor.cut
    size = layout.expert_tp if tensor.expert >= 0 else layout.tp
    if cut is None:
        return np.arange(tensor.canonical_shape[1])
    rows, begin = [], 0
    for block in cut.blocks:
        padded = block
        if cut.padded:
            padded = -(-block // (layout.vocabulary_multiple * size)) * layout.vocabulary_multiple * size
        part = np.arange(tp * padded // size, (tp + 1) * padded // size)
        rows.append(np.where(part < block, begin + part, -1))
        begin += block
    return np.concatenate(rows)


def stages_of(tensor, catalogue, layout):
    """(pp, chunk, copy) of each place of a tensor."""
    last = (layout.pp - 1, layout.vpp - 1)
    if tensor.place is Place.LAYER:
        return [(*stage_of_layers(catalogue.layers, layout)[tensor.layer], 0)]
    if tensor.place is Place.LAST:
        return [(*last, 0)]
    two = tensor.place in (Place.TIED, Place.MTP_EMBEDDING) and layout.pp > 1
    return [(0, 0, 0)] + [(*last, 1)] * two


def held_by(space, rank):
    """{(tensor name, copy): bool array in canonical shape} of what ``rank`` owns, and its steps."""
    catalogue, layout = space.catalogue, space.layout
    out = {}

    def own(tensor, copy, rows, low, high):
        labels = np.full((tensor.canonical_shape[0], len(rows), tensor.canonical_shape[2]), False)
        for box in boxes_of_range(low, high, labels.shape):
            labels[box.slices()] = True
        mask = np.zeros(tensor.canonical_shape, bool)
        mask[:, rows[rows >= 0]] = labels[:, rows >= 0]
        if mask.any():
            out[tensor.name, copy] = mask

    local, flat = [], {}
    for tensor in catalogue.tensors:
        expert = tensor.expert >= 0 or (tensor.coordinate is not None and tensor.coordinate.ep >= 0)
        tp, ep, _, pp, _ = coordinates(layout, rank, expert)
        if tensor.coordinate is not None:
            at = tensor.coordinate
            if at.tp in (-1, tp) and at.ep in (-1, ep) and at.pp in (-1, pp):
                out[tensor.name, 0] = np.ones(tensor.canonical_shape, bool)
            continue
        if tensor.expert >= 0 and tensor.expert // (catalogue.experts // layout.ep) != ep:
            continue
        for stage, chunk, copy in stages_of(tensor, catalogue, layout):
            if stage == pp:
                local.append((tensor, copy, chunk, local_rows(tensor, layout, tp)))
    sharded = bool(space.flat.any())
    for tensor, copy, _, rows in local:
        if tensor.kind is Kind.STEP and sharded:
            continue
        if tensor.kind is not Kind.PARAMETER or not sharded:
            size = tensor.canonical_shape[0] * len(rows) * tensor.canonical_shape[2]
            own(tensor, copy, rows, 0, size)
    if not sharded:
        return out
    parameters = sum(
        t.canonical_shape[0] * len(rows) * t.canonical_shape[2]
        for t, _, _, rows in local
        if t.kind in (Kind.PARAMETER, Kind.FROZEN)
    )
    has = set()
    for tensor, copy, chunk, rows in sorted(local, key=lambda entry: _registered(catalogue, entry)):
        if tensor.kind is Kind.PARAMETER:
            separate = tensor.expert >= 0 and (layout.ep > 1 or layout.expert_tp != layout.tp)
            flat.setdefault((chunk, separate, tensor.dtype), []).append((tensor, copy, rows))
    for (chunk, separate, _), members in flat.items():
        _, _, shard, pp, shards = coordinates(layout, rank, separate)
        sizes = [t.canonical_shape[0] * len(rows) * t.canonical_shape[2] for t, _, rows in members]
        own_bucket = [t.place in (Place.TIED, Place.MTP_EMBEDDING) and layout.pp > 1 for t, _, _ in members]
        limit = bucket_size(layout, pp, chunk, parameters)
        buffer = flat_buffer(sizes, own_bucket, shards, limit, layout.pad_for_busbw)
        for i, (tensor, copy, rows) in enumerate(members):
            first, last = buffer.buckets[buffer.bucket[i]].tolist()
            per = (last - first) // shards
            low = max(0, first + shard * per - int(buffer.start[i]))
            high = min(sizes[i], first + (shard + 1) * per - int(buffer.start[i]))
            if low < high:
                own(tensor, copy, rows, low, high)
                has.add((tensor.name, copy))
    for tensor, copy, _, _ in local:
        if tensor.kind is Kind.STEP and (tensor.of, copy) in has:
            out[tensor.name, copy] = np.ones(tensor.canonical_shape, bool)
    return out


def _registered(catalogue, entry):
    """The order of named_parameters() within a chunk: the catalogue's, a second output weight last, a second
    embedding first."""
    tensor, copy, _, _ = entry
    group = 0
    if copy:
        group = 1 if tensor.place is Place.TIED else -1
    return group, catalogue.number_of[tensor.name]
