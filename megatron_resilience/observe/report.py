"""The summary of a recovery: what died, where training went on, where the time went. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

PHASES = ("detect", "unblock", "rebuild", "restore", "verify", "first step")


@dataclass(frozen=True)
class Recovery:
    """One recovery.

    Attributes:
        epoch: that it led to.
        cause: one sentence.
        generation: that training went on from.
        steps_again: completed steps that had to be executed again.
        seconds: by phase, in the order of :data:`PHASES`.
    """

    epoch: int
    cause: str
    generation: int
    steps_again: int
    seconds: Mapping[str, float]

    @property
    def total_s(self) -> float:
        """From the first evidence to the first completed step."""
        return sum(self.seconds.values())

    def text(self) -> str:
        """One paragraph for the console."""
        parts = ", ".join(f"{phase} {self.seconds[phase]:.2f}" for phase in self.seconds)
        again = "no step" if self.steps_again == 0 else f"{self.steps_again} step{'s'[: self.steps_again > 1]}"
        return (
            f"recovered (epoch {self.epoch}): {self.cause}; went on from generation {self.generation}, "
            f"{again} executed again; {self.total_s:.2f} s to the first completed step ({parts})"
        )


def phases(evidence: float, published: float, ranks: Mapping[int, Mapping[str, float]]) -> dict[str, float]:
    """Seconds per phase from the ranks' time stamps.

    A phase ends when the last rank is through it. Clocks of different nodes may differ a little: no phase is
    reported shorter than zero.

    Args:
        evidence: when the first sign of the fault was seen (``time.time()``).
        published: when the epoch was published.
        ranks: by rank, the times of ``settled, met, restored, verified, committed, first_step``.
    """

    def last(mark: str) -> float:
        return max(times[mark] for times in ranks.values())

    ends = [
        ("detect", published),
        ("unblock", last("settled")),
        ("rebuild", last("met")),
        ("restore", last("restored")),
        ("verify", last("committed")),
        ("first step", last("first_step")),
    ]
    result, before = {}, evidence
    for phase, end in ends:
        result[phase] = max(0.0, end - before)
        before = max(before, end)
    return result
