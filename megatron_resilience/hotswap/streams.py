"""Where a rank's random streams come from in another layout. Pure.

The contract is stock Megatron's, where that is right: its checkpoints carry the streams while TP and PP stay, and start them
anew, seeded as at start-up, when either changes (training/checkpointing.py, ``load_checkpoint``). The streams of experts
belong to a coordinate (ETP, EP) and go on only where it exists in both layouts; stock gives every rank data-parallel rank 0's.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_resilience.vps.layout import Layout

EXPERT_STREAM = "tracker.expert-parallel-rng"


@dataclass(frozen=True)
class StreamSources:
    """Ranks of the old layout whose streams a rank goes on with.

    Attributes:
        dense: all streams but the experts'; None: they start anew.
        expert: the stream of the experts; None: it starts anew.
    """

    dense: int | None
    expert: int | None


def stream_sources(old: Layout, new: Layout, rank: int) -> StreamSources:
    """For ``rank`` of ``new``; of several ranks that share a stream, the lowest."""
    if (old.tp, old.pp, old.vpp, old.cp) != (new.tp, new.pp, new.vpp, new.cp):
        return StreamSources(None, None)
    tp, _, _, pp = new.coordinates(new.dense, rank)
    dense = int(tp * old.dense.stride_tp + pp * old.dense.stride_pp)
    etp, ep, _, _ = new.coordinates(new.expert, rank)
    expert = None
    if (old.expert_tp, old.ep) == (new.expert_tp, new.ep):
        expert = int(etp * old.expert.stride_tp + ep * old.expert.stride_ep + pp * old.expert.stride_pp)
    return StreamSources(dense, expert)
