"""Where the time of a recovery went."""

from megatron_resilience.observe.report import PHASES, Recovery, phases

MARKS = ("settled", "met", "restored", "verified", "committed", "first_step")


def test_a_phase_ends_with_the_last_rank():
    early = dict(zip(MARKS, (10.1, 10.4, 10.5, 10.55, 10.6, 10.9), strict=True))
    late = dict(zip(MARKS, (10.3, 10.4, 10.5, 10.65, 10.7, 11.0), strict=True))
    seconds = phases(9.9, 10.0, {0: early, 1: late})
    assert tuple(seconds) == PHASES
    assert [round(s, 3) for s in seconds.values()] == [0.1, 0.3, 0.1, 0.1, 0.2, 0.3]
    text = Recovery(2, "node b is gone", 7, 1, seconds).text()
    assert "went on from generation 7, 1 step executed again; 1.10 s" in text


def test_clocks_that_disagree_never_make_a_phase_negative():
    marks = dict.fromkeys(MARKS, 9.0)
    assert all(s >= 0 for s in phases(10.0, 10.1, {0: marks}).values())
