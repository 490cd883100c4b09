import itertools

from hypothesis import given
from hypothesis import strategies as st

from megatron_resilience.control.classification import REPEATED, TABLE, Decision, Fault, Sign, classify

FAULTS = st.builds(
    Fault,
    sign=st.sampled_from(Sign),
    status=st.integers(-15, 3),
    begun=st.booleans(),
    spares=st.integers(0, 2),
    copies=st.booleans(),
    same_step=st.integers(0, 2),
    on_node=st.integers(1, REPEATED + 1),
    whole_node=st.booleans(),
)


def decision(sign, **more):
    return classify(Fault(sign, **more)).decision


@given(FAULTS)
def test_every_fault_has_a_decision_that_can_be_carried_out(fault):
    found = classify(fault).decision
    if found is Decision.REPLACE_NODE:
        assert fault.spares > 0
        assert fault.copies or fault.sign is Sign.NODE_GONE, "a living node is not left with the only copy on it"
    if fault.sign is Sign.NODE_GONE:
        assert found is not Decision.RESTART_RANK


def test_every_row_is_needed():
    some = itertools.product(Sign, (-9, 1), *[(False, True)] * 2, (0, 1), (0, 1), (1, REPEATED), *[(False, True)] * 2)
    reached = {classify(Fault(s, x, b, p, c, m, o, w, less)).reason for s, x, b, c, p, m, o, w, less in some}
    assert reached == {rule.reason for rule in TABLE}


def test_a_transient_fault_costs_no_spare():
    assert decision(Sign.RANK_ENDED, status=-9, spares=1) is Decision.RESTART_RANK
    assert decision(Sign.RANK_HUNG, status=-9, spares=1) is Decision.RESTART_RANK
    assert decision(Sign.CONNECTIONS_BROKE, spares=1) is Decision.RENEW
    assert decision(Sign.ALL_WAIT, spares=1) is Decision.RENEW


def test_repeated_and_node_wide_faults_replace_the_node_while_that_is_possible():
    assert decision(Sign.RANK_ENDED, on_node=REPEATED, spares=1) is Decision.REPLACE_NODE
    assert decision(Sign.RANK_ENDED, whole_node=True, spares=1) is Decision.REPLACE_NODE
    assert decision(Sign.RANK_ENDED, whole_node=True, spares=0) is Decision.RESTART_RANK
    assert decision(Sign.RANK_UNKILLABLE, spares=0) is Decision.STOP


def test_the_same_fault_twice_stops():
    assert decision(Sign.RANK_ENDED, same_step=1, spares=1) is Decision.STOP
    assert decision(Sign.RANK_HUNG, same_step=1, spares=1) is Decision.STOP
    assert decision(Sign.ALL_WAIT, same_step=1, spares=1) is Decision.STOP
