"""A whole job of the generation protocol in one process: the product's own decisions, every delay in a test's hand.

``Ledger`` says what may be written, ``Segment`` seals and lists it, ``partners`` places it, ``plan_restore`` chooses. What the
model adds is only what the machine would: when a copy, a message, a reduction or a death happens. A rank's payload
is its generation and number, so that a buffer written at the wrong time shows.
"""

from __future__ import annotations

import random
import struct
from dataclasses import dataclass, field

from megatron_resilience.deadpool.placement import partners
from megatron_resilience.deadpool.recovery import Holding, RestorePlan, plan_restore
from megatron_resilience.state.ledger import Ledger
from megatron_resilience.state.segment import Segment, Shape, Slot, sealed_generations

SHAPE = Shape(16, bytes(16))
_CONTENT = struct.Struct("<qq")


def _segment() -> Segment:
    return Segment(memoryview(bytearray(SHAPE.segment_bytes)), SHAPE)


def _fill(slot: Slot, generation: int, rank: int) -> None:
    _CONTENT.pack_into(slot.payload, 0, generation, rank)


@dataclass
class Round:
    """One rank's part in the round of one generation."""

    generation: int
    slot: int | None
    sent: set[int] = field(default_factory=set)
    received: set[int] = field(default_factory=set)
    complete: bool = True
    contributed: bool = False


@dataclass
class Rank:
    """One rank: its segment and those it keeps, its place in training, its rounds in order."""

    number: int
    node: str
    own: Segment = field(default_factory=_segment)
    kept: dict[int, Segment] = field(default_factory=dict)
    ledger: Ledger = field(default_factory=Ledger)
    entered: int = -1
    copying: tuple[int, int] | None = None
    rounds: list[Round] = field(default_factory=list)
    skipped: set[int] = field(default_factory=set)


