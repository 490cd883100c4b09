"""Plans of all endpoints agree with a brute-force global plan, are minimal, and bring back what they took away."""

import numpy as np
import pytest
from hypothesis import assume, given

from megatron_resilience.routing.cost import Cluster
from megatron_resilience.routing.plan import plan_endpoint
from megatron_resilience.routing.problem import Problem, relayout
from megatron_resilience.vps.catalogue import Catalogue
from megatron_resilience.vps.layout import Layout
from megatron_resilience.vps.space import StateSpace
from megatron_resilience.vps.tensors import Kind, LogicalTensor, Place
from tests.routing.exchange import exchange
from tests.routing.problems import problems
from tests.routing.reference import global_plan
from tests.vps.reference import held_by
from tests.vps.strategies import few, many

ONE_NODE = Cluster(ranks_per_node=1000)


def endpoints_of(problem):
    """Everybody who takes part."""
    return np.unique(np.concatenate([problem.source_at[problem.source_at >= 0], problem.target_at])).tolist()


def least_bytes(problem):
    """Bytes that must travel: what each target rank owns and its endpoint does not hold, element by element."""
    catalogue = problem.source.catalogue
    held = {}
    for rank, endpoint in enumerate(problem.source_at.tolist()):
        for key, mask in held_by(problem.source, rank).items():
            mine = held.setdefault(endpoint, {})
            mine[key] = mine.get(key, False) | mask
    exists = {t.name for i, t in enumerate(catalogue.tensors) if problem.source.instances.first[i] >= 0}
    total = 0
    for rank, endpoint in enumerate(problem.target_at.tolist()):
        for (name, copy), mask in held_by(problem.target, rank).items():
            if name not in exists:
                continue
            number = catalogue.number_of[name]
            fed = int(problem.source_copy[copy, number])
            missing = mask & ~held.get(endpoint, {}).get((name, fed), np.zeros_like(mask))
            total += int(missing.sum()) * catalogue.tensors[number].bytes_per_element
    return total


def check_exchange(problem):
    """Every element arrives once in its place (asserted by `exchange`), and no byte too many travels."""
    sent, _, _ = exchange(problem)
    assert sent == least_bytes(problem)


def check_projection(problem):
    """Each endpoint's plan is its part of the global one."""
    # No fragment is cut below this.
    problem = Problem(problem.source, problem.target, problem.source_at, problem.target_at, ONE_NODE, 1 << 40)
    expected = global_plan(problem)
    for endpoint in endpoints_of(problem):
        plan = plan_endpoint(problem, endpoint)
        moves = [(plan.sends, True), (plan.receives, False), (plan.keeps, False)]
        found = {fragment for move, out in moves for fragment in _fragments(move, endpoint, out)}
        assert found == {f for f in expected if endpoint in f[:2]}
        assert len(found) == sum(len(move) for move, _ in moves)


def _fragments(moves, endpoint, out):
    assert (moves.phase == 0).all()
    for i in range(len(moves)):
        start = tuple(int(getattr(moves.boxes, d + "0")[i]) for d in "oci")
        stop = tuple(int(getattr(moves.boxes, d + "1")[i]) for d in "oci")
        pair = (endpoint, int(moves.peer[i])) if out else (int(moves.peer[i]), endpoint)
        yield (*pair, int(moves.boxes.tensor[i]), int(moves.boxes.copy[i]), start, stop)


def check_there_and_back(problem):
    """Back from the target, everybody has what he had."""
    assume(not any(t.kind is Kind.RNG for t in problem.source.catalogue.tensors))
    _, _, memory = exchange(problem)
    home = np.arange(problem.source.layout.world)
    back = Problem(problem.target, problem.source, problem.target_at, home, problem.cluster, problem.grain)
    exchange(back, memory)


@few(25)
@given(problems())
def test_every_element_once_and_no_byte_too_many(problem):
    check_exchange(problem)


@few(12)
@given(problems(most=8, cluster=ONE_NODE))
def test_a_plan_is_the_projection_of_the_global_plan(problem):
    check_projection(problem)


@few(10)
@given(problems())
def test_there_and_back_is_the_identity(problem):
    check_there_and_back(problem)


@pytest.mark.full
@many()
@given(problems(most=16))
def test_thousands_of_exchanges(problem):
    check_exchange(problem)


@pytest.mark.full
@many()
@given(problems(most=10, cluster=ONE_NODE))
def test_thousands_of_projections(problem):
    check_projection(problem)


@pytest.mark.full
@many()
@given(problems())
def test_thousands_of_round_trips(problem):
    check_there_and_back(problem)


def test_nothing_moves_where_nothing_changes():
    catalogue = Catalogue("one", 1, 0, (LogicalTensor("w", (8, 8), layer=0),))
    space = StateSpace(catalogue, Layout(dp=4))
    assert exchange(relayout(space, space))[0] == 0


def test_what_nobody_holds_is_named():
    catalogue = Catalogue("one", 0, 0, (LogicalTensor("w", (8, 64), place=Place.FIRST),))
    source, target = StateSpace(catalogue, Layout(dp=4)), StateSpace(catalogue, Layout(dp=3))
    problem = relayout(source, target, lost=(1, 2), cluster=Cluster(ranks_per_node=1))
    with pytest.raises(ValueError, match=r"nobody holds w\["):
        problem.check_covered()
    with pytest.raises(ValueError, match="nobody holds a part of w that target rank 0"):
        plan_endpoint(problem, 0)
