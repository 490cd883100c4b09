"""The state of one model under one layout: F_P of DynaTrain, from ranks to boxes and from boxes to ranks.

Both directions are closed forms vectorised over boxes: no loop over ranks, none over tensors x ranks.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

import numpy as np

from megatron_resilience.vps.catalogue import Catalogue
from megatron_resilience.vps.instances import Instances, build_instances
from megatron_resilience.vps.layout import Grid, Layout
from megatron_resilience.vps.pieces import Boxes, concatenate, ranges_to_local_boxes, repeat_ranges

FLAT_CLASS, ONE_TP_CLASS, EXPERT_CLASS, ALL_STAGES_CLASS, STEP_CLASS = 1, 2, 4, 8, 16
"""Bits of `StateSpace.tensor_class`: sharded by the optimizer; on one TP rank each (cut, or a stream of its own); in
the expert grid; on all stages; a STEP."""

REMEMBERED_RANKS = 64
"""Ranks of which `StateSpace.boxes_of` remembers the boxes."""


class StateSpace:
    """A catalogue under a layout.

    Args:
        catalogue: the model.
        layout: the layout.
        sharded_optimizer: with the distributed optimizer (the default) trainable state lies in flat ranges
            sharded over DP x CP; without it every data-parallel rank has all of it.

    Raises:
        ValueError: the layout cannot carry the model; names the dimension and the nearest sizes that do.
    """

    def __init__(self, catalogue: Catalogue, layout: Layout, sharded_optimizer: bool = True) -> None:
        self.catalogue, self.layout = catalogue, layout
        self.sharded_optimizer = sharded_optimizer
        columns = catalogue.columns
        self.flat = columns.is_flat & sharded_optimizer
        # Classes of tensors that share the shape of their replica sets, see `replicas`.
        self.is_expert = (columns.expert >= 0) | (columns.coordinate[:, 1] >= 0)
        self.is_step = columns.is_step & sharded_optimizer
        one_tp = columns.is_cut | (columns.coordinate[:, 0] >= 0)
        self.on_all_stages = columns.on_ranks & (columns.coordinate[:, 2] < 0)
        flags = (self.flat, one_tp, self.is_expert, self.on_all_stages, self.is_step)
        self.tensor_class = sum((flag * (1 << bit) for bit, flag in enumerate(flags)), np.zeros(len(one_tp), np.int64))
        self._lately: dict[int, Boxes] = {}
        self._cut_tables()

    def _cut_tables(self) -> None:
        columns, layout = self.catalogue.columns, self.layout
        width = max((len(cut.blocks) for cut in columns.cuts), default=1)
        count = len(columns.cut_number)
        self.blocks = np.ones(count, np.int64)
        self.tp = np.ones(count, np.int64)
        self.global_start, self.global_end, self.local_size, self.local_start = (
            np.zeros((count, width), np.int64) for _ in range(4)
        )
        self.global_end[:, 0] = self.local_size[:, 0] = columns.canonical[:, 1]
        # Thousands of tensors share a few cuts.
        kinds, first = np.unique(columns.cut_number * 2 + (columns.expert >= 0), return_index=True)
        for kind, sample in sorted(zip(kinds.tolist(), first.tolist(), strict=True), key=lambda pair: pair[1]):
            if kind < 0:
                continue
            cut, expert = columns.cuts[kind // 2], bool(kind % 2)
            tp, name = (layout.expert_tp, "ETP") if expert else (layout.tp, "TP")
            try:
                sizes = [cut.local(b, tp, layout.vocabulary_multiple, name) for b in range(len(cut.blocks))]
            except ValueError as error:
                raise ValueError(f"{self.catalogue.tensors[sample].name}: {error}") from None
            rows = np.flatnonzero((columns.cut_number == kind // 2) & ((columns.expert >= 0) == expert))
            self.blocks[rows], self.tp[rows] = len(sizes), tp
            ends, local_ends = np.cumsum(cut.blocks), np.cumsum(sizes)
            here = slice(len(sizes))
            self.global_start[rows, here], self.global_end[rows, here] = ends - cut.blocks, ends
            self.local_start[rows, here], self.local_size[rows, here] = local_ends - sizes, sizes
        self.local_cut = self.local_size.sum(axis=1)
        canonical = self.catalogue.columns.canonical
        self.outer, self.inner = canonical[:, 0], canonical[:, 2]

    @cached_property
    def instances(self) -> Instances:
        """Where the layout keeps every tensor."""
        return build_instances(self.catalogue, self.layout, self.outer * self.local_cut * self.inner)

    def check(self) -> StateSpace:
        """This space, once its tables are built: whether the layout can carry the model is known then.

        Raises:
            ValueError: it cannot; see the class.
        """
        _ = self.instances
        return self

    def replicas(self, base: int, number: int, span: int = 1) -> np.ndarray:
        """Ranks (sorted) that hold the same boxes of tensor class ``number`` as rank ``base``, it included.

        Over TP where nothing cuts the tensor, over DP x CP where the optimizer does not shard it, over all stages
        where it is on all; a STEP over the ``span`` shards from that of ``base`` on.
        """
        if number & STEP_CLASS:
            grid = self.layout.expert if number & EXPERT_CLASS else self.layout.dense
            first = self.layout.coordinates(grid, base)[2]
            shard = grid.shard_offset[first : first + span] - grid.shard_offset[first]
            tp = np.arange(grid.tp) * grid.stride_tp
            return np.sort(base + (tp[:, None] + shard[None, :]).ravel())
        return base + self._offsets[number]

    @cached_property
    def _offsets(self) -> tuple[np.ndarray, ...]:
        """Per tensor class but STEP, rank offsets from a shard's base to all its replicas (sorted, first is 0)."""
        offsets = []
        for number in range(STEP_CLASS):
            grid = self.layout.expert if number & EXPERT_CLASS else self.layout.dense
            tp = np.arange(1 if number & ONE_TP_CLASS else grid.tp) * grid.stride_tp
            shard = np.zeros(1, np.int64) if number & FLAT_CLASS else grid.shard_offset
            stage = np.arange(self.layout.pp if number & ALL_STAGES_CLASS else 1) * grid.stride_pp
            offsets.append(np.sort((tp[:, None, None] + shard[None, :, None] + stage).ravel()))
        return tuple(offsets)

    def boxes_of(self, rank: int) -> Boxes:
        """Everything that ``rank`` owns, padding excluded; of the ranks asked for lately it is remembered.

        Raises:
            ValueError: the layout has no such rank.
        """
        found = self._lately.pop(rank, None)
        if found is None:
            found = self._boxes_of(rank)
            if len(self._lately) == REMEMBERED_RANKS:
                self._lately.pop(next(iter(self._lately)))
        self._lately[rank] = found
        return found

    def forget(self) -> None:
        """Forget the boxes of the ranks asked for lately."""
        self._lately.clear()

    def _boxes_of(self, rank: int) -> Boxes:
        parts = []
        inst, layout = self.instances, self.layout
        for expert, grid in ((False, layout.dense), (True, layout.expert)):
            tp, ep, shard, pp = layout.coordinates(grid, rank)
            here = ((inst.pp == pp) | self.on_all_stages[inst.tensor]) & (self.is_expert[inst.tensor] == expert)
            here &= (inst.tp < 0) | (inst.tp == tp)
            if expert:
                here &= inst.ep == ep
            rows = np.flatnonzero(here)
            parts.append(self._boxes(rows, np.full(len(rows), tp), np.full(len(rows), shard), grid)[1])
        return concatenate(parts)

    def owned_range(self, rows: np.ndarray, shard: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Range [low, high) of each instance's local tensor that data-parallel ``shard`` owns (elements)."""
        inst = self.instances
        absent = self.is_step[inst.tensor[rows]] & (
            (shard < inst.first_shard[rows]) | (shard >= inst.first_shard[rows] + inst.shards[rows])
        )
        flat = self.flat[inst.tensor[rows]]
        numel = inst.numel[rows]
        begin = inst.bucket_start[rows] + shard * inst.shard[rows] - inst.start[rows]
        low = np.where(flat, np.clip(begin, 0, numel), 0)
        high = np.where(flat, np.clip(begin + inst.shard[rows], 0, numel), np.where(absent, 0, numel))
        return low, high

    def _boxes(self, rows: np.ndarray, tp: np.ndarray, shard: np.ndarray, grid: Grid) -> tuple[np.ndarray, Boxes]:
        """Boxes of (instance row, tp, shard) triples of one grid: (index of the triple, boxes)."""
        inst = self.instances
        tensor = inst.tensor[rows]
        low, high = self.owned_range(rows, shard)
        at, o0, o1, c0, c1, i0, i1 = ranges_to_local_boxes(low, high, self.local_cut[tensor], self.inner[tensor])
        # A box in local rows may span several blocks of the cut axis: one box per block.
        expand, block = repeat_ranges(np.zeros(len(at), np.int64), self.blocks[tensor[at]])
        at, o0, o1, c0, c1, i0, i1 = (x[expand] for x in (at, o0, o1, c0, c1, i0, i1))
        t = tensor[at]
        cut = self.catalogue.columns.is_cut[t]
        coordinate = np.where(cut, tp[at], np.maximum(inst.tp[rows[at]], 0))
        step = self.is_step[t]
        size, local = self.local_size[t, block], self.local_start[t, block]
        shift = self.global_start[t, block] + coordinate * size - local
        shift = np.where(cut, shift, self.global_start[t, block] - local)
        c0 = np.maximum(c0, local) + shift
        c1 = np.minimum(np.minimum(c1, local + size) + shift, self.global_end[t, block])
        of_shard = np.where(self.flat[t], shard[at], np.where(step, inst.first_shard[rows[at]], 0))
        base = grid.ranks(coordinate, inst.ep[rows[at]], of_shard, inst.pp[rows[at]])
        span = np.where(step, inst.shards[rows[at]], 1)
        boxes = Boxes(t, inst.copy[rows[at]], block, o0, o1, c0, c1, i0, i1, base, span)
        keep = np.flatnonzero(c1 > c0)
        return at[keep], boxes.take(keep)

    def owners_of(self, boxes: Boxes, copy: np.ndarray) -> tuple[np.ndarray, Boxes]:
        """All shards of this layout that share elements with ``boxes``.

        Args:
            boxes: boxes of the same catalogue, under any layout.
            copy: int64 (n,), which copy of a tied tensor to look at; -1 where that copy does not exist
            gives none.

        Returns:
            (row, parts): ``parts`` are the common boxes with ``base`` in this layout, ``row`` the box of
            ``boxes`` each came from.
        """
        inst = self.instances
        instance = np.where(copy == 1, inst.second[boxes.tensor], inst.first[boxes.tensor])
        some = np.flatnonzero((copy >= 0) & (instance >= 0))
        found = []
        for expert, grid in ((False, self.layout.dense), (True, self.layout.expert)):
            rows = some[self.is_expert[boxes.tensor[some]] == expert]
            found.append(self._owners(boxes.take(rows), rows, instance[rows], grid))
        return np.concatenate([f[0] for f in found]), concatenate([f[1] for f in found])

    def _owners(self, boxes: Boxes, origin: np.ndarray, instance: np.ndarray, grid: Grid) -> tuple[np.ndarray, Boxes]:
        inst = self.instances
        # Boxes never span blocks of the cut axis, and blocks do not depend on the layout.
        row, block, c0, c1, t = np.arange(len(boxes)), boxes.block, boxes.c0, boxes.c1, boxes.tensor
        begin, size = self.global_start[t, block], self.local_size[t, block]
        cut = self.catalogue.columns.is_cut[t]
        first = np.where(cut, (c0 - begin) // size, 0)
        last = np.where(cut, (c1 - 1 - begin) // size, 0)
        expand, tp = repeat_ranges(first, last - first + 1)
        row, block, c0, c1, t = (x[expand] for x in (row, block, c0, c1, t))
        # The slice of the box on each TP rank, in that rank's local rows.
        shift = self.local_start[t, block] - begin[expand] - tp * size[expand]
        k0 = np.maximum(c0 + shift, self.local_start[t, block])
        k1 = np.minimum(c1 + shift, self.local_start[t, block] + size[expand])
        cut_size, inner = self.local_cut[t], self.inner[t]
        lowest = (boxes.o0[row] * cut_size + k0) * inner + boxes.i0[row]
        highest = ((boxes.o1[row] - 1) * cut_size + k1 - 1) * inner + boxes.i1[row] - 1
        place = instance[row]
        flat = self.flat[t]
        offset = inst.start[place] - inst.bucket_start[place]
        per_shard = np.maximum(inst.shard[place], 1)
        from_shard = np.where(flat, (offset + lowest) // per_shard, 0)
        to_shard = np.where(flat, (offset + highest) // per_shard, 0)
        from_shard = np.where(self.is_step[t], inst.first_shard[place], from_shard)
        to_shard = np.where(self.is_step[t], from_shard, to_shard)
        expand, shard = repeat_ranges(from_shard, to_shard - from_shard + 1)
        at, owned = self._boxes(place[expand], tp[expand], shard, grid)
        row = row[expand][at]
        block = block[expand][at]
        return _clip(owned, boxes, row, owned.block == block, origin)


def _clip(
    owned: Boxes, wanted: Boxes, row: np.ndarray, same: np.ndarray, origin: np.ndarray
) -> tuple[np.ndarray, Boxes]:
    bounds = {}
    for low, high in (("o0", "o1"), ("c0", "c1"), ("i0", "i1")):
        bounds[low] = np.maximum(getattr(owned, low), getattr(wanted, low)[row])
        bounds[high] = np.minimum(getattr(owned, high), getattr(wanted, high)[row])
        same = same & (bounds[high] > bounds[low])
    clipped = replace(owned, **bounds)
    keep = np.flatnonzero(same)
    return origin[row[keep]], clipped.take(keep)
