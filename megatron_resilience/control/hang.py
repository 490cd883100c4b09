"""Which rank the others wait for when a step does not end. Pure.

Seen from outside, all ranks of a hung job stand still: one of them does something else than communicate, the others
wait for it. No time limit of a single rank tells them apart, the standings of all ranks together do.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Sequence
from dataclasses import dataclass

_WAITING_FOLDERS = ("/torch/distributed/", "/megatron_resilience/deadpool/")
_WAITING_CALL = re.compile(r"\.(wait|synchronize|item|tolist|cpu)\(")


@dataclass(frozen=True)
class Standing:
    """Where a rank stands.

    Attributes:
        rank: global rank.
        answers: its process reacts. One that does not is its own agent's business.
        generation: that it entered its current, or last, step with.
        overdue: it has been in that step for too long; otherwise it began it lately, or is between two steps (logging,
            evaluation, a checkpoint), which may take long.
        waits: its main thread waits for communication, or for the device.
    """

    rank: int
    answers: bool
    generation: int
    overdue: bool
    waits: bool


class Finding(enum.StrEnum):
    """What the standings of all ranks mean."""

    CULPRITS = "the others wait for them"
    ALL_WAIT = "every rank waits for another"
    UNCLEAR = "some wait, but not for one"
    SLOW = "every rank computes: the step is slow, or --deadpool-hang-timeout too short"
    PATIENCE = "a rank has begun its step lately, is between two, or does not answer its agent"


@dataclass(frozen=True)
class Verdict:
    """A finding and, for :attr:`Finding.CULPRITS`, the ranks to end."""

    finding: Finding
    culprits: tuple[int, ...] = ()


def judge(standings: Sequence[Standing]) -> Verdict:
    """Finds who holds a job up in which some step lasts too long.

    In this order: nobody is blamed while a rank is not overdue or does not answer; ranks that are steps behind are
    those that the others wait for; else it is the few that compute while the rest waits.

    Args:
        standings: of every rank of the job.
    """
    if any(not s.answers or not s.overdue for s in standings):
        return Verdict(Finding.PATIENCE)
    behind = min(s.generation for s in standings)
    computing = [s.rank for s in standings if s.generation == behind and not s.waits]
    if len(computing) == len(standings):
        return Verdict(Finding.SLOW)
    if not computing:
        return Verdict(Finding.ALL_WAIT)
    if 2 * len(computing) > len(standings):
        return Verdict(Finding.UNCLEAR)
    return Verdict(Finding.CULPRITS, tuple(computing))


def is_waiting(filename: str, line: str) -> bool:
    """Whether the innermost Python frame of a thread waits for communication or for the device.

    Args:
        filename: of the frame's code.
        line: the source line that it executes, as far as it is known.
    """
    return any(folder in filename for folder in _WAITING_FOLDERS) or bool(_WAITING_CALL.search(line))
