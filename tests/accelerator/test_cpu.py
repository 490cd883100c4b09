"""What the CPU accelerator maps, each in a forked process: pytest's own torch stays as it is."""

from __future__ import annotations

import pytest

PROGRAMS = "tests.accelerator.programs"


@pytest.mark.parametrize(
    "program",
    [
        "nccl_is_refused",
        "tensors_land_on_the_cpu",
        "loaders_leave_the_device_stream_alone",
        "installing_twice_changes_nothing",
    ],
)
def test_mapping(template, program):
    child = template.fork(f"{PROGRAMS}:{program}")
    assert child.wait(60) == 0, child.output


def test_collectives_of_unequal_shapes(template):
    for result in template.run_ranks(3, [], target=f"{PROGRAMS}:unequal_shapes"):
        assert result.returncode == 0, result.output
