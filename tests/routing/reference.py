"""A global plan by brute force: every source box against every target box, with everybody's demand in one place."""

import itertools

import numpy as np

from megatron_resilience.vps.boxes import Box, intersect


def global_plan(problem):
    """(source endpoint, destination endpoint, tensor, copy, box) of every fragment; what stays has one endpoint twice.

    For clusters of one node and a grain that cuts no fragment: what is left of the rule is who sends what.
    """
    source, target = problem.source, problem.target
    regions = {}
    for old in range(source.layout.world):
        for tensor, old_copy, held, shard in _boxes(source, old):
            for new in range(target.layout.world):
                for number, copy, wanted, other in _boxes(target, new):
                    if number != tensor or problem.source_copy[copy, tensor] != old_copy:
                        continue
                    common = intersect(held, wanted)
                    if common is not None:
                        region = regions.setdefault((shard, other), {"holders": set(), "owners": set(), "boxes": set()})
                        region["holders"].add(int(problem.source_at[old]))
                        region["owners"].add(new)
                        region["boxes"].add((tensor, copy, common.start, common.stop))
    out = set()
    width = source.catalogue.columns.bytes_per_element
    for shard in sorted({s for s, _ in regions}):
        line = []
        candidates = []
        for (_, _), region in sorted((k, r) for k, r in regions.items() if k[0] == shard):
            candidates = sorted(region["holders"] - {-1})
            boxes = sorted(region["boxes"], key=lambda b: (b[0], b[1], b[2]))
            for owner in sorted(region["owners"]):
                endpoint = int(problem.target_at[owner])
                if endpoint in candidates:
                    out |= {(endpoint, endpoint, *box) for box in boxes}
                else:
                    line += [(endpoint, box, Box(*box[2:]).numel * int(width[box[0]])) for box in boxes]
        if not line:
            continue
        turn = (shard[0] + shard[1]) % len(candidates)
        candidates = list(np.roll(candidates, turn))
        total = sum(size for _, _, size in line)
        ends = itertools.accumulate(size for _, _, size in line)
        for (endpoint, box, size), end in zip(line, ends, strict=True):
            middle = end - size + size // 2
            number = min(middle * len(candidates) // total, len(candidates) - 1) if len(candidates) > 1 else 0
            out.add((int(candidates[number]), endpoint, *box))
    return out


def _boxes(space, rank):
    boxes = space.boxes_of(rank)
    for i in range(len(boxes)):
        start = tuple(int(getattr(boxes, d + "0")[i]) for d in "oci")
        stop = tuple(int(getattr(boxes, d + "1")[i]) for d in "oci")
        tensor = int(boxes.tensor[i])
        shard = (int(boxes.base[i]), int(space.tensor_class[tensor]), int(boxes.span[i]))
        yield tensor, int(boxes.copy[i]), Box(start, stop), shard
