"""What devices say, judged; and what becomes of a node that ails."""

from dataclasses import replace

import pytest

from megatron_resilience.control import events as e
from megatron_resilience.control.coordinator import Coordinator
from megatron_resilience.control.health import Reading, judge
from megatron_resilience.control.membership import Evidence
from tests.control.test_coordinator import SETTINGS, act, joined, only, running

WELL = Reading("device 0", uncorrected=2, remap_failed=False, links=18, temperature_c=60, shutdown_c=92)


@pytest.mark.parametrize(
    ("now", "grave", "says"),
    [
        (replace(WELL, lost=True), True, "lost"),
        (replace(WELL, xids=(79,)), True, "XID 79, the device has fallen off the bus"),
        (replace(WELL, xids=(31,)), False, "XID 31"),
        (replace(WELL, uncorrected=5), True, "3 memory errors"),
        (replace(WELL, remap_failed=True), True, "cannot be replaced"),
        (replace(WELL, links=17), True, "17 of 18 NVLinks"),
        (replace(WELL, temperature_c=88), False, "88 degrees, it switches itself off at 92"),
    ],
)
def test_what_has_gone_wrong_is_said_once(now, grave, says):
    (ailment,) = judge([WELL], [now])
    assert ailment.grave is grave and says in ailment.text
    assert judge([now], [replace(now, xids=())]) == []


def test_a_device_that_is_gone():
    assert judge([WELL], [])[0].grave


def test_nothing_is_wrong():
    assert judge([WELL], [WELL]) == []
    assert judge([], [replace(WELL, uncorrected=7, links=4)]) == [], "how it was before the job is nobody's news"
    assert judge([Reading("x")], [Reading("x")]) == [], "a device that says nothing"


def test_a_node_that_ails_is_left_for_a_spare_before_it_takes_ranks_down():
    machine = running()
    epoch = only(act(machine, e.NodeAiling("b", "XID 79")), e.Publish).epoch
    assert epoch.slots == ("a", "c") and "XID 79" in epoch.cause
    assert act(machine, e.NodeAiling("b", "XID 79")) == [], "it is known"


def test_without_a_healthy_spare_training_goes_on():
    machine = running()
    act(machine, e.NodeAiling("c", "lost"))
    actions = act(machine, e.NodeAiling("b", "XID 79"))
    assert not [a for a in actions if isinstance(a, (e.Publish, e.Stop))]
    heir = Coordinator.from_json(SETTINGS, machine.to_json())
    epoch = only(act(heir, e.NodeJoined("d", 3), e.NodeLost("a", Evidence.CLOSED)), e.Publish).epoch
    assert epoch.slots == ("d", "b"), "the healthy spare first"


def test_news_during_a_recovery_waits_for_its_end():
    machine = running(replace(SETTINGS, nnodes=4, spares=2))
    act(machine, e.NodeLost("a", Evidence.CLOSED))
    assert not [a for a in act(machine, e.NodeAiling("b", "XID 48")) if isinstance(a, e.Publish)]
    assert only(act(machine, *joined(2, 4)), e.Publish).epoch.slots == ("c", "d")
