"""The new world's side of a switch: what an endpoint does before the old world stops, and what it does then.

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
from megatron_resilience.hotswap.endpoints import couriers, peers, places
from megatron_resilience.hotswap.engine import Tally, Transfer
from megatron_resilience.hotswap.fragments import Storage
from megatron_resilience.hotswap.shelf import Shelf, Table
from megatron_resilience.hotswap.streams import EXPERT_STREAM, stream_sources
from megatron_resilience.routing.cost import Cluster
from megatron_resilience.routing.problem import Problem
from megatron_resilience.topology.epoch import Epoch
from megatron_resilience.vps.catalogue import Catalogue, catalogue_from_json
from megatron_resilience.vps.layout import Layout
from megatron_resilience.vps.space import StateSpace

_LAYOUT, _MODEL = "switch/layout", "switch/model"


class Reshapable(Protocol):
    """The live state of a rank, as ``megatron_adapter.relayout`` presents it."""

    layout: Layout
    state: Any

    def catalogue(self, other: Layout | None = None) -> Catalogue:
        """All logical tensors, between this layout and another."""

    def space(self, layout: Layout, catalogue: Catalogue) -> StateSpace:
        """The state under a layout."""

    def check_batches(self, layout: Layout, at: int) -> None:
        """Whether a layout divides every batch from generation ``at`` on (0: from now on).

        Raises:
            ConfigurationError: names the first that it does not.
        """

    def batch(self) -> int:
        """Samples of the present global batch; 0 where it is always the same."""

    def clear(self) -> None:
        """Zeroes what will be overwritten; rows of the vocabulary that are in the new layout alone stay so."""

    def begin_anew(self) -> None:
        """Random streams as in a process that has just started."""

    def vacate(self) -> None:
        """Frees the device memory of parameters, gradients, masters and moments; what is in it is lost."""

    def reoccupy(self) -> None:
        """Takes that memory again, zeroed.

        Raises:
            RuntimeError: somebody else has it, and keeps it.
        """

    def storage(self, space: StateSpace) -> Storage:
        """Live tensors by logical tensor."""

    def table(self) -> Table:
        """Where the logical tensors lie in this rank's segment."""

    def adopt(self, record: dict[str, Any], loop: dict[str, Any], with_host_streams: bool) -> None:
        """Makes the live scalars what another layout's ranks recorded."""


