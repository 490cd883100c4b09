"""Which of a rank's two slots may be overwritten, and which generation is known to be complete everywhere.

The protocol, which every rank runs for every generation *g*, in order (a *round*):

1. copy the state into a writable slot and seal it, or skip the generation when no slot is writable;
2. send the slot to the rank's partner, receive those of the ranks it is partner of, seal them;
3. all ranks reduce what they hold: *g* is **committed** when every rank sealed its own copy and all the
   copies it keeps for others, otherwise the round is resolved without a commit.

The rule that keeps a complete generation alive whatever dies: **a slot may be written only when the round of
what it holds is resolved, and it does not hold the newest committed generation.** A rank that has not yet
learned the outcome of a round keeps both its slots, because another rank may already rely on the newer one.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from megatron_resilience.state.segment import SLOTS


@dataclass
class Ledger:
    """The state of one rank's slots.

    Attributes:
        slots: the generation that each slot holds or is being filled with; None when free.
        committed: newest generation known to be complete on all ranks, or None.
        resolved: newest generation whose round is known to have ended.
    """

    slots: list[int | None] = field(default_factory=lambda: [None] * SLOTS)
    committed: int | None = None
    resolved: int = -1

    def writable(self) -> int | None:
        """The slot that the next generation may be written to, or None: wait, or skip the generation."""
        for index, held in enumerate(self.slots):
            if held is None:
                return index
        for index, held in enumerate(self.slots):
            if held is not None and held <= self.resolved and held != self.committed:
                return index
        return None

    def write(self, slot: int, generation: int) -> None:
        """Notes that the slot is being filled with a generation newer than all before.

        Raises:
            ValueError: the slot may not be written, or the generation is not newer.
        """
        if slot != self.writable():
            raise ValueError(f"slot {slot} holds generation {self.slots[slot]}, which must stay")
        if generation <= max((g for g in self.slots if g is not None), default=-1):
            raise ValueError(f"generation {generation} is not newer than {self.slots}")
        self.slots[slot] = generation

    def resolve(self, generation: int, committed: bool) -> None:
        """Notes the outcome of a round; rounds resolve in order."""
        self.resolved = max(self.resolved, generation)
        if committed:
            self.committed = generation

    def slot_of(self, generation: int) -> int | None:
        """The slot that holds a generation, or None."""
        return self.slots.index(generation) if generation in self.slots else None

    def resume(self, generation: int, slot: int) -> None:
        """Starts again after a recovery to a generation that lies in ``slot``; all else is free."""
        self.slots = [None] * SLOTS
        self.slots[slot] = generation
        self.committed = generation
        self.resolved = generation
