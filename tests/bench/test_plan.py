"""The bench measures what it says: real plans whose union is the whole change, against goals that can be missed."""

import json
from pathlib import Path

import pytest

from megatron_resilience.bench import plan as bench
from megatron_resilience.routing.cost import Cluster
from megatron_resilience.routing.problem import Problem, relayout
from megatron_resilience.vps.families import build_catalogue
from megatron_resilience.vps.layout import parse_layout
from megatron_resilience.vps.space import StateSpace
from tests.routing.exchange import exchange
from tests.routing.test_plan import check_projection, least_bytes
from tests.vps.models import DENSE, MOE

RESULTS = Path(__file__).parents[2] / "docs" / "results" / "plan.json"


SMALL = {
    "70b-512": (DENSE, "TP2·PP4·DP2", "TP1·PP2·DP8"),
    "235b-128": (MOE, "TP4·PP2·DP2·EP2·ETP1", "TP2·PP1·DP8·EP4·ETP1"),
}
"""Cases of the bench with the same dimensions changed, in sizes for one process."""


@pytest.mark.parametrize("case", SMALL)
def test_the_union_of_plans_is_the_brute_force_plan_at_small_scale(case):
    shape, *texts = SMALL[case]
    real = [parse_layout(text) for text in next(c for c in bench.CASES if c[0] == case)[2:4]]
    spaces = [StateSpace(build_catalogue(shape), parse_layout(text)) for text in texts]
    for name in ("tp", "pp", "dp", "ep"):
        large, few = ([getattr(x, name) for x in side] for side in (real, [s.layout for s in spaces]))
        assert (large[0] > large[1], large[0] < large[1]) == (few[0] > few[1], few[0] < few[1]), name
    problem = relayout(*spaces)
    assert problem.source.layout.world <= 16
    check_projection(problem)
    sent, plans, _ = exchange(problem)
    assert sent == least_bytes(problem) > 0
    # On nodes of two, so that all rules take part.
    spread = Problem(problem.source, problem.target, problem.source_at, problem.target_at, Cluster(2), 64)
    assert exchange(spread)[0] == sent
    assert all(plan.sends.total_bytes or plan.receives.total_bytes for plan in plans.values())


def test_sampled_plans_agree_with_each_other():
    row = bench.measure("70b-512", "llama2-70b", "TP8·PP8·DP8", "TP4·PP4·DP32", 0.5, 16)
    assert row["sampled_ranks"] == 16
    assert row["pairs_checked"] > 0
    assert row["seconds"] == pytest.approx(row["tables_seconds"] + row["rank_seconds"])
    assert row["catalogue_seconds"] > 0, "timed apart"


def test_a_missed_goal_is_a_failure(monkeypatch, capsys):
    monkeypatch.setattr(bench, "CASES", [("70b-512", "llama2-70b", "TP8·PP8·DP8", "TP4·PP4·DP32", 1e-6)])
    assert bench.main(["--case", "70b-512"]) == 1
    assert "goals missed: 70b-512" in capsys.readouterr().err


def test_growth_with_ranks_is_printed():
    rows = [{"model": "m", "ranks": r, "seconds": s} for r, s in ((128, 0.2), (10240, 0.3))]
    assert "m: 80x the ranks, 1.50x the time" in bench._growth(rows)


def test_published_results_are_of_these_cases_and_meet_their_goals():
    rows = json.loads(RESULTS.read_text())["rows"]
    assert [(r["name"], r["model"], r["from"], r["to"], r["goal_seconds"]) for r in rows] == bench.CASES
    assert all(r["seconds"] <= r["goal_seconds"] and r["rss_gib"] <= bench.MEMORY_GOAL_GIB for r in rows)
