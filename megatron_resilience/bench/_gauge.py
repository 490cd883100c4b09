"""What protection costs a rank, read from outside: time on the critical path, bytes and time of copies and rounds."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable
from typing import Any

from megatron_resilience.deadpool.protection import Protection
from megatron_resilience.deadpool.session import Session


def install() -> Callable[[], dict[str, float]]:
    """Measures from now on; returns the reading of this process's totals.

    ``exposed_s`` is all the time that a step spends in protection's hooks, waiting or working; ``copy_s`` and
    ``round_s`` are of the two background threads; bytes are those of the tensors and records.
    """
    totals = dict.fromkeys(("exposed_s", "copy_s", "copy_bytes", "round_s", "round_bytes"), 0.0)
    lock = threading.Lock()

    def add(**amounts: float) -> None:
        with lock:
            for name, amount in amounts.items():
                totals[name] += amount

    def timed(owner: Any, name: str, key: str, count: Callable[..., dict[str, float]] | None = None) -> None:
        original = getattr(owner, name)

        @functools.wraps(original)
        def measured(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            try:
                return original(*args, **kwargs)
            finally:
                add(**{key: time.perf_counter() - started}, **(count(*args, **kwargs) if count else {}))

        setattr(owner, name, measured)

    timed(Session, "protect", "exposed_s")
    timed(Session, "before_optimizer", "exposed_s")
    timed(Session, "_copy_aside", "copy_s", _copied)
    timed(Protection, "_round", "round_s", _sent)

    def read() -> dict[str, float]:
        with lock:
            return dict(totals)

    return read


def _copied(session: Session, pairs: list[tuple[Any, Any]]) -> dict[str, float]:
    return {"copy_bytes": float(sum(source.nbytes for _, source in pairs))}


def _sent(protection: Protection, generation: int, index: int | None) -> dict[str, float]:
    if index is None:
        return {}
    slot = protection._segment.slots[index]
    header = slot.header()
    each = len(slot.payload) + (0 if header is None else header.record_bytes)
    return {"round_bytes": float(each * len(protection._partners))}
