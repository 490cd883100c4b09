"""Which global batches a layout will have to train, where they grow (Megatron's ``--step-batch-size-schedule``). Pure."""

from __future__ import annotations

from megatron_resilience.errors import ConfigurationError

Steps = tuple[tuple[int, int], ...]
"""``(samples, batch)``, ascending: from so many consumed samples on, a global batch has so many samples."""


def batch_at(steps: Steps, consumed: int) -> int:
    """Samples of the global batch that follows ``consumed`` samples."""
    return max(step for step in steps if step[0] <= consumed)[1]


def check_batches(steps: Steps, unit: int, iteration: int, consumed: int, at: int) -> None:
    """Whether a layout can train every batch from a generation on.

    Args:
        steps: of the schedule; the first begins with sample 0.
        unit: samples of a micro batch on all data-parallel ranks of the layout.
        iteration: completed now.
        consumed: samples consumed now.
        at: generation from which the layout trains; one that is over means now.

    Raises:
        ConfigurationError: names the first batch that it does not divide.
    """
    for _ in range(iteration, at):
        consumed += batch_at(steps, consumed)
    first = max(step for step in steps if step[0] <= consumed)
    for begin, batch in steps[steps.index(first) :]:
        if batch % unit:
            raise ConfigurationError(
                f"--step-batch-size-schedule has batches of {batch} samples from sample {begin} on, which {unit} "
                "(--micro-batch-size times DP) does not divide: change the layout later, use another DP, or other batches"
            )
