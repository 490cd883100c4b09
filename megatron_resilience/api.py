"""For training scripts: what they may ask of a job that runs with ``--hotswap-parallelism``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from megatron_resilience.errors import ConfigurationError

if TYPE_CHECKING:
    from megatron_resilience.hotswap.asker import Asker

_asker: Asker | None = None


def request_layout(layout: str, at_iteration: int = 0, nodes: Sequence[str] = ()) -> None:
    """Asks for another layout; returns at once, training goes on until the new one is ready.

    Call it on every rank, or on rank 0.

    Args:
        layout: such as ``"TP2 PP1 DP4"``; dimensions that are left out have size 1.
        at_iteration: after which to change; 0: as soon as the new world is ready.
        nodes: ids of the nodes to train on, in order; default: those that train now, then spares.

    Raises:
        ConfigurationError: no such layout is possible, or the job runs without ``--hotswap-parallelism``.
    """
    if _asker is None:
        raise ConfigurationError("request_layout() needs --hotswap-parallelism, and training to have begun")
    _asker.request(layout, at_iteration, nodes)
