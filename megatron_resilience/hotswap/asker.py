"""Rank 0 asks for changes of layout: those of the schedule as they come up, those of the training script at once.

Whoever asks, the request is checked here against the live model before anything is started.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from megatron_resilience.control.link import AgentLink
from megatron_resilience.control.switching import Wish
from megatron_resilience.errors import ConfigurationError
from megatron_resilience.hotswap.arrival import Reshapable
from megatron_resilience.hotswap.schedule import Schedule, bare, due, parse_entry
from megatron_resilience.routing.cost import Cluster
from megatron_resilience.routing.placement import WORTHWHILE_UP_TO, keep_in_place
from megatron_resilience.routing.problem import Problem
from megatron_resilience.vps.layout import Layout
from megatron_resilience.vps.nearest import ImpossibleLayout

_ATTEMPTS = 3
"""Of one change in the schedule; then it is left out, and the log says so."""


class Asker:
    """See the module.

    Args:
        link: to the agent.
        live: the live state.
        schedule: of the job.
        fallbacks: tells, by number of nodes, the layouts to go on in without spares; None: it ends then.
        per_node: ranks on each node.

    Raises:
        ConfigurationError: a layout of the schedule cannot be; names it and those that can.
    """

    def __init__(
        self,
        link: AgentLink,
        live: Reshapable,
        schedule: Schedule = (),
        fallbacks: Callable[[], Mapping[int, Layout]] | None = None,
        per_node: int = 1,
    ) -> None:
        self._link, self._live, self._schedule = link, live, schedule
        self._fallbacks = fallbacks
        self._told: tuple[int, int] | None = None
        self._per_node = per_node
        self._asked: tuple[int, str] | None = None
        self._tried: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._given_up = 0
        self._world = 0
        for at, layout in schedule:
            self._check(layout, f"--hotswap-schedule, iteration {at}", at)

        link.on_check = self.check

    def check(self, message: dict[str, Any]) -> None:
        """Answers whether a layout that somebody asks for is possible (``text``, ``at``), and what it would move."""
        answer: dict[str, Any] = {"ticket": message["ticket"], "error": ""}
        try:
            layout = parse_entry(message["layout"], bare(self._live.layout), f"layout {message['layout']!r}")
            self._check(layout, f"layout {message['layout']!r}", message["at"])
            answer |= {"layout": str(layout), "ranks": layout.world, "order": self._order(layout)}
            answer["text"] = f"{self._live.layout} can become {layout}, {layout.world} ranks; nothing was changed"
        except ConfigurationError as error:
            answer["error"] = str(error)
        self._link.send("layout_checked", **answer)

    def enter(self, generation: int) -> None:
        """On every rank, on entry to the step after ``generation``."""
        if self._live.state.rank == 0 and self._fallbacks is not None:
            # Other batches may be divided by other layouts.
            now = (self._link.training_world, self._live.batch())
            if now != self._told:
                self._told = now
                known = {count: [str(layout), layout.world] for count, layout in self._fallbacks().items()}
                self._link.send("fallbacks", epoch=self._link.training_epoch, layouts=known)
        self.follow_schedule(generation)

    def follow_schedule(self, generation: int) -> None:
        """On every rank, before it says that it can train from ``generation`` on, and on entry to each step.

        So a change at the very next generation comes in time: the order to stop follows right behind the one to begin.
        """
        if self._live.state.rank != 0 or not self._schedule:
            return
        if self._world != self._link.training_world:
            # A process may be kept for the return of its layout: what it has asked for was in another life.
            self._world, self._asked = self._link.training_world, None
            self._tried.clear()
        wanted = due(self._schedule, generation, self._live.layout)
        if wanted is None or self._tried[f"{wanted[1]}"] >= _ATTEMPTS:
            return
        at, layout = wanted
        given_up = self._link.given_up
        with self._lock:
            if self._asked is not None and self._asked[1] == str(layout) and given_up == self._given_up:
                return
            self._asked, self._given_up = (at, str(layout)), given_up
        self._tried[str(layout)] += 1
        self._wish(layout, [], at)

    def request(self, text: str, at: int = 0, nodes: Sequence[str] = ()) -> None:
        """Asks for a layout now.

        Raises:
            ConfigurationError: the layout is not one, or cannot be; names those that can.
        """
        layout = parse_entry(text, bare(self._live.layout), f"layout {text!r}")
        self._check(layout, f"layout {text!r}", at)
        if self._live.state.rank == 0:
            self._wish(layout, list(nodes), at)

    def _wish(self, layout: Layout, nodes: list[str], at: int) -> None:
        order = [] if nodes else self._order(layout)
        wish = Wish(str(layout), layout.world, tuple(nodes), at, tuple(order))
        self._link.send("wish", world=self._link.training_world, wish=asdict(wish))

    def _order(self, layout: Layout) -> list[int]:
        """Places of the nodes that train now in which the least state moves; empty where it cannot be said."""
        per_node, source = self._per_node, self._live.layout
        count = -(-layout.world // per_node)
        if layout.world % per_node or layout.world > WORTHWHILE_UP_TO or count * per_node > source.world:
            return []
        catalogue = self._live.catalogue(layout)
        problem = Problem(
            self._live.space(source, catalogue),
            self._live.space(layout, catalogue),
            np.arange(source.world),
            np.arange(layout.world),
            Cluster(ranks_per_node=per_node),
            shelves=True,
            couriers=tuple(range(layout.world, source.world, per_node)),
        )
        return [int(endpoint) // per_node for endpoint in keep_in_place(problem).target_at[::per_node]]

    def _check(self, layout: Layout, where: str, at: int) -> None:
        try:
            self._live.space(layout, self._live.catalogue())
            self._live.check_batches(layout, at)
        except (ImpossibleLayout, ConfigurationError) as error:
            raise ConfigurationError(f"{where}: {error}") from error