class Shelves:
    """The old ranks' memory on this node, read by whoever is to have it.

    Args:
        link: to the agent.
        epoch: first one of the new world.
        node: this process's.
        store: of the epoch.
        speaks: whether this process tells the others what only this node knows.
    """

    def __init__(self, link: AgentLink, epoch: Epoch, node: str, store: Any, speaks: bool) -> None:
        before = epoch.before
        assert before is not None
        self._store, self._speaks, self._epoch, self._last = store, speaks, epoch, before.world_size - 1
        here = [r for r in range(before.world_size) if epoch.giver_of(r) == node]
        holders = epoch.sources or range(before.world_size)
        lent = link.borrow(before.world, [(r, holders[r]) for r in here]) if here else {}
        self._shelves = {r: Shelf(fds, m["bytes"], m["table_bytes"]) for r, (m, fds) in lent.items()}
        if self._shelves and speaks:
            store.set(_LAYOUT, json.dumps(asdict(next(iter(self._shelves.values())).table.layout)))
        self.layout = Layout(**json.loads(store.get(_LAYOUT)))
        self._slots: dict[int, int] = {}

    def open(self, plan: RestorePlan, ranks: list[int], target: Layout) -> None:
        """When the old world stands: checks the seals of what will be read, and tells the others scalars and streams.

        Raises:
            StateError: a source is not what its seal says.
        """
        self._slots = {rank: source.slot for rank, source in enumerate(plan.sources)}
        for rank in ranks:
            header = self._shelves[rank].slot(self._slots[rank]).verify()
            if header.generation != plan.generation:
                raise StateError(
                    f"rank {rank} sealed generation {header.generation}, the switch is at {plan.generation}"
                )
        if self._speaks:
            self._publish(target)

    def storage(self, rank: int) -> Storage:
        """An old rank's tensors."""
        return self._shelves[rank].storage(self._slots[rank])

    def said(self, rank: int) -> dict[str, Any]:
        """``record`` and ``streams`` of an old rank, wherever it was."""
        return json.loads(self._store.get(f"switch/{rank}"))

    def first_and_last(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Of old rank 0, and of the last one, which is of the last stage."""
        return self.said(0), self.said(self._last)

    def close(self) -> None:
        """Gives the memory back."""
        for shelf in self._shelves.values():
            shelf.close()
        self._shelves = {}

    def _publish(self, target: Layout) -> None:
        wanted = {0, self._last}
        for rank in range(self._epoch.world_size):
            sources = stream_sources(self.layout, target, rank)
            wanted |= {r for r in (sources.dense, sources.expert) if r is not None}
        for rank in wanted & set(self._shelves):
            shelf, slot = self._shelves[rank], self._slots[rank]
            streams = {name: data.hex() for name, data in shelf.streams(slot).items()}
            record = shelf.slot(slot).read_record()
            self._store.set(f"switch/{rank}", json.dumps({"record": record, "streams": streams}))


def problem_of(epoch: Epoch, source: StateSpace, target: StateSpace) -> Problem:
    """The routing problem of a switch, the same on all endpoints.

    Raises:
        ValueError: nobody holds some of the state; names it.
    """
    problem = Problem(
        source,
        target,
        np.array(places(epoch), np.int64),
        np.arange(epoch.world_size),
        Cluster(ranks_per_node=epoch.nproc_per_node),
        shelves=True,
        couriers=tuple(couriers(epoch).values()),
    )
    problem.check_covered()
    return problem


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
        rank: int = live.state.rank
        self._live = live
        self._shelves = Shelves(link, epoch, node, store, speaks=rank == min(epoch.ranks_of(node)))
        live.clear()
        catalogue = live.catalogue(self._shelves.layout)
        self._space = live.space(live.layout, catalogue)
        if rank == 0 and couriers(epoch):
            tell_couriers(store, self._space)
        problem = problem_of(epoch, live.space(self._shelves.layout, catalogue), self._space)
        self._transfer = Transfer(problem, rank, peers(epoch), live.storage(self._space))
        self._streams = stream_sources(self._shelves.layout, live.layout, rank)

    @property
    def tally(self) -> Tally:
        """Bytes by what became of them."""
        return self._transfer.tally

    def move(self, plan: RestorePlan, backend: Any) -> None:
        """Everything to its place, and compared with where it came from.

        Args:
            backend: over the endpoints, for host tensors.

        Raises:
            StateError: a source is not what its seal says, or something arrived otherwise than it was sent.
            RuntimeError: a connection broke.
        """
        self._shelves.open(plan, self._transfer.read_from(), self._live.layout)
        self._transfer.run(self._shelves.storage, backend)
        self._transfer.verify()
        self._transfer.forget()
        self._adopt()
        self._shelves.close()

    def _adopt(self) -> None:
        (first, last), sources = self._shelves.first_and_last(), self._streams
        self._live.adopt(first["record"], last["record"]["loop"], sources.dense is not None)
        streams: dict[str, bytes] = {}
        if sources.dense is not None:
            said = self._shelves.said(sources.dense)["streams"]
            streams = {name: bytes.fromhex(text) for name, text in said.items()}
        streams.pop(f"rng.{EXPERT_STREAM}", None)
        if sources.expert is not None:
            said = self._shelves.said(sources.expert)["streams"]
            streams |= {name: bytes.fromhex(text) for name, text in said.items() if name == f"rng.{EXPERT_STREAM}"}
        self._live.state.load_streams(streams)


def tell_couriers(store: Any, target: StateSpace) -> None:
    """What an endpoint without a model must know to plan."""
    model = {
        "catalogue": target.catalogue.to_json(),
        "layout": asdict(target.layout),
        "sharded_optimizer": bool(target.sharded_optimizer),
    }
    store.set(_MODEL, json.dumps(model))


def told(store: Any) -> tuple[Catalogue, Layout, bool]:
    """What :func:`tell_couriers` said."""
    model = json.loads(store.get(_MODEL))
    return catalogue_from_json(model["catalogue"]), Layout(**model["layout"]), model["sharded_optimizer"]
