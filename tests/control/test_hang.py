import torch.distributed
from hypothesis import given
from hypothesis import strategies as st

from megatron_resilience.control.hang import Finding, Standing, is_waiting, judge

WORLDS = st.integers(2, 12)


def standing(rank, answers=True, generation=7, overdue=True, waits=True):
    return Standing(rank, answers, generation, overdue, waits)


@given(WORLDS, st.data())
def test_the_one_that_computes_while_the_rest_waits(world, data):
    culprit = data.draw(st.integers(0, world - 1))
    verdict = judge([standing(r, waits=r != culprit) for r in range(world)])
    assert (verdict.finding, verdict.culprits) == (Finding.CULPRITS, (culprit,))


@given(WORLDS, st.data())
def test_the_one_that_is_a_step_behind(world, data):
    """The others may compute too: they are in a step that the culprit has not begun."""
    culprit = data.draw(st.integers(0, world - 1))
    ranks = [standing(r, generation=7 - (r == culprit), waits=r != culprit and bool(r % 2)) for r in range(world)]
    assert judge(ranks).culprits == (culprit,)


@given(st.lists(st.tuples(st.booleans(), st.booleans(), st.integers(5, 6), st.booleans()), min_size=1, max_size=8))
def test_nobody_is_blamed_without_proof(drawn):
    ranks = [Standing(r, a, g, s, w) for r, (a, s, g, w) in enumerate(drawn)]
    verdict = judge(ranks)
    if any(not s.answers or not s.overdue for s in ranks):
        assert verdict.finding is Finding.PATIENCE
    assert bool(verdict.culprits) == (verdict.finding is Finding.CULPRITS)
    assert all(not s.waits for s in ranks if s.rank in verdict.culprits)
    assert 2 * len(verdict.culprits) <= len(ranks)


def test_all_wait_and_all_compute():
    assert judge([standing(r) for r in range(4)]).finding is Finding.ALL_WAIT
    assert judge([standing(r, waits=False) for r in range(4)]).finding is Finding.SLOW
    assert judge([standing(r, waits=r == 0) for r in range(4)]).finding is Finding.UNCLEAR


def test_what_waiting_looks_like():
    assert is_waiting(torch.distributed.__file__.replace("__init__", "distributed_c10d"), "work.wait()")
    assert is_waiting("/x/megatron/core/param_and_grad_buffer.py", "self.grad_reduce_handle.wait()")
    assert is_waiting("/x/megatron/training/training.py", "loss = value.item()")
    assert not is_waiting("/x/dataset.py", "return self.index[i]")
