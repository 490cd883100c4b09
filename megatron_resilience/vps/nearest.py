"""When a layout cannot carry a model: the layouts of as many ranks nearest to it that can."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from megatron_resilience.vps.catalogue import Catalogue
from megatron_resilience.vps.layout import Layout
from megatron_resilience.vps.space import StateSpace

_TRIED = 200
"""Layouts tried, nearest first, before the search ends."""


class ImpossibleLayout(ValueError):
    """The model cannot be laid out so; the message names the dimension and the nearest layouts that can.

    Attributes:
        nearest: those layouts, nearest first; empty when none of as many ranks was found.
    """

    def __init__(self, reason: str, layout: Layout, nearest: list[Layout]) -> None:
        self.nearest = nearest
        names = ", ".join(map(str, nearest)) or "none found; change the number of ranks"
        super().__init__(f"{layout}: {reason}; nearest layouts of {layout.world} ranks that can: {names}")


def space_of(
    catalogue: Catalogue, layout: Layout, sharded_optimizer: bool = True, batch: int | None = None
) -> StateSpace:
    """`StateSpace`, checked.

    Args:
        batch: global batch over micro batch, which DP must divide; None: not checked.

    Raises:
        ImpossibleLayout: it cannot carry the model.
    """
    try:
        return _checked(catalogue, layout, sharded_optimizer, batch)
    except ValueError as error:
        raise ImpossibleLayout(str(error), layout, nearest_layouts(catalogue, layout, batch)) from None


def _checked(catalogue: Catalogue, layout: Layout, sharded_optimizer: bool, batch: int | None) -> StateSpace:
    if batch is not None and batch % layout.dp:
        raise ValueError(f"DP={layout.dp} does not divide the {batch} microbatches of a global batch")
    return StateSpace(catalogue, layout, sharded_optimizer).check()


def nearest_layouts(catalogue: Catalogue, layout: Layout, batch: int | None = None, count: int = 3) -> list[Layout]:
    """At most ``count`` layouts with the ranks and the CP of ``layout`` that can carry the model, nearest first: those
    that multiply or divide the fewest dimensions by the least."""
    found: list[Layout] = []
    for number, candidate in enumerate(sorted(_around(layout), key=lambda c: (_distance(layout, c), str(c)))):
        if number == _TRIED or len(found) == count:
            break
        try:
            _checked(catalogue, candidate, True, batch)
        except ValueError:
            continue
        found.append(candidate)
    return found


def _around(layout: Layout) -> Iterator[Layout]:
    ranks = layout.world // layout.cp
    even: dict[str, Any] = {
        "first_stage_layers": None,
        "last_stage_layers": None,
        "count_embedding": False,
        "count_loss": False,
    }
    for tp in _divisors(ranks):
        for pp in _divisors(ranks // tp):
            stage = _divisors(ranks * layout.cp // pp)
            for ep in [1] if layout.ep == 1 else stage:
                for etp in [None] if layout.etp is None else stage:
                    for vpp in {1, layout.vpp} if pp > 1 else {1}:
                        changes: dict[str, Any] = {"tp": tp, "pp": pp, "dp": ranks // tp // pp}
                        changes |= {"ep": ep, "etp": etp, "vpp": vpp}
                        try:
                            yield replace(layout, **changes, **({} if pp == layout.pp else even))
                        except ValueError:
                            continue


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def _distance(a: Layout, b: Layout) -> float:
    names = ("tp", "pp", "dp", "ep", "expert_tp", "vpp")
    return sum(abs(math.log2(getattr(a, n) / getattr(b, n))) for n in names)
