"""The leader's part in finding a hung rank: one survey of all nodes at a time, then a verdict."""

from __future__ import annotations

from collections.abc import Collection

from megatron_resilience.control.hang import Standing, Verdict, judge

EXPIRES_S = 5.0
"""An unanswered survey is void after that: whoever owes the answer is found by its missing heartbeat."""


class Surveys:
    """Collects the answers. Pure but for its memory."""

    def __init__(self) -> None:
        self.number = 0
        self._begun = 0.0
        self._missing: set[str] = set()
        self._standings: dict[int, Standing] = {}

    def begin(self, nodes: Collection[str], now: float) -> bool:
        """Begins a survey of ``nodes``; False while one is on its way. Its number is :attr:`number`."""
        if self._missing and now - self._begun < EXPIRES_S:
            return False
        self.number += 1
        self._begun, self._missing, self._standings = now, set(nodes), {}
        return True

    def answer(self, node: str, number: int, standings: Collection[Standing]) -> bool:
        """Takes a node's answer; True when it was the last that was missing."""
        if number != self.number or node not in self._missing:
            return False
        self._missing.discard(node)
        self._standings |= {s.rank: s for s in standings}
        return not self._missing

    def verdict(self, world_size: int) -> Verdict | None:
        """What the complete survey says; None when ranks are missing in it (they end or start just now)."""
        if len(self._standings) < world_size:
            return None
        return judge(list(self._standings.values()))

    @property
    def generation(self) -> int:
        """The least that any rank stood at."""
        return min(s.generation for s in self._standings.values())

    def generation_of(self, rank: int) -> int:
        """The generation a rank stood at."""
        return self._standings[rank].generation
