"""Waiting for protection is bounded, whatever the network does."""

from hypothesis import given
from hypothesis import strategies as st

from megatron_resilience.deadpool.allowance import StallAllowance


@given(st.lists(st.tuples(st.floats(0, 100), st.floats(0, 50)), min_size=1, max_size=50))
def test_never_more_than_the_limit_and_the_share(steps):
    """Each step: so long without waiting, then so long wished for."""
    allowance, now, waited = StallAllowance(10.0), 0.0, 0.0
    for quiet, wished in steps:
        now += quiet
        wait = min(wished, allowance.available(now))
        allowance.spend(wait)
        now, waited = now + wait, waited + wait
        assert wait <= 10.0
        assert waited <= 10.0 + 0.01 * now + 1e-6


def test_a_hiccup_is_waited_out_and_paid_back():
    allowance = StallAllowance(10.0)
    assert allowance.available(0.0) == 10.0
    allowance.spend(10.0)
    assert allowance.available(10.0) == 0.1
    assert allowance.available(10_000.0) == 10.0
