"""What ``train_and_die.py`` is told: who dies, or hangs, where, and when."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class Death:
    """One death, once, of whoever is this rank when it comes there.

    Attributes:
        moment: a name in ``train_and_die.MOMENTS``.
        at: the iteration, counted from 1; the first one from there on that comes to the moment.
        rank: that is led there.
        what: ``"node"``, ``"ranks"`` (all of its node) or ``"rank"`` (it alone).
        after: seconds into the moment.
        hang: how it hangs instead of dying: ``"loop"``, ``"sleep"``, ``"nap"`` or ``"freeze"``.
    """

    moment: str
    at: int
    rank: int
    what: str = "node"
    after: float = 0.0
    hang: str = ""

    def __str__(self) -> str:
        victim = f"rank-{self.rank}" if self.what == "rank" else f"{self.what}-of-{self.rank}"
        return f"{victim}-in-{self.moment}"


def environment(folder: Path, *deaths: Death) -> dict[str, str]:
    """For a job; markers of those that happened lie in the folder, which is made."""
    folder.mkdir(parents=True, exist_ok=True)
    plan = [asdict(death) | {"marker": str(folder / f"death-{i}")} for i, death in enumerate(deaths)]
    return {"DEATHS": json.dumps(plan)}


def missing(folder: Path, *deaths: Death) -> list[str]:
    """The deaths that never came."""
    return [str(death) for i, death in enumerate(deaths) if not (folder / f"death-{i}").exists()]
