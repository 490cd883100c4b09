"""Which generation everyone resumes from, and where each rank's copy of it lies. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from megatron_resilience.errors import StateError


@dataclass(frozen=True)
class Holding:
    """A sealed slot that an agent found in its node's memory.

    Attributes:
        rank: whose state it is.
        generation: number of completed iterations.
        slot: index in the segment.
        holder: the rank in whose keeping it is (``rank`` itself for its own copy).
        node: on which it lies.
    """

    rank: int
    generation: int
    slot: int
    holder: int
    node: str


@dataclass(frozen=True)
class Source:
    """Where one rank gets its state from. Attributes as :class:`Holding`'s."""

    holder: int
    slot: int


@dataclass(frozen=True)
class RestorePlan:
    """What every rank restores in an epoch.

    Attributes:
        epoch: the number of the epoch.
        generation: that all ranks resume from.
        sources: by global rank.
    """

    epoch: int
    generation: int
    sources: tuple[Source, ...]

    def to_json(self) -> dict[str, Any]:
        """As a JSON object."""
        return {
            "epoch": self.epoch,
            "generation": self.generation,
            "sources": [[s.holder, s.slot] for s in self.sources],
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> RestorePlan:
        """From :meth:`to_json`'s object."""
        return cls(data["epoch"], data["generation"], tuple(Source(h, s) for h, s in data["sources"]))


def plan_restore(epoch: int, nodes: list[str], holdings: Iterable[Holding]) -> RestorePlan:
    """The newest generation of which every rank's state is held somewhere alive.

    Args:
        epoch: number of the epoch that resumes.
        nodes: node of each rank, by global rank, in that epoch.
        holdings: of all nodes alive.

    Raises:
        StateError: no generation is complete; names the ranks that miss most.
    """
    best: dict[int, dict[int, Holding]] = {}
    for held in holdings:
        if held.rank >= len(nodes) or held.node != nodes[held.holder]:
            continue
        ranks = best.setdefault(held.generation, {})
        old = ranks.get(held.rank)
        # A rank's own copy in its own node needs no transfer.
        if old is None or (held.holder == held.rank and old.holder != held.rank):
            ranks[held.rank] = held
    for generation in sorted(best, reverse=True):
        ranks = best[generation]
        if len(ranks) == len(nodes):
            sources = tuple(Source(ranks[r].holder, ranks[r].slot) for r in range(len(nodes)))
            return RestorePlan(epoch, generation, sources)
    held_text = "; ".join(
        f"generation {g} lacks rank {', '.join(str(r) for r in range(len(nodes)) if r not in best[g])}"
        for g in sorted(best, reverse=True)
    )
    raise StateError(
        "no generation is complete in memory any more "
        f"({held_text or 'nobody holds any'}): start the job again from its last checkpoint with --load"
    )
