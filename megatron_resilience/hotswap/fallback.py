"""Layouts to go on in when nodes are lost and no spare is left. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from megatron_resilience.vps.layout import Layout


def fallbacks(
    live: Layout,
    nodes: int,
    per_node: int,
    fewest: int,
    possible: Callable[[Layout], bool],
    wanted: Sequence[Layout] = (),
) -> dict[int, Layout]:
    """By number of nodes the layout to take; none where nothing is possible.

    The first of ``wanted`` that fits, else: TP kept if that is possible, then PP, then EP, and of what is left the most ranks.

    Args:
        live: the present layout, which is the answer for all ``nodes``.
        nodes: that train now.
        per_node: ranks on each.
        fewest: nodes that copies of the state need.
        possible: whether the model and the batch allow a layout.
    """
    result = {nodes: live}
    for count in range(fewest, nodes):
        ranks = count * per_node
        own = (layout for layout in wanted if layout.world <= ranks)
        found = next((layout for layout in [*own, *_smaller(live, ranks)] if possible(layout)), None)
        if found is not None:
            result[count] = found
    return result


def _smaller(live: Layout, ranks: int) -> Iterator[Layout]:
    for tp in _falling(live.tp):
        for pp in _falling(live.pp):
            for ep in _falling(live.ep):
                even: dict[str, Any] = {"first_stage_layers": None, "last_stage_layers": None, "vpp": 1}
                changes = {"tp": tp, "pp": pp, "ep": ep, **({} if pp == live.pp else even)}
                for dp in range(ranks // (tp * pp * live.cp), 0, -1):
                    try:
                        yield replace(live, dp=dp, **changes)
                    except ValueError:
                        continue


def _falling(size: int) -> list[int]:
    return [d for d in range(size, 0, -1) if size % d == 0]
