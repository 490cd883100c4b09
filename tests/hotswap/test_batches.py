"""A layout is refused for a batch that is still to come, and for no other."""

import pytest

from megatron_resilience.errors import ConfigurationError
from megatron_resilience.hotswap.batches import check_batches

# Iterations 0, 1, 2 have four samples, 3 to 6 eight, from then on twelve.
STEPS = ((0, 4), (12, 8), (44, 12))


def test_batches_that_are_over_do_not_matter():
    check_batches(STEPS, 4, 0, 0, 0)
    check_batches(STEPS, 12, 10, 80, 0)
    check_batches(STEPS, 12, 3, 12, 7)
    with pytest.raises(ConfigurationError, match="batches of 8 samples from sample 12 on, which 12"):
        check_batches(STEPS, 12, 3, 12, 6)
    with pytest.raises(ConfigurationError, match="batches of 4 samples from sample 0 on"):
        check_batches(STEPS, 8, 0, 0, 2)
    with pytest.raises(ConfigurationError, match="batches of 12 samples from sample 44 on"):
        check_batches(STEPS, 8, 0, 0, 3)


def test_the_schedule_may_begin_in_the_middle_of_a_step():
    check_batches(STEPS, 3, 5, 43, 6)
    with pytest.raises(ConfigurationError, match="from sample 12 on"):
        check_batches(STEPS, 3, 5, 43, 5)
