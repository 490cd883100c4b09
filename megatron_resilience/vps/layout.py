"""Layouts: sizes of the parallel dimensions, the numbering of ranks, and the flat-buffer settings.

Rank numbering mirrors Megatron's ``parallel_state.RankGenerator``: the first name of ``order`` varies
fastest; the dense grid has no EP, the expert grid no CP. One index counts the combined DP x CP group, CP
fastest.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

ORDER = "tp-cp-ep-dp-pp"
ORDER_PP_BEFORE_DP = "tp-cp-ep-pp-dp"
"""Megatron's --use-tp-pp-dp-mapping."""


@dataclass(frozen=True)
class Grid:
    """Ranks of the dense or the expert parameters: strides of each coordinate.

    ``rank = tp * strides_tp + shard_offset[shard] + ep * stride_ep + pp * stride_pp`` where ``shard``
    counts the group over which the distributed optimizer shards.
    """

    tp: int
    ep: int
    shards: int
    stride_tp: int
    stride_ep: int
    stride_pp: int
    shard_offset: np.ndarray

    def ranks(self, tp: np.ndarray, ep: np.ndarray, shard: np.ndarray, pp: np.ndarray) -> np.ndarray:
        """Ranks at the given coordinates (int64 arrays of one shape)."""
        return tp * self.stride_tp + ep * self.stride_ep + self.shard_offset[shard] + pp * self.stride_pp


