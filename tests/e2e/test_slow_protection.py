"""A slow send never stalls training: the log says since when nothing newer is safe, and when that has ended."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_resilience.observe.trace import differences
from tests.e2e.test_hot_swap import Oracle, longer
from tests.support.job import TRAIN_AND_DIE, job
from tests.support.template import Template

pytestmark = pytest.mark.e2e

SLOW = [3, 4]


def test_generations_are_skipped_and_said(template: Template, tmp_path: Path, oracle: Oracle) -> None:
    configuration = longer("tp2_dp2_bf16_overlap", 40)
    env = {"SLOW_ROUNDS": str(SLOW), "SLOW_RANK": "2"}
    extra = ("--deadpool", "--deadpool-max-stall", "0.05")
    with job(template, tmp_path, configuration, extra, spares=0, script=TRAIN_AND_DIE, env=env) as running:
        running.finish()
        assert differences(running.trace, oracle(configuration)) == []
        assert not running.of_kind("recovered") and not running.of_kind("broken")
        unprotected, protected = running.of_kind("unprotected"), running.of_kind("protected")
        assert unprotected and len(protected) == len(unprotected), "each time ends by itself"
        for begin, end in zip(unprotected, protected, strict=True):
            assert begin["since"] == end["unprotected_since"] < end["generation"]
            assert begin["time"] < end["time"]
        assert sum(end["missed"] for end in protected) > 0, "skipped generations are counted"
        assert "unprotected" in running.child.output
