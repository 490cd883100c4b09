"""From one epoch to the next: how a job starts, repairs itself, and stops. Pure."""

from __future__ import annotations

from dataclasses import replace

from megatron_resilience import exits
from megatron_resilience.control.events import Action, Note, Publish, Stop
from megatron_resilience.control.record import Phase, Record
from megatron_resilience.topology.epoch import Epoch

_REMEMBERED = 5
FRUITLESS_LIMIT = 8
"""Recoveries in a row without a completed step, after which the fault is not in the machines."""


class Epochs(Record):
    """Publishes epochs."""

    def _start(self, why: str) -> list[Action]:
        slots = tuple(self.alive[: self.settings.slots])
        return self._publish(Epoch(1, why, slots, self.settings.nproc_per_node, fresh=True))

    def _again(
        self,
        cause: str,
        slots: tuple[str, ...] | None = None,
        newcomers: tuple[int, ...] = (),
        fresh: bool = False,
        lost: tuple[str, ...] = (),
    ) -> list[Action]:
        assert self.epoch is not None
        self.restarts += 1
        self.fruitless += 1
        before = f"; before that: {'; '.join(self.history)}" if self.history else ""
        self.history = [*self.history, f"[{self.epoch.number + 1}] {cause}"][-_REMEMBERED:]
        if self.fruitless > FRUITLESS_LIMIT:
            return self._stop(
                exits.FAILED, f"{cause}; {FRUITLESS_LIMIT} recoveries in a row did not lead to a completed step{before}"
            )
        if self.restarts > self.settings.max_restarts:
            return self._stop(
                exits.FAILED,
                f"{cause}; {self.settings.max_restarts} faults were repaired before (--max-restarts), now the job stops{before}",
            )
        return self._next(cause, slots, newcomers, fresh, lost)

    def _next(
        self,
        cause: str,
        slots: tuple[str, ...] | None,
        newcomers: tuple[int, ...],
        fresh: bool = False,
        lost: tuple[str, ...] = (),
    ) -> list[Action]:
        """The next epoch."""
        assert self.epoch is not None
        begun = self.phase not in (Phase.STARTING, Phase.FORMING)
        # Ranks that were new in an epoch that nobody finished are still new.
        waiting = self.epoch.newcomers if self.phase is Phase.RECOVERING else ()
        return self._publish(
            replace(
                self.epoch,
                number=self._next_number(),
                cause=cause,
                before=None,
                slots=slots or self.epoch.slots,
                fresh=fresh or not begun,
                lost=lost or self.epoch.lost,
                newcomers=tuple(sorted({*newcomers, *waiting})),
            )
        )

    def _publish(self, epoch: Epoch) -> list[Action]:
        epoch = replace(epoch, domains=tuple(self.domains[node] for node in epoch.slots))
        self.epoch = epoch
        self.phase = Phase.STARTING if epoch.fresh else Phase.RECOVERING
        self._ready, self._joined, self._finished, self._exited = set(), set(), set(), set()
        self._held, self._planned, self._broken_at, self._broken = {}, False, None, set()
        return [
            *self._epoch_begins(epoch),
            Publish(epoch),
            Note("epoch", {"epoch": epoch.number, "cause": epoch.cause}),
        ]

    def _epoch_begins(self, epoch: Epoch) -> list[Action]:
        """What else an epoch changes."""
        return []

    def _stop(self, status: int, message: str) -> list[Action]:
        self.phase, self.switch = Phase.ENDED, None
        return [Stop(status, message), Note("stopped", {"status": status, "message": message})]

    def _is_current(self, epoch: int) -> bool:
        return self.epoch is not None and self.epoch.number == epoch

    def _next_number(self) -> int:
        self.numbers = max(self.numbers, self.epoch.number if self.epoch else 0) + 1
        return self.numbers