@dataclass(frozen=True)
class Layout:
    """One parallel layout, with what Megatron needs to know for its flat buffers.

    Attributes:
        tp, pp, dp, cp, ep: sizes; ``dp`` does not count CP.
        etp: TP of the experts, ``tp`` when None.
        vpp: model chunks per pipeline rank.
        first_stage_layers, last_stage_layers: uneven pipelines; None divides evenly.
        count_embedding, count_loss: --account-for-embedding/loss-in-pipeline-split.
        overlap_grad_reduce, bucket_size, num_buckets, pad_for_busbw: DDP's bucket rules.
        vocabulary_multiple: --make-vocab-size-divisible-by.
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int | None = None
    vpp: int = 1
    order: str = ORDER
    first_stage_layers: int | None = None
    last_stage_layers: int | None = None
    count_embedding: bool = False
    count_loss: bool = False
    overlap_grad_reduce: bool = False
    bucket_size: int | None = None
    num_buckets: int | None = None
    pad_for_busbw: bool = False
    vocabulary_multiple: int = 128

    def __post_init__(self) -> None:
        for name in ("tp", "pp", "dp", "cp", "ep", "vpp"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name.upper()}={getattr(self, name)}: a dimension has at least size 1")
        if sorted(self.order.split("-")) != sorted(ORDER.split("-")):
            raise ValueError(f"order {self.order!r} must name each of {ORDER} once")
        per_shard = self.expert_tp * self.ep * self.pp
        if self.world % per_shard:
            near = [e for e in range(1, self.world + 1) if self.world % (self.expert_tp * e * self.pp) == 0]
            raise ValueError(
                f"EP={self.ep} x ETP={self.expert_tp} x PP={self.pp} does not divide {self.world} ranks; "
                f"EP that do: {near or 'none, lower ETP'}"
            )
        dense_pp, expert_pp = self.dense.stride_pp, self.expert.stride_pp
        if self.pp > 1 and dense_pp != expert_pp:
            raise ValueError(
                f"order {self.order!r} puts pipeline stages {dense_pp} ranks apart for dense and {expert_pp} "
                f"for expert parameters; use an order ending in pp, or EP x ETP = TP x CP"
            )

    @property
    def expert_tp(self) -> int:
        """TP of the expert parameters."""
        return self.tp if self.etp is None else self.etp

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.tp * self.pp * self.dp * self.cp

    @property
    def separate_experts(self) -> bool:
        """Whether experts have buffers of their own (Megatron: ``param.allreduce`` is False)."""
        return self.ep > 1 or self.expert_tp != self.tp

    @cached_property
    def dense(self) -> Grid:
        """Ranks of the dense parameters."""
        return self._grid({"tp": self.tp, "cp": self.cp, "ep": 1, "dp": self.dp, "pp": self.pp})

    @cached_property
    def expert(self) -> Grid:
        """Ranks of the expert parameters."""
        data = self.world // (self.expert_tp * self.ep * self.pp)
        return self._grid({"tp": self.expert_tp, "cp": 1, "ep": self.ep, "dp": data, "pp": self.pp})

    def _grid(self, sizes: dict[str, int]) -> Grid:
        stride, strides = 1, {}
        for name in self.order.split("-"):
            strides[name] = stride
            stride *= sizes[name]
        shard = np.arange(sizes["dp"] * sizes["cp"], dtype=np.int64)
        # Megatron lists a group in the order in which its dimensions vary, so whichever of CP and DP comes
        # first in `order` is the fast one.
        names = self.order.split("-")
        fast, slow = ("cp", "dp") if names.index("cp") < names.index("dp") else ("dp", "cp")
        offset = (shard % sizes[fast]) * strides[fast] + (shard // sizes[fast]) * strides[slow]
        return Grid(sizes["tp"], sizes["ep"], len(shard), strides["tp"], strides["ep"], strides["pp"], offset)

    def coordinates(self, grid: Grid, rank: int) -> tuple[int, int, int, int]:
        """(tp, ep, shard, pp) of ``rank`` in ``grid``.

        Raises:
            ValueError: the layout has no such rank.
        """
        if not 0 <= rank < self.world:
            raise ValueError(f"rank {rank} is not in a layout of {self.world} ranks")
        tp, ep = rank // grid.stride_tp % grid.tp, rank // grid.stride_ep % grid.ep
        pp = rank // grid.stride_pp % self.pp
        rest = rank - tp * grid.stride_tp - ep * grid.stride_ep - pp * grid.stride_pp
        return tp, ep, int(np.flatnonzero(grid.shard_offset == rest)[0]), pp

    def __str__(self) -> str:
        parts = [f"TP{self.tp}", f"PP{self.pp}", f"DP{self.dp}"]
        parts += [f"CP{self.cp}"] * (self.cp > 1) + [f"EP{self.ep}"] * (self.ep > 1)
        parts += [f"ETP{self.etp}"] * (self.etp is not None) + [f"VPP{self.vpp}"] * (self.vpp > 1)
        parts += [f"FIRST{self.first_stage_layers}"] * (self.first_stage_layers is not None)
        parts += [f"LAST{self.last_stage_layers}"] * (self.last_stage_layers is not None)
        return "·".join(parts)


def parse_layout(text: str, base: Layout | None = None) -> Layout:
    """Read ``TP8·PP8·DP8`` (also separated by comma, ``x``, blank or dash; ``TP=8`` too).

    Raises:
        ValueError: a part that is no dimension, naming it and the known ones.
    """
    sizes: dict[str, int] = {}
    for part in re.split(r"[·,\s\-x*]+", text.strip()):
        match = re.fullmatch(r"(tp|pp|dp|cp|ep|etp|vpp|first|last)=?(\d+)", part.lower())
        if match is None:
            raise ValueError(
                f"{part!r} in layout {text!r}: write dimensions as TP8·PP4·DP2 (also CP EP ETP VPP, and FIRST and LAST for "
                "the layers of an uneven pipeline's ends)"
            )
        if match[1] in sizes:
            raise ValueError(f"{match[1].upper()} is named twice in layout {text!r}")
        sizes[match[1]] = int(match[2])
    for end in ("first", "last"):
        if end in sizes:
            sizes[f"{end}_stage_layers"] = sizes.pop(end)
    return replace(base or Layout(), **sizes)  # type: ignore[arg-type]
