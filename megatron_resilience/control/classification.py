"""What a fault means: from evidence and history to a decision, by one table. Pure."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass

REPEATED = 3
"""So many faults of ranks on one node within :data:`WINDOW` generations are the node's fault."""
WINDOW = 1000
"""Generations that a fault on a node is remembered for."""


class Sign(enum.StrEnum):
    """What was seen."""

    NODE_GONE = "the node is gone"
    RANK_ENDED = "a rank's process ended"
    RANK_HUNG = "a rank made no progress and was killed"
    RANK_UNKILLABLE = "a rank's process does not end though it was killed"
    CONNECTIONS_BROKE = "connections broke though nobody died"
    ALL_WAIT = "every rank waits for another"
    DEVICE_AILING = "a device of the node reports a grave error"


class Decision(enum.StrEnum):
    """What to do."""

    RESTART_RANK = "restart the rank in place"
    RENEW = "renew the connections"
    REPLACE_NODE = "replace the node by a spare"
    SHRINK = "go on with fewer nodes in a smaller layout"
    STOP = "stop the job"
    GO_ON = "go on as long as it lasts"


@dataclass(frozen=True)
class Fault:
    """The evidence and what is known around it.

    Attributes:
        sign: what was seen.
        status: exit status of a rank's process; negative: the signal.
        begun: training has begun, so that the fault is not one of start-up.
        spares: nodes that wait.
        copies: every rank's state lies on other nodes too, so that a living node can be left.
        same_step: faults of this rank in the same step before; of :attr:`Sign.ALL_WAIT`: of the whole job.
        on_node: faults of ranks on the same node that are remembered, this one included.
        whole_node: with this rank, all ranks of its node (of more than one) are down.
        smaller: a layout for the nodes that are left is known.
    """

    sign: Sign
    status: int = 0
    begun: bool = True
    spares: int = 0
    copies: bool = True
    same_step: int = 0
    on_node: int = 1
    whole_node: bool = False
    smaller: bool = False

    @property
    def replaceable(self) -> bool:
        """The node can be left without loss."""
        return self.spares > 0 and self.copies


@dataclass(frozen=True)
class Rule:
    """One row: the decision and its reason, where it applies."""

    applies: Callable[[Fault], bool]
    decision: Decision
    reason: str


_RANK = (Sign.RANK_ENDED, Sign.RANK_HUNG)

TABLE = (
    Rule(lambda f: f.sign is Sign.NODE_GONE and f.spares > 0, Decision.REPLACE_NODE, "a spare waits"),
    Rule(
        lambda f: f.sign is Sign.NODE_GONE and f.smaller and f.begun and f.copies,
        Decision.SHRINK,
        "no spare is left",
    ),
    Rule(
        lambda f: f.sign is Sign.NODE_GONE,
        Decision.STOP,
        "no spare is left: start the job again from its last checkpoint, or with more --spares next time",
    ),
    Rule(
        lambda f: f.sign is Sign.RANK_ENDED and not f.begun and f.status >= 0,
        Decision.STOP,
        "before training began: the same command would fail again; see its output above",
    ),
    Rule(
        lambda f: f.sign in _RANK and f.same_step > 0,
        Decision.STOP,
        "for the second time in the same step: that is no fault of a machine; see its output above",
    ),
    Rule(
        lambda f: f.sign is Sign.ALL_WAIT and f.same_step > 0,
        Decision.STOP,
        "for the second time in the same step: new connections do not help; all stacks are saved (see the events)",
    ),
    Rule(
        lambda f: f.sign is Sign.RANK_UNKILLABLE and f.replaceable,
        Decision.REPLACE_NODE,
        "its driver or file system hangs",
    ),
    Rule(
        lambda f: f.sign is Sign.RANK_UNKILLABLE,
        Decision.STOP,
        "its driver or file system hangs, and no spare is left (or nothing is protected on other nodes)",
    ),
    Rule(
        lambda f: f.sign in _RANK and f.whole_node and f.replaceable,
        Decision.REPLACE_NODE,
        "all ranks of the node are down",
    ),
    Rule(
        lambda f: f.sign in _RANK and f.on_node >= REPEATED and f.replaceable,
        Decision.REPLACE_NODE,
        "ranks fail on this node again and again",
    ),
    Rule(
        lambda f: f.sign is Sign.DEVICE_AILING and f.replaceable,
        Decision.REPLACE_NODE,
        "before it takes ranks down",
    ),
    Rule(lambda f: f.sign is Sign.DEVICE_AILING, Decision.GO_ON, "no healthy spare waits"),
    Rule(lambda f: f.sign in _RANK, Decision.RESTART_RANK, "its node is well"),
    Rule(lambda f: True, Decision.RENEW, "nobody is to blame"),
)


def classify(fault: Fault) -> Rule:
    """The first row of :data:`TABLE` that applies."""
    return next(rule for rule in TABLE if rule.applies(fault))
