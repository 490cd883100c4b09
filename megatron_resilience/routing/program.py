"""The program of one endpoint: its exchanges in order, each with at most one chunk out and one chunk in.

All endpoints order their pairs by (phase, round, pair), so among the unfinished pairs the first one is next for both
its endpoints and can always proceed: no deadlock, whatever the buffering, provided that both halves of an exchange are
posted before either is waited for. Where a send blocks until it is received, the lower-numbered endpoint sends first.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megatron_resilience.routing.plan import RankPlan
from megatron_resilience.routing.schedule import Round
from megatron_resilience.routing.staging import Chunk, chunks


@dataclass(frozen=True)
class Exchange:
    """One step with one peer.

    Attributes:
        phase, round: when, see the module.
        peer: the other endpoint.
        outgoing, incoming: chunks, packed and of the same size on both sides; one of them may be missing.
    """

    phase: int
    round: int
    peer: int
    outgoing: Chunk | None
    incoming: Chunk | None


def program(plan: RankPlan, rounds: Round, chunk: int) -> Iterator[Exchange]:
    """The exchanges of ``plan``'s endpoint.

    Args:
        rounds: a schedule, the same on every endpoint.
        chunk: bytes of a staging buffer, the same on every endpoint (`staging.Budget.chunk`).
    """
    sides: dict[tuple[int, int], tuple[list[Chunk], list[Chunk]]] = {}
    for side, moves in enumerate((plan.sends, plan.receives)):
        for part in chunks(moves, chunk):
            sides.setdefault((part.phase, part.peer), ([], []))[side].append(part)
    order = sorted((phase, rounds(plan.endpoint, peer), peer) for phase, peer in sides)
    for phase, number, peer in order:
        out, back = sides[phase, peer]
        for i in range(max(len(out), len(back))):
            yield Exchange(phase, number, peer, out[i] if i < len(out) else None, back[i] if i < len(back) else None)
