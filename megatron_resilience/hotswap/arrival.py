"""The new world's side of a switch: what a rank does before the old world stops, and what it does then.

Before, hidden behind training: borrow the old ranks' memory on this node, learn the old layout, make the plan. Then: check
the seals, move, take over streams and scalars. Nothing of the old world is written to.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any, Protocol

import numpy as np

from megatron_resilience.control.link import AgentLink
from megatron_resilience.deadpool.recovery import RestorePlan
from megatron_resilience.errors import StateError
from megatron_resilience.hotswap.engine import Tally, Transfer
from megatron_resilience.hotswap.fragments import Storage
from megatron_resilience.hotswap.shelf import Shelf, Table
from megatron_resilience.hotswap.streams import EXPERT_STREAM, StreamSources, stream_sources
from megatron_resilience.routing.cost import Cluster
from megatron_resilience.routing.problem import Problem
from megatron_resilience.topology.epoch import Epoch
from megatron_resilience.vps.catalogue import Catalogue
from megatron_resilience.vps.layout import Layout
from megatron_resilience.vps.space import StateSpace

_LAYOUT_KEY = "switch/layout"


class Reshapable(Protocol):
    """The live state of a rank, as ``megatron_adapter.relayout`` presents it."""

    layout: Layout
    state: Any

    def catalogue(self, other: Layout | None = None) -> Catalogue:
        """All logical tensors, between this layout and another."""

    def space(self, layout: Layout, catalogue: Catalogue) -> StateSpace:
        """The state under a layout."""

    def storage(self, space: StateSpace) -> Storage:
        """Live tensors by logical tensor."""

    def table(self) -> Table:
        """Where the logical tensors lie in this rank's segment."""

    def adopt(self, record: dict[str, Any], loop: dict[str, Any], with_host_streams: bool) -> None:
        """Makes the live scalars what another layout's ranks recorded."""


def places(epoch: Epoch, before: Epoch) -> list[int]:
    """Endpoint by rank of the old world: endpoints are numbered node by node, those of the new world's nodes first."""
    nodes = [*epoch.slots, *(n for n in before.slots if n not in epoch.slots)]
    per_node = epoch.nproc_per_node
    return [nodes.index(before.node_of(r)) * per_node + r % per_node for r in range(before.world_size)]


class Arrival:
    """One rank's part in one switch.

    Args:
        link: to the agent.
        epoch: first one of the new world.
        node: this rank's.
        live: its live state.
        store: of the epoch.
    """

    def __init__(self, link: AgentLink, epoch: Epoch, node: str, live: Reshapable, store: Any) -> None:
        assert epoch.before is not None
        self._epoch, self._before = epoch, epoch.before
        self._live, self._store = live, store
        self._rank = live.state.rank
        here = [r for r in range(self._before.world_size) if self._before.node_of(r) == node]
        lent = link.borrow(self._before.world, [(r, r) for r in here]) if here else {}
        self._shelves = {r: Shelf(fds, m["bytes"], m["table_bytes"]) for r, (m, fds) in lent.items()}
        # One rank of each node speaks for it.
        self._speaks = self._rank == min(epoch.ranks_of(node))
        if self._shelves and self._speaks:
            table = next(iter(self._shelves.values())).table
            store.set(_LAYOUT_KEY, json.dumps(asdict(table.layout)))
        self._source = Layout(**json.loads(store.get(_LAYOUT_KEY)))
        catalogue = live.catalogue(self._source)
        self._space = live.space(live.layout, catalogue)
        problem = Problem(
            live.space(self._source, catalogue),
            self._space,
            np.array(places(epoch, self._before), np.int64),
            np.arange(epoch.world_size),
            Cluster(ranks_per_node=epoch.nproc_per_node),
            shelves=True,
        )
        problem.check_covered()
        self._transfer = Transfer(problem, self._rank, list(range(epoch.world_size)))
        self._streams = stream_sources(self._source, live.layout, self._rank)

    @property
    def tally(self) -> Tally:
        """Bytes by what became of them."""
        return self._transfer.tally

    def move(self, plan: RestorePlan, backend: Any) -> None:
        """Everything to its place, and compared with where it came from.

        Args:
            backend: over the new world's ranks, for host tensors.

        Raises:
            StateError: a source is not what its seal says, or something arrived otherwise than it was sent.
            RuntimeError: a connection broke.
        """
        slots = {rank: source.slot for rank, source in enumerate(plan.sources)}
        for rank in self._transfer.read_from():
            header = self._shelves[rank].slot(slots[rank]).verify()
            if header.generation != plan.generation:
                raise StateError(
                    f"rank {rank} sealed generation {header.generation}, the switch is at {plan.generation}"
                )
        self._publish(slots)
        self._transfer.run(
            lambda rank: self._shelves[rank].storage(slots[rank]), self._live.storage(self._space), backend
        )
        self._transfer.verify()
        self._transfer.forget()
        self._adopt()
        for shelf in self._shelves.values():
            shelf.close()
        self._shelves = {}

    def _publish(self, slots: dict[int, int]) -> None:
        """Scalars and streams of old ranks on this node that somebody will ask for."""
        if not self._speaks:
            return
        wanted = {0, self._before.world_size - 1}
        for rank in range(self._epoch.world_size):
            sources = stream_sources(self._source, self._live.layout, rank)
            wanted |= {r for r in (sources.dense, sources.expert) if r is not None}
        for rank in wanted & set(self._shelves):
            shelf = self._shelves[rank]
            streams = {name: data.hex() for name, data in shelf.streams(slots[rank]).items()}
            record = shelf.slot(slots[rank]).read_record()
            self._store.set(f"switch/{rank}", json.dumps({"record": record, "streams": streams}))

    def _adopt(self) -> None:
        first, last = self._said(0), self._said(self._before.world_size - 1)
        sources: StreamSources = self._streams
        self._live.adopt(first["record"], last["record"]["loop"], sources.dense is not None)
        streams: dict[str, bytes] = {}
        if sources.dense is not None:
            streams = {name: bytes.fromhex(text) for name, text in self._said(sources.dense)["streams"].items()}
        streams.pop(f"rng.{EXPERT_STREAM}", None)
        if sources.expert is not None:
            expert = self._said(sources.expert)["streams"]
            streams |= {name: bytes.fromhex(text) for name, text in expert.items() if name == f"rng.{EXPERT_STREAM}"}
        self._live.state.load_streams(streams)

    def _said(self, rank: int) -> dict[str, Any]:
        return json.loads(self._store.get(f"switch/{rank}"))
