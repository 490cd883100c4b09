"""The state of a job as its coordinator knows it, and as a successor is told it."""

from __future__ import annotations

import enum
from dataclasses import asdict, dataclass, field
from typing import Any, Self

from megatron_resilience.control.membership import Evidence
from megatron_resilience.control.switching import Fallback, Switch, Wish
from megatron_resilience.deadpool.recovery import Holding
from megatron_resilience.topology.epoch import Epoch


class Phase(enum.StrEnum):
    """Of a job; see :mod:`coordinator`."""

    FORMING = "forming"
    STARTING = "starting"
    RUNNING = "running"
    RECOVERING = "recovering"
    FINISHING = "finishing"
    ENDED = "ended"


@dataclass(frozen=True)
class Settings:
    """What the launcher fixed for the whole job.

    Attributes:
        nnodes: agents expected, spares included.
        spares: of them.
        nproc_per_node: ranks per node.
        max_restarts: faults repaired before the job stops.
        join_grace_s: how long to wait for missing spares once all slots can be filled.
        broken_grace_s: how long a broken connection may wait for the death that explains it.
    """

    nnodes: int
    spares: int
    nproc_per_node: int
    max_restarts: int = 100
    join_grace_s: float = 10.0
    broken_grace_s: float = 2.0

    @property
    def slots(self) -> int:
        """Nodes that train."""
        return self.nnodes - self.spares


@dataclass
class Record:
    """What is known of a job. Names with an underscore are of the current epoch, and are told again to a successor."""

    settings: Settings
    phase: Phase = Phase.FORMING
    roster: dict[str, int] = field(default_factory=dict)
    gone: dict[str, Evidence] = field(default_factory=dict)
    domains: dict[str, str] = field(default_factory=dict)
    epoch: Epoch | None = None
    restarts: int = 0
    stepped: bool = False
    faults: dict[str, int] = field(default_factory=dict)
    node_faults: dict[str, list[int]] = field(default_factory=dict)
    suspects: list[str] = field(default_factory=list)
    drained: list[str] = field(default_factory=list)
    ailing: dict[str, str] = field(default_factory=dict)
    replicas: int = 0
    saves: bool = False
    exclusive: bool = False
    leaving: str = ""
    recovery: dict[str, Any] | None = None
    history: list[str] = field(default_factory=list)
    fruitless: int = 0
    store_node: str = ""
    numbers: int = 0
    switch: Switch | None = None
    wish: Wish | None = None
    fallbacks: dict[int, Fallback] = field(default_factory=dict)
    grow_to: Fallback | None = None
    grow_not_before: float = 0.0
    _ready: set[int] = field(default_factory=set)
    _joined: set[int] = field(default_factory=set)
    _finished: set[int] = field(default_factory=set)
    _exited: set[int] = field(default_factory=set)
    _down: set[int] = field(default_factory=set)
    _held: dict[str, tuple[Holding, ...]] = field(default_factory=dict)
    _planned: bool = False
    _broken_at: float | None = None
    _broken_why: str = ""
    _broken: set[int] = field(default_factory=set)
    _complete_at: float | None = None

    @property
    def alive(self) -> list[str]:
        """Nodes that are there, in order."""
        return sorted((n for n in self.roster if n not in self.gone), key=self.roster.__getitem__)

    @property
    def waiting_spares(self) -> list[str]:
        """Nodes that may take a slot, in order; those that were replaced for their faults, or ail, come last."""
        bound = self.epoch.slots if self.epoch else ()
        free = [n for n in self.alive if n not in (*bound, *self.drained)]
        return sorted(free, key=lambda n: n in self.suspects or n in self.ailing)

    # -- succession --------------------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        """What a successor must know, as it is now; the rest every agent tells it again."""
        return {
            "phase": self.phase.value,
            "roster": dict(self.roster),
            "gone": {n: e.value for n, e in self.gone.items()},
            "domains": dict(self.domains),
            "epoch": self.epoch.to_json() if self.epoch else None,
            "restarts": self.restarts,
            "stepped": self.stepped,
            "faults": dict(self.faults),
            "node_faults": {n: list(g) for n, g in self.node_faults.items()},
            "suspects": list(self.suspects),
            "drained": list(self.drained),
            "ailing": dict(self.ailing),
            "replicas": self.replicas,
            "saves": self.saves,
            "exclusive": self.exclusive,
            "leaving": self.leaving,
            "recovery": self.recovery,
            "history": list(self.history),
            "fruitless": self.fruitless,
            "store_node": self.store_node,
            "numbers": self.numbers,
            "wish": asdict(self.wish) if self.wish else None,
            "fallbacks": {n: [f.layout, f.ranks] for n, f in self.fallbacks.items()},
            "grow_to": [self.grow_to.layout, self.grow_to.ranks] if self.grow_to else None,
        }

    @classmethod
    def from_json(cls, settings: Settings, data: dict[str, Any]) -> Self:
        """A successor, from :meth:`to_json`'s object."""
        return cls(
            settings,
            phase=Phase(data["phase"]),
            roster=dict(data["roster"]),
            gone={n: Evidence(e) for n, e in data["gone"].items()},
            domains=dict(data["domains"]),
            epoch=Epoch.from_json(data["epoch"]) if data["epoch"] else None,
            restarts=data["restarts"],
            stepped=data["stepped"],
            faults=dict(data["faults"]),
            node_faults={n: list(g) for n, g in data["node_faults"].items()},
            suspects=list(data["suspects"]),
            drained=list(data["drained"]),
            ailing=dict(data["ailing"]),
            replicas=data["replicas"],
            saves=data["saves"],
            exclusive=data["exclusive"],
            leaving=data["leaving"],
            recovery=data["recovery"],
            history=list(data["history"]),
            fruitless=data["fruitless"],
            store_node=data["store_node"],
            numbers=data["numbers"],
            wish=Wish.from_json(data["wish"]) if data["wish"] else None,
            fallbacks={int(n): Fallback(*f) for n, f in data["fallbacks"].items()},
            grow_to=Fallback(*data["grow_to"]) if data["grow_to"] else None,
        )
