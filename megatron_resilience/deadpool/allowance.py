"""How long training may wait for its own protection. Pure: the caller brings the clock."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class StallAllowance:
    """Seconds that steps may wait for the round before: a purse that fills slowly.

    A hiccup of the network is waited out; a network that is too slow for every generation costs ``share`` of the
    time and then generations, never more time.

    Args:
        limit_s: what the purse holds, full at the start; the longest single wait.
        share: of passing time that goes into it.
    """

    limit_s: float
    share: float = 0.01
    _left: float = field(init=False)
    _since: float | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self._left = self.limit_s

    def available(self, now: float) -> float:
        """Seconds that may be waited now.

        Args:
            now: seconds on any clock that does not go back.
        """
        if self._since is not None:
            self._left = min(self.limit_s, self._left + self.share * (now - self._since))
        self._since = now
        return self._left

    def spend(self, seconds: float) -> None:
        """Notes a wait."""
        self._left = max(0.0, self._left - seconds)
