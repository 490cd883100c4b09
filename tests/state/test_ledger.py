"""The slot rule keeps a complete generation alive, whoever is slow, skips, or dies."""

from hypothesis import given
from hypothesis import strategies as st

from megatron_resilience.state.ledger import Ledger


class Rank:
    """One rank's slots and what it has done of each round."""

    def __init__(self):
        self.ledger = Ledger()
        self.entered = 0
        self.sealed = {}
        self.contributed = -1
        self.learned = -1

    def holdings(self):
        """Generations that lie sealed in its slots."""
        return {g for g in self.ledger.slots if g is not None and self.sealed.get(g)}


@given(
    st.integers(2, 4), st.lists(st.tuples(st.integers(0, 3), st.sampled_from(["enter", "copy", "learn"])), max_size=120)
)
def test_some_committed_generation_is_always_whole(size, moves):
    """Ranks act in any order; each may enter a step only when all others have entered the one before (its collectives).

    A death can come after any move: what matters is that at every moment the newest committed generation lies whole on
    every rank, and that it is never more than the rounds in flight behind.
    """
    ranks = [Rank() for _ in range(size)]
    outcome = {}
    for index, move in moves:
        rank = ranks[index % size]
        if move == "enter":
            # Entering the step after g means that every rank has entered the step after g - 1.
            if rank.entered > min(r.entered for r in ranks):
                continue
            if rank.sealed.get(rank.entered - 1) is False:
                continue  # the copy of the generation before is still running: the optimizer waits for it
            generation, slot = rank.entered, rank.ledger.writable()
            rank.entered += 1
            if slot is None:
                rank.sealed[generation] = None  # skipped
            else:
                rank.ledger.write(slot, generation)
                rank.sealed[generation] = False
        elif move == "copy":
            for generation, state in rank.sealed.items():
                if state is False:
                    rank.sealed[generation] = True
        else:
            # Rounds are a reduction: nobody learns before all have contributed, and all learn the same.
            generation = rank.learned + 1
            states = [r.sealed.get(generation, False) for r in ranks]
            if False in states:
                continue
            outcome.setdefault(generation, all(states))
            rank.learned = generation
            rank.ledger.resolve(generation, outcome[generation])
        committed = [g for g, whole in outcome.items() if whole]
        if committed:
            whole = set.intersection(*(r.holdings() for r in ranks))
            assert whole, f"nothing is whole any more: {[r.ledger for r in ranks]}"
            assert max(whole) >= max(
                (g for g in committed if all(r.learned >= g for r in ranks)), default=min(whole)
            ), "a generation that everybody knew to be committed was overwritten"


def test_an_unresolved_round_keeps_both_slots():
    ledger = Ledger()
    ledger.write(0, 0)
    ledger.resolve(0, True)
    ledger.write(1, 1)
    assert ledger.writable() is None
    ledger.resolve(1, False)
    assert ledger.writable() == 1, "generation 0 is the newest committed one"


def test_resuming_frees_all_but_the_generation_resumed_from():
    ledger = Ledger(slots=[4, 5], committed=4, resolved=4)
    ledger.resume(4, 0)
    assert (ledger.writable(), ledger.slot_of(4), ledger.slot_of(5)) == (1, 0, None)
