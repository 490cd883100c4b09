"""There is always a complete generation within the promised distance: any delays, any order, any deaths."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.protocol import Job

LAYOUTS = st.sampled_from(
    # (nodes, ranks per node, data-parallel groups)
    [
        (2, 1, lambda n: [[0, 1]]),
        (2, 2, lambda n: [[0, 2], [1, 3]]),  # TP2 x DP2
        (2, 2, lambda n: [[0, 1], [2, 3]]),  # PP2 x DP2: the ring stays on its node
        (2, 2, lambda n: [[r] for r in range(n)]),  # DP1
        (3, 1, lambda n: [[0, 1, 2]]),
        (4, 1, lambda n: [[0, 1, 2, 3]]),
        (4, 1, lambda n: [[0, 2], [1, 3]]),
    ]
)


def job(layout, replicas: int, chance: random.Random) -> tuple[Job, list[str]]:
    count, per_node, groups = layout
    nodes = [f"n{i}" for i in range(count)]
    placed = [node for node in nodes for _ in range(per_node)]
    return Job(placed, placed, groups(len(placed)), replicas, chance), nodes


def run(layout, replicas: int, seed: int, deaths: int) -> None:
    chance = random.Random(seed)
    replicas = min(replicas, layout[0] - 1)
    training, _ = job(layout, replicas, chance)
    for _ in range(deaths):
        for _ in range(chance.randrange(10, 300)):
            training.step()
        while not training.protected():
            training.step()
        for _ in range(chance.randrange(60)):
            training.step()
        promised = training.committed()
        newest, skipped = training.newest, set().union(*(r.skipped for r in training.ranks))
        dead = set(chance.sample(sorted(set(training.nodes)), chance.randint(1, replicas)))
        plan = training.kill(dead)
        assert promised is not None and plan.generation >= promised, "what was said to be safe was lost"
        if not skipped & set(range(promised + 1, newest + 1)):
            # Nobody has said "unprotected": only the step that was interrupted and the one before are done again.
            assert plan.generation >= newest - 1, "more is done again than was promised"


@given(LAYOUTS, st.integers(1, 2), st.integers(0, 2**32))
@settings(max_examples=150, deadline=None)
def test_what_is_promised_survives_any_deaths(layout, replicas, seed):
    run(layout, replicas, seed, deaths=3)


@pytest.mark.full
@given(LAYOUTS, st.integers(1, 3), st.integers(0, 2**32))
@settings(max_examples=5000, deadline=None)
def test_what_is_promised_survives_any_deaths_at_length(layout, replicas, seed):
    run(layout, replicas, seed, deaths=5)


def test_a_ledger_that_forgets_the_rule_is_caught(monkeypatch):
    """The model sees what it is for: two slots in turn, as a first idea would have it, lose a generation."""
    from megatron_resilience.state.ledger import Ledger

    def alternate(self):
        return min(range(2), key=lambda i: -1 if self.slots[i] is None else self.slots[i])

    monkeypatch.setattr(Ledger, "writable", alternate)
    with pytest.raises(Exception, match=r"lost|complete in memory|done again|no sealed generation"):
        for seed in range(300):
            run((2, 2, lambda n: [[0, 2], [1, 3]]), 1, seed, deaths=3)
