from megatron_resilience.control.hang import Finding, Standing
from megatron_resilience.control.survey import EXPIRES_S, Surveys


def standings(ranks, waits=True):
    return [Standing(r, True, 1, True, waits) for r in ranks]


def test_one_at_a_time_until_all_nodes_have_answered():
    surveys = Surveys()
    assert surveys.begin(("a", "b"), 0.0)
    assert not surveys.begin(("a", "b"), 1.0)
    assert not surveys.answer("a", 1, standings([0, 1]))
    assert not surveys.answer("a", 1, standings([0, 1])), "an answer counts once"
    assert surveys.answer("b", 1, standings([2, 3], waits=False)[:1] + standings([3]))
    verdict = surveys.verdict(4)
    assert verdict is not None and (verdict.finding, verdict.culprits) == (Finding.CULPRITS, (2,))


def test_a_survey_that_a_dead_node_owes_expires():
    surveys = Surveys()
    assert surveys.begin(("a", "b"), 0.0)
    assert surveys.begin(("a", "c"), EXPIRES_S + 1)
    assert not surveys.answer("a", 1, standings([0])), "it belongs to the one before"


def test_ranks_that_are_just_starting_make_it_worthless():
    surveys = Surveys()
    surveys.begin(("a",), 0.0)
    assert surveys.answer("a", 1, standings([0]))
    assert surveys.verdict(2) is None