class Job:
    """Ranks on nodes, driven by :meth:`step` in any order a generator of random numbers wants.

    Args:
        nodes: node of each rank; ``domains`` its failure domain.
        dp_groups: of the layout.
        replicas: copies elsewhere.
        chance: decides what happens next.
    """

    def __init__(
        self, nodes: list[str], domains: list[str], dp_groups: list[list[int]], replicas: int, chance: random.Random
    ) -> None:
        self.nodes, self.domains, self.dp_groups, self.replicas = nodes, domains, dp_groups, replicas
        self.chance = chance
        self.ranks = [Rank(number, node) for number, node in enumerate(nodes)]
        self.newest = -1
        self.wire: list[tuple[int, int, int, int | None]] = []
        self.outcomes: dict[int, bool] = {}
        self.contributions: dict[int, dict[int, bool]] = {}
        self.said = False
        self._place()

    # -- what may happen ---------------------------------------------------------------------------

    def step(self) -> None:
        """Lets one rank do one thing that it could do now; which, is chance."""
        moves = [(self._enter, r) for r in self.ranks if self._may_enter(r)]
        moves += [(self._copied, r) for r in self.ranks if r.copying is not None]
        moves += [(self._send, r) for r in self.ranks if self._sends(r)]
        moves += [(self._contribute, r) for r in self.ranks if self._may_contribute(r)]
        moves += [(self._learn, r) for r in self.ranks if r.rounds and r.rounds[0].generation in self.outcomes]
        deliveries = len(self.wire)
        pick = self.chance.randrange(len(moves) + deliveries)
        if pick < len(moves):
            move, rank = moves[pick]
            move(rank)
        else:
            self._deliver(pick - len(moves))

    def _may_enter(self, rank: Rank) -> bool:
        # The collectives of a step connect all ranks; the copy must be done before the optimizer changes the state.
        behind = min(r.entered for r in self.ranks)
        return rank.entered == behind and rank.copying is None

    def _enter(self, rank: Rank) -> None:
        """The step after ``entered + 1`` begins: a slot is filled, or after a wait of any length skipped."""
        rank.entered += 1
        generation = rank.entered
        held = rank.ledger.slot_of(generation)
        if held is not None:
            self.newest = max(self.newest, generation)
            rank.rounds.append(Round(generation, held))
            return
        index = rank.ledger.writable()
        if index is None:
            # The real rank waits up to its allowance; here it gives up at once, or comes back later.
            if self.chance.random() < 0.9:
                rank.entered -= 1
                return
            self.newest = max(self.newest, generation)
            rank.skipped.add(generation)
            rank.rounds.append(Round(generation, None))
            return
        self.newest = max(self.newest, generation)
        rank.ledger.write(index, generation)
        rank.own.slots[index].open()
        rank.copying = (generation, index)

    def _copied(self, rank: Rank) -> None:
        assert rank.copying is not None
        generation, index = rank.copying
        slot = rank.own.slots[index]
        _fill(slot, generation, rank.number)
        slot.seal(1, generation, slot.write_record({}))
        rank.copying = None
        rank.rounds.append(Round(generation, index))

    def _sends(self, rank: Rank) -> list[int]:
        # One round at a time, as the product's rounds thread has it.
        return [p for p in self.partners[rank.number] if p not in rank.rounds[0].sent] if rank.rounds else []

    def _send(self, rank: Rank) -> None:
        to = self.chance.choice(self._sends(rank))
        current = rank.rounds[0]
        current.sent.add(to)
        self.wire.append((rank.number, to, current.generation, current.slot))
        if current.slot is not None:
            # Begins to arrive: from here to the seal the keeper's slot holds nothing.
            self.ranks[to].kept[rank.number].slots[current.slot].open()

    def _deliver(self, index: int) -> None:
        sender, to, generation, slot_index = self.wire[index]
        keeper = self.ranks[to]
        expected = next((r for r in keeper.rounds if not r.contributed), None)
        if expected is None or expected.generation != generation:
            return  # it waits in the network until the keeper's own round is there
        self.wire.pop(index)
        expected.received.add(sender)
        if slot_index is None:
            expected.complete = False
            return
        source, target = self.ranks[sender].own.slots[slot_index], keeper.kept[sender].slots[slot_index]
        target.payload[:] = source.payload
        target.seal(1, generation, target.write_record({}))

    def _may_contribute(self, rank: Rank) -> bool:
        if not rank.rounds or rank.rounds[0].contributed:
            return False
        current = rank.rounds[0]
        return current.sent == set(self.partners[rank.number]) and current.received == set(rank.kept)

    def _contribute(self, rank: Rank) -> None:
        current = rank.rounds[0]
        current.contributed = True
        votes = self.contributions.setdefault(current.generation, {})
        votes[rank.number] = current.complete and current.slot is not None
        if len(votes) == len(self.ranks):
            self.outcomes[current.generation] = all(votes.values())

    def _learn(self, rank: Rank) -> None:
        current = rank.rounds.pop(0)
        committed = self.outcomes[current.generation]
        rank.ledger.resolve(current.generation, committed)
        self.said |= committed

    # -- deaths ------------------------------------------------------------------------------------

    def committed(self) -> int | None:
        """Newest generation that any rank knows to be complete."""
        known = [r.ledger.committed for r in self.ranks if r.ledger.committed is not None]
        return max(known, default=None)

    def protected(self) -> bool:
        """Some rank learned that a round of this epoch was committed: what was lost is replicated again, and it is said."""
        return self.said

    def kill(self, dead: set[str]) -> RestorePlan:
        """Nodes die with their memory, newcomers take their ranks; training goes on from what the plan says.

        Raises:
            StateError: no generation is complete.
            AssertionError: a copy does not hold what its header says.
        """
        replaced = {node: f"{node}'" for node in dead}
        held = [h for rank in self.ranks if rank.node not in dead for h in self._holdings(rank)]
        self.nodes = [replaced.get(node, node) for node in self.nodes]
        plan = plan_restore(1, self.nodes, held)
        fresh = [Rank(r.number, replaced.get(r.node, r.node)) for r in self.ranks]
        for rank, source in zip(fresh, plan.sources, strict=True):
            old = self.ranks[source.holder]
            segment = old.own if source.holder == rank.number else old.kept[rank.number]
            slot = segment.slots[source.slot]
            assert slot.verify().generation == plan.generation
            assert _CONTENT.unpack_from(slot.payload) == (plan.generation, rank.number)
            target = rank.own.slots[source.slot]
            target.payload[:] = slot.payload
            target.seal(1, plan.generation, target.write_record({}))
            rank.ledger.resume(plan.generation, source.slot)
            rank.entered = plan.generation - 1
        for rank in fresh:
            before = self.ranks[rank.number]
            if before.node not in dead:
                rank.kept = before.kept
        self.ranks = fresh
        self.newest, self.wire, self.outcomes, self.contributions, self.said = plan.generation, [], {}, {}, False
        self._place()
        for rank in self.ranks:
            for segment in rank.kept.values():
                for slot in segment.slots:
                    header = slot.header()
                    if header is not None and header.generation > plan.generation:
                        slot.discard()
        return plan

    def _holdings(self, rank: Rank) -> list[Holding]:
        found = []
        for owner, segment in [(rank.number, rank.own), *rank.kept.items()]:
            for index, slot in enumerate(segment.slots):
                (header, *_) = sealed_generations(_twice(slot))
                if header is not None:
                    found.append(Holding(owner, header.generation, index, rank.number, rank.node))
        return found

    def _place(self) -> None:
        self.partners = partners(self.nodes, self.domains, self.dp_groups, self.replicas)
        for rank in self.ranks:
            keeps = [owner for owner, keepers in enumerate(self.partners) if rank.number in keepers]
            rank.kept = {owner: rank.kept.get(owner) or _segment() for owner in keeps}


def _twice(slot: Slot) -> memoryview:
    """A segment whose first slot begins with this slot's header, as an agent would read it."""
    whole = bytearray(SHAPE.segment_bytes)
    head = slot._head
    whole[: len(head)] = head
    return memoryview(whole)
