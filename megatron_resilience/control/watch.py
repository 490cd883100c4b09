"""How long this node's ranks have been silent, or in one and the same step."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

PING_S = 0.5
_GAP_S = 2.0


class Alarm(enum.StrEnum):
    """What :meth:`Watch.look` noticed about a rank."""

    FROZEN = "no sign of life"
    STALLED = "no progress"


@dataclass
class Pulse:
    """What is known of one rank's process. Times in seconds of one clock that does not go back.

    Attributes:
        limit_s: silence, or time in one step, that is too long (the rank says it when it joins an epoch); 0 while the rank is
            not to be watched: during start-up, recovery and the end, where every wait has a limit of its own.
        generation: of the step it is in, or was in last.
        in_step: whether it is in one.
        waits: its last answer.
        protected: newest generation that it knows to be safe on other nodes too; None: none is at the moment.
    """

    limit_s: float = 0.0
    generation: int = -1
    in_step: bool = False
    waits: bool = False
    protected: int | None = None
    progressed: float = 0.0
    answered: float = 0.0
    asked: float | None = None
    alarmed: float = 0.0

    def begins(self, limit_s: float, now: float) -> None:
        """It trains from now on."""
        self.limit_s, self.in_step = limit_s, False
        self.progressed = self.answered = self.alarmed = now
        self.asked = None

    def rests(self) -> None:
        """It does not train any more, or not at the moment."""
        self.limit_s = 0.0

    def enters(self, generation: int, in_step: bool, now: float) -> None:
        """It begins a step, or ends one."""
        if in_step:
            self.generation = generation
        self.in_step, self.progressed, self.alarmed = in_step, now, now

    def overdue(self, now: float) -> bool:
        """Whether it has been in one step for too long."""
        return self.limit_s > 0 and self.in_step and now - self.progressed > self.limit_s

    def answers(self, waits: bool, now: float) -> None:
        """It reacted to a question."""
        self.waits, self.answered, self.asked = waits, now, None


@dataclass
class Watch:
    """Looks at all pulses of a node at intervals."""

    _looked: float | None = field(default=None)

    def look(self, pulses: dict[int, Pulse], now: float) -> tuple[list[int], dict[int, Alarm]]:
        """Which ranks are to be asked for a sign of life now, and which are alarming.

        A rank that is asked and does not answer is not asked again. An alarm about progress is repeated only after
        another whole limit.
        """
        gap = 0.0 if self._looked is None else now - self._looked
        self._looked = now
        if gap > _GAP_S:
            # We did not run ourselves (a suspended machine): nothing can be said of others.
            for pulse in pulses.values():
                pulse.progressed, pulse.answered, pulse.alarmed = (
                    t + gap for t in (pulse.progressed, pulse.answered, pulse.alarmed)
                )
        ask, alarms = [], {}
        for rank, pulse in pulses.items():
            if pulse.limit_s <= 0:
                continue
            if pulse.asked is None and now - pulse.answered >= PING_S:
                pulse.asked = now
                ask.append(rank)
            if pulse.asked is not None and now - pulse.answered > pulse.limit_s:
                alarms[rank] = Alarm.FROZEN
                pulse.rests()
            elif pulse.overdue(now) and now - pulse.alarmed > pulse.limit_s:
                alarms[rank] = Alarm.STALLED
                pulse.alarmed = now
        return ask, alarms
