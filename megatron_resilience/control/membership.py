"""Who leads, and when the agents that are left may go on. Pure."""

from __future__ import annotations

import enum
from collections.abc import Mapping


class Evidence(enum.StrEnum):
    """How an agent is known to be gone."""

    CLOSED = "connection closed"
    """Its kernel closed the connection: the process is dead for sure, wherever we stand."""
    SILENT = "no heartbeat"
    """Nothing was heard: it may be dead, or it may be us who are cut off."""


def next_leader(roster: Mapping[str, int], gone: set[str]) -> str | None:
    """The agent that leads when those in ``gone`` do not.

    Args:
        roster: order of joining by node id.
        gone: node ids.
    """
    alive = [node for node in roster if node not in gone]
    return min(alive, key=roster.__getitem__, default=None)


def may_go_on(total: int, gone: Mapping[str, Evidence]) -> bool:
    """Whether the agents that are left may re-form the job without those in ``gone``.

    A majority may. So may any part when all the others are known dead, not merely silent: two halves
    of a cut network must not both train, but a dead process cannot.

    Args:
        total: agents in the roster before anybody went.
        gone: evidence by node id.
    """
    silent = sum(1 for evidence in gone.values() if evidence is Evidence.SILENT)
    alive = total - len(gone)
    return alive > silent
