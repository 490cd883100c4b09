"""Twenty swaps in one job leave nothing behind in the ranks that live through them."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_resilience.observe.trace import differences
from tests.e2e.test_hot_swap import Oracle, longer
from tests.support.job import job
from tests.support.template import Template

pytestmark = pytest.mark.e2e

SWAPS, SETTLED = 20, 5


def test_twenty_swaps_leave_survivors_as_they_were(template: Template, tmp_path: Path, oracle: Oracle) -> None:
    configuration = longer("tp2_dp2_bf16_overlap", 3 * SWAPS + 30)
    seen = []
    with job(template, tmp_path, configuration, spares=0) as running:
        running.wait_for_step(3)
        survivors = running.ranks(0)

        def flat() -> bool:
            # The last world's backends end a moment after it.
            return not seen or all(
                p.num_fds() <= fds and p.num_threads() <= threads
                for p, (fds, threads, _) in zip(survivors, seen[0], strict=True)
            )

        for swap in range(1, SWAPS + 1):
            running.ranks(1)[swap % 2].kill()
            running.wait_for(lambda swap=swap: len(running.of_kind("recovered")) == swap)
            running.wait_for_step(running.of_kind("recovered")[-1]["generation"] + 2)
            if swap >= SETTLED:
                running.wait_for(flat, timeout=20)
                seen.append([(p.num_fds(), p.num_threads(), p.memory_info().rss / 2**20) for p in survivors])
        running.finish()
        assert differences(running.trace, oracle(configuration)) == []
    for survivor in range(2):
        rss = [measured[survivor][2] for measured in seen]
        print(f"rank {survivor}: {[measured[survivor] for measured in seen]}")
        # Allocators keep some; a world that stays costs more than half a MiB each time.
        assert rss[-1] - rss[0] < 0.1 * len(seen) + 3
