"""What a coordinator hears and what it orders: events and actions, as values. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron_resilience.control.membership import Evidence
from megatron_resilience.control.switching import Fallback, Wish
from megatron_resilience.deadpool.recovery import Holding, RestorePlan
from megatron_resilience.topology.epoch import Epoch


@dataclass(frozen=True)
class NodeJoined:
    """An agent connected; ``order`` is its place among those that ask for a slot, ``domain`` its failure domain."""

    node: str
    order: int
    domain: str = ""


@dataclass(frozen=True)
class NodeLost:
    """An agent is gone."""

    node: str
    evidence: Evidence


@dataclass(frozen=True)
class RankExited:
    """A rank's process ended; ``status`` is negative for a signal, ``hung`` says why its agent ended it."""

    node: str
    rank: int
    epoch: int
    status: int
    generation: int
    hung: str = ""


@dataclass(frozen=True)
class RankUnkillable:
    """A rank's process was killed and does not end."""

    node: str
    rank: int


@dataclass(frozen=True)
class RankReady:
    """A rank waits at the door of an epoch."""

    rank: int
    epoch: int


@dataclass(frozen=True)
class NodeHoldings:
    """The sealed slots in a node's memory, listed when all its ranks were ready."""

    node: str
    epoch: int
    holdings: tuple[Holding, ...]


@dataclass(frozen=True)
class RankJoined:
    """A rank committed to an epoch and trains from ``generation``, with ``replicas`` copies on other nodes.

    ``saves``: told to leave, it saves a checkpoint first. ``exclusive``: its device has no room for two layouts.
    """

    rank: int
    epoch: int
    generation: int
    replicas: int = 1
    saves: bool = False
    exclusive: bool = False


@dataclass(frozen=True)
class RankBroken:
    """A rank's connections broke and it does not know why."""

    rank: int
    epoch: int
    error: str


@dataclass(frozen=True)
class AllWait:
    """No rank makes progress, and none is to blame for it; the step that they are in began at ``generation``."""

    epoch: int
    why: str
    generation: int


@dataclass(frozen=True)
class RankFinished:
    """A rank left the training loop, as all others did."""

    rank: int
    epoch: int


@dataclass(frozen=True)
class RankFatal:
    """A rank found something that no recovery mends (parameters differ among replicas)."""

    rank: int
    error: str
    epoch: int = 0


@dataclass(frozen=True)
class NodeAiling:
    """A device of a node reports an error that will not mend by itself."""

    node: str
    why: str


@dataclass(frozen=True)
class SwapAsked:
    """Somebody wants a node out of the job; ``drain``: for good. ``ticket`` comes back in the answer."""

    node: str
    drain: bool = False
    ticket: int = 0


@dataclass(frozen=True)
class EndAsked:
    """The job is to end in good order (SIGTERM, a time limit): saved if it can be, else with ``status``."""

    why: str
    status: int = 143


@dataclass(frozen=True)
class SwitchAsked:
    """Somebody wants another layout.

    Attributes:
        wish: which.
        ticket: comes back in the answer; 0: nobody waits for one.
        world: that the rank which asks trains in, or is about to (``Epoch.world``); 0: no rank asks.
    """

    wish: Wish
    ticket: int = 0
    world: int = 0


@dataclass(frozen=True)
class FallbacksKnown:
    """Layouts for fewer nodes, by number of nodes; for as many as train now, the present one."""

    epoch: int
    layouts: dict[int, Fallback]


@dataclass(frozen=True)
class RankHeld:
    """A rank goes no further than to generation ``limit`` without further word."""

    rank: int
    epoch: int
    limit: int


@dataclass(frozen=True)
class RankPrepared:
    """A rank of the next world waits for its state."""

    rank: int
    epoch: int


@dataclass(frozen=True)
class RankParked:
    """A rank of this world stands still at the agreed generation, sealed in ``slot``."""

    rank: int
    epoch: int
    generation: int
    slot: int


@dataclass(frozen=True)
class Tick:
    """Time passes."""


Event = (
    NodeJoined
    | NodeLost
    | RankExited
    | RankUnkillable
    | AllWait
    | RankReady
    | NodeHoldings
    | RankJoined
    | RankBroken
    | RankFinished
    | RankFatal
    | NodeAiling
    | SwapAsked
    | EndAsked
    | SwitchAsked
    | FallbacksKnown
    | RankHeld
    | RankPrepared
    | RankParked
    | Tick
)

# -- actions ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Publish:
    """Tell everybody about a new epoch (the leader adds store and token)."""

    epoch: Epoch


@dataclass(frozen=True)
class SendPlan:
    """Tell every rank what to restore."""

    plan: RestorePlan


@dataclass(frozen=True)
class Stop:
    """End the job everywhere with an exit status and, unless it is 0, one clear message."""

    status: int
    message: str


@dataclass(frozen=True)
class Leave:
    """Tell every rank to save a checkpoint at the end of its step and to leave training."""

    why: str


@dataclass(frozen=True)
class Answer:
    """To whoever asked with ``ticket``.

    Attributes:
        done: it was carried out, or is on its way.
        epoch: that it leads to; 0 when none is needed.
    """

    ticket: int
    done: bool
    text: str
    epoch: int = 0


@dataclass(frozen=True)
class Note:
    """Something for the event log."""

    kind: str
    fields: dict[str, Any]


@dataclass(frozen=True)
class Prepare:
    """Start the next world beside this one (the leader adds store and token)."""

    epoch: Epoch


@dataclass(frozen=True)
class Hold:
    """Ask every rank for the generation that it will not pass."""


@dataclass(frozen=True)
class StopAt:
    """Tell every rank where to park."""

    generation: int


@dataclass(frozen=True)
class Switched:
    """The next world is this one."""

    epoch: Epoch


@dataclass(frozen=True)
class Abandon:
    """End the next world; this one goes on."""

    why: str


Action = Publish | SendPlan | Stop | Leave | Answer | Note | Prepare | Hold | StopAt | Switched | Abandon
