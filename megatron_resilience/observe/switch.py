"""The summary of a change of layout: what was hidden behind training, and where the pause went. Pure but for the clock."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron_resilience.topology.epoch import Epoch

PHASES = ("park", "plan", "move", "rebuild", "verify", "protect", "commit", "first step")
_ENDS = {"move": "moved", "rebuild": "rebuilt", "verify": "verified", "protect": "committed", "commit": "gone"}


@dataclass(frozen=True)
class SwitchSummary:
    """One change of layout.

    Attributes:
        epoch: of the new world.
        cause: one sentence.
        generation: that training went on from.
        prepare_s: seconds of preparation, hidden: training went on meanwhile.
        wait_s: seconds that parked ranks waited for the preparation; part of "plan".
        seconds: of the pause by phase, in the order of :data:`PHASES`; the first step is the new world's own.
        bytes: by what became of them (``kept`` on its node, ``received`` from other nodes), and ``peak`` of the staging buffers
            of any rank.
    """

    epoch: int
    cause: str
    generation: int
    prepare_s: float
    wait_s: float
    seconds: Mapping[str, float]
    bytes: Mapping[str, int]

    @property
    def pause_s(self) -> float:
        """From the end of the old world's last step to the beginning of the new one's first."""
        return sum(seconds for phase, seconds in self.seconds.items() if phase != "first step")

    def to_json(self) -> dict[str, Any]:
        """For the event log."""
        return {
            "epoch": self.epoch,
            "cause": self.cause,
            "generation": self.generation,
            "prepare_s": round(self.prepare_s, 4),
            "wait_s": round(self.wait_s, 4),
            "pause_s": round(self.pause_s, 4),
            "seconds": {k: round(v, 4) for k, v in self.seconds.items()},
            "bytes": dict(self.bytes),
        }

    def text(self) -> str:
        """One paragraph for the console."""
        parts = ", ".join(f"{phase} {seconds:.3f}" for phase, seconds in self.seconds.items())
        sent = self.bytes.get("received", 0) / 2**20
        rate = f" at {sent / max(1e-9, self.seconds['move']) / 1024:.2f} GiB/s" if sent else ""
        return (
            f"switched (epoch {self.epoch}): {self.cause}; went on from generation {self.generation} after a pause of "
            f"{self.pause_s:.3f} s ({parts}); {self.prepare_s:.2f} s of preparation hidden behind training, "
            f"{self.wait_s:.2f} s not; {sent:.1f} MiB between nodes{rate}, "
            f"{self.bytes.get('kept', 0) / 2**20:.1f} MiB within them"
        )


@dataclass
class SwitchTimes:
    """Collects the time stamps of one change.

    Attributes:
        number: epoch of the new world; 0: none yet.
    """

    number: int = 0
    _asked: float = field(default_factory=time.time)
    _prepared: float = 0.0
    _stopped: float = float("inf")
    _parked: float = 0.0
    _planned: float = 0.0

    def preparing(self) -> None:
        """The new world's processes are started."""
        self._asked = time.time()

    def prepared(self, message: Mapping[str, Any]) -> None:
        """A rank of the new world waits for its state."""
        self._prepared = max(self._prepared, message["time"])

    def parked(self, message: Mapping[str, Any]) -> None:
        """A rank of the old world stands; it came to the agreed step at ``stopped``."""
        self._stopped = min(self._stopped, message["stopped"])
        self._parked = max(self._parked, message["time"])

    def lost(self, evidence: float) -> None:
        """Nobody parks: the old world stands since nodes were lost."""
        self._stopped, self._parked = evidence, time.time()

    def moving(self) -> None:
        """The plan goes out."""
        self._planned = time.time()

    def summary(self, epoch: Epoch, generation: int, ranks: Mapping[int, Mapping[str, Any]]) -> SwitchSummary:
        """When all ranks have taken their first step.

        Args:
            ranks: marks (``time.time()``) and ``bytes`` that each rank sent with its first step.
        """
        seconds, before = {}, self._stopped
        for phase in PHASES:
            if phase == "park":
                end = self._parked
            elif phase == "plan":
                end = self._planned
            elif phase == "first step":
                end = max(r["first_step"] for r in ranks.values())
            else:
                end = max(r[_ENDS[phase]] for r in ranks.values())
            seconds[phase] = max(0.0, end - before)
            before = max(before, end)
        total = {name: sum(r["bytes"][name] for r in ranks.values()) for name in ("kept", "received")} | {
            "peak": max(r["bytes"]["peak"] for r in ranks.values())
        }
        wait = max(0.0, self._prepared - max(self._parked, self._asked))
        return SwitchSummary(
            epoch.number, epoch.cause, generation, self._prepared - self._asked - wait, wait, seconds, total
        )
