"""Schedules are proper edge colourings, and programs in their order never deadlock, whatever the buffering."""

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_resilience.routing.plan import plan_endpoint
from megatron_resilience.routing.program import Exchange, program
from megatron_resilience.routing.schedule import list_rounds, order_of, sum_rounds, xor_rounds
from megatron_resilience.routing.staging import Chunk
from tests.routing.problems import problems
from tests.routing.simulator import Deadlock, blocking, posted, run
from tests.vps.strategies import few, many


def schedules(traffic, endpoints):
    """Every schedule by name."""
    return {"xor": xor_rounds(endpoints), "sum": sum_rounds(endpoints), "list": list_rounds(traffic)}


@few(40)
@given(st.integers(2, 40), st.randoms(use_true_random=False))
def test_an_endpoint_talks_with_one_peer_per_round(endpoints, dice):
    pairs = [(a, b) for a in range(endpoints) for b in range(endpoints) if a != b]
    traffic = {pair: dice.randint(1, 1000) for pair in dice.sample(pairs, dice.randint(1, len(pairs)))}
    for name, rounds in schedules(traffic, endpoints).items():
        busy = set()
        for a, b in {(min(p), max(p)) for p in traffic}:
            assert rounds(a, b) == rounds(b, a) >= 0
            for endpoint in (a, b):
                assert (endpoint, rounds(a, b)) not in busy, f"{name}: {endpoint} has two peers in a round"
                busy.add((endpoint, rounds(a, b)))


def test_rounds_are_few():
    complete = {(a, b): 1 for a in range(12) for b in range(12) if a != b}
    most = {name: max(rounds(a, b) for a, b in complete) + 1 for name, rounds in schedules(complete, 12).items()}
    assert most["xor"] <= 16
    assert most["sum"] <= 12
    assert most["list"] <= 2 * 11 - 1


def run_programs(programs, dice, room, how):
    """Messages of a run in which an arbitrary possible action happens next, always."""
    return run({e: how(steps, e) for e, steps in programs.items()}, room, dice.choice)


def random_programs(dice, endpoints):
    """Programs of an arbitrary traffic with arbitrary numbers of chunks and phases, not only such as plans make."""
    nothing = np.zeros(0, np.int64)
    sizes = {}
    for phase in range(dice.randint(1, 3)):
        for a in range(endpoints):
            for b in range(endpoints):
                if a != b and dice.random() < 0.5:
                    sizes[phase, a, b] = dice.randint(1, 3)
    traffic = {(a, b): n for (_, a, b), n in sizes.items()}
    rounds = dice.choice(list(schedules(traffic, endpoints).values()))
    programs = {e: [] for e in range(endpoints)}
    for endpoint in programs:
        peers = {(p, a + b - endpoint) for p, a, b in sizes if endpoint in (a, b)}
        for phase, number, peer in sorted((p, rounds(endpoint, peer), peer) for p, peer in peers):
            out, back = sizes.get((phase, endpoint, peer), 0), sizes.get((phase, peer, endpoint), 0)
            for i in range(max(out, back)):
                chunk = Chunk(peer, phase, i, 1, nothing, nothing, nothing)
                pair = (chunk if i < out else None, chunk if i < back else None)
                programs[endpoint].append(Exchange(phase, number, peer, *pair))
    return programs, sum(sizes.values())


@pytest.mark.parametrize("how", [posted, blocking])
@few(40)
@given(dice=st.randoms(use_true_random=False), endpoints=st.integers(2, 9), room=st.integers(0, 3))
def test_no_traffic_deadlocks(how, dice, endpoints, room):
    programs, messages = random_programs(dice, endpoints)
    assert run_programs(programs, dice, room, how) == messages


def check_plan_programs(problem, seed):
    """Programs of real plans run to their ends under every schedule, and each chunk is alike on both sides."""
    dice = random.Random(seed)
    endpoints = np.unique(np.concatenate([problem.source_at[problem.source_at >= 0], problem.target_at])).tolist()
    plans = {e: plan_endpoint(problem, e) for e in endpoints}
    traffic = {(e, peer): 1 for e, plan in plans.items() for _, peer in plan.sends.per_message()}
    for rounds in schedules(traffic, max(endpoints) + 1).values():
        programs = {e: list(program(plan, rounds, 256)) for e, plan in plans.items()}
        out = [
            (e, x.peer, x.phase, *key(plans[e].sends, x.outgoing)) for e, p in programs.items() for x in p if x.outgoing
        ]
        back = [
            (x.peer, e, x.phase, *key(plans[e].receives, x.incoming))
            for e, p in programs.items()
            for x in p
            if x.incoming
        ]
        assert sorted(out) == sorted(back), "the two sides cut a message differently"
        for room in (0, 1, 5):
            for how in (posted, blocking):
                assert run_programs(programs, dice, room, how) == len(out)


def key(moves, chunk):
    """What a chunk is, in words that both sides share."""
    names = ("tensor", "copy", "o0", "o1", "c0", "c1", "i0", "i1")
    rows = [[int(getattr(moves.boxes, n)[f]) for n in names] for f in chunk.fragment.tolist()]
    return chunk.number, chunk.size, rows, chunk.begin.tolist(), chunk.end.tolist()


@few(12)
@given(problems(), st.integers(0, 1 << 30))
def test_no_plan_deadlocks(problem, seed):
    check_plan_programs(problem, seed)


@pytest.mark.full
@many()
@given(problems(most=16), st.integers(0, 1 << 30))
def test_thousands_of_plans_do_not_deadlock(problem, seed):
    check_plan_programs(problem, seed)


def test_the_simulator_finds_a_deadlock():
    # Each of three waits for the next one first.
    ring = {e: [[("send", (e + 1) % 3)], [("receive", (e - 1) % 3)]] for e in range(3)}
    with pytest.raises(Deadlock, match="wait for each other"):
        run(ring, 0, lambda possible: possible[0])
    assert run(ring, 1, lambda possible: possible[0]) == 3


def test_order_follows_the_rounds():
    assert order_of(1, np.array([3, 0, 2, 0]), xor_rounds(4)) == [0, 3, 2]
