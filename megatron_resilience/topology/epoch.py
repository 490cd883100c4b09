"""The record of an epoch: a number that only grows, and who is what in it. Pure."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Epoch:
    """What every agent and rank is told when the world changes.

    Attributes:
        number: grows by one with every change; anything that carries an older one is ignored.
        cause: one sentence for people.
        slots: node id bound to each slot; global rank ``slot * nproc_per_node + local_rank``.
        nproc_per_node: ranks per node.
        fresh: ranks start from their own start-up state (first start, or nothing was protected yet).
        newcomers: ranks whose process is new in this epoch; all others kept running.
        store: ``(address, port)`` of the epoch's TCPStore.
        token: secret prefix of all its keys.
        domains: failure domain of each slot's node; empty when every node is one of its own.
        world: number of the epoch in which this layout began: processes and memory belong to a world.
        layout: the parallel layout (``vps.layout.parse_layout``); empty: what the script's arguments say.
        ranks: ranks that train; 0: one in every place.
        before: in the first epoch of a world that grew out of another: that one's last epoch, which holds the state.
        sources: with ``before``, where the nodes of that world do not all live: by its ranks, whose memory their state lies in.
        lost: nodes of this epoch that are gone and have no successor: nobody trains in it, it waits for a smaller world.
    """

    number: int
    cause: str
    slots: tuple[str, ...]
    nproc_per_node: int
    fresh: bool
    newcomers: tuple[int, ...] = ()
    store: tuple[str, int] = ("", 0)
    token: str = ""
    domains: tuple[str, ...] = ()
    world: int = 1
    layout: str = ""
    ranks: int = 0
    before: Epoch | None = None
    sources: tuple[int, ...] = ()
    lost: tuple[str, ...] = ()

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.ranks or len(self.slots) * self.nproc_per_node

    def ranks_of(self, node: str) -> tuple[int, ...]:
        """Global ranks on a node; empty when it holds no slot."""
        if node not in self.slots:
            return ()
        first = self.slots.index(node) * self.nproc_per_node
        return tuple(range(first, min(first + self.nproc_per_node, self.world_size)))

    def node_of(self, rank: int) -> str:
        """The node a global rank runs on."""
        return self.slots[rank // self.nproc_per_node]

    def giver_of(self, rank: int) -> str:
        """The node on which the state of a rank of the world before lies."""
        assert self.before is not None
        return self.before.node_of(self.sources[rank] if self.sources else rank)

    def domain_of(self, rank: int) -> str:
        """The failure domain of the node a global rank runs on."""
        return (self.domains or self.slots)[rank // self.nproc_per_node]

    def to_json(self) -> dict[str, Any]:
        """As a JSON object."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Epoch:
        """From :meth:`to_json`'s object."""
        return cls(
            **{
                **data,
                "slots": tuple(data["slots"]),
                "newcomers": tuple(data["newcomers"]),
                "domains": tuple(data["domains"]),
                "store": (str(data["store"][0]), int(data["store"][1])),
                "sources": tuple(data["sources"]),
                "lost": tuple(data["lost"]),
                "before": cls.from_json(data["before"]) if data["before"] else None,
            }
        )
