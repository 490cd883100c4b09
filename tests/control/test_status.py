"""One look at a job, from what the coordinator and the nodes know."""

import json

import pytest

from megatron_resilience.control import events as e
from megatron_resilience.control.coordinator import Coordinator
from megatron_resilience.control.membership import Evidence
from megatron_resilience.control.status import find_node, status, text
from megatron_resilience.control.switching import Fallback
from megatron_resilience.errors import ConfigurationError
from tests.control.test_coordinator import act, joined, running

SEEN = {
    "a": {"ranks": [[0, 9, True, 8], [1, 9, True, 9]], "waiting": 0},
    "b": {"ranks": [[2, 9, True, 8], [3, 8, False, 8]], "waiting": 0},
    "c": {"ranks": [], "waiting": 4},
}


def test_what_one_rank_knows_to_be_complete_everywhere_is():
    now = status(running(), "a", SEEN)
    assert (now["phase"], now["generation"], now["protected"], now["lag"]) == ("running", 9, 9, 0)
    assert [slot["node"] for slot in now["slots"]] == ["a", "b"]
    assert now["spares"] == [{"node": "c", "waiting": 4, "suspect": False, "ailing": ""}]
    json.dumps(now)


def test_one_rank_that_is_unprotected_is_enough():
    seen = {**SEEN, "b": {"ranks": [[2, 9, True, None], [3, 8, False, 8]], "waiting": 0}}
    now = status(running(), "a", seen)
    assert now["protected"] is None and now["lag"] is None
    assert "UNPROTECTED at generation 9" in text(now)


def test_nodes_that_do_not_answer_are_shown():
    machine = running()
    act(machine, e.NodeLost("b", Evidence.CLOSED))
    now = status(machine, "a", {"a": SEEN["a"]})
    assert [slot["answered"] for slot in now["slots"]] == [True, False]
    assert now["gone"] == {"b": "connection closed"}
    said = text(now)
    assert "no answer yet" in said and "recovering" in said and "spares: none" in said


def test_people_read_it_at_every_stage():
    assert "forming" in text(status(Coordinator(running().settings), "a", {}))
    machine = running()
    act(machine, e.SwapAsked("a", drain=True), *joined(2, 5))
    record = {"epoch": 2, "cause": "x", "generation": 5, "steps_again": 0, "seconds": {"detect": 0.5}, "at": 0.0}
    machine.recovered(record)
    heir = Coordinator.from_json(machine.settings, machine.to_json())
    said = text(status(heir, "c", {}))
    assert "drained: a" in said and "epoch 2: x; from generation 5" in said


def test_what_the_next_loss_would_be_is_said():
    machine = running()
    act(machine, e.NodeLost("c", Evidence.CLOSED))
    assert "none, the next loss of a node ends the job" in text(status(machine, "a", SEEN))
    act(machine, e.FallbacksKnown(machine.epoch.number, ((1, Fallback("TP2", 2)),)))
    assert "none, the next loss of a node makes the layout TP2" in text(status(machine, "a", SEEN))


def test_a_node_that_ails_is_shown():
    machine = running()
    act(machine, e.NodeAiling("c", "device 0: lost"), e.NodeAiling("a", "device 3: XID 79"))
    said = text(status(machine, "a", SEEN))
    assert "AILING: device 3: XID 79" in said and "c (4 ranks prepared, ailing: device 0: lost)" in said


def test_nodes_go_by_their_host_too():
    nodes = ["gpu1-0-311", "gpu11-1-312", "gpu1-2-9"]
    assert find_node(nodes, "gpu11") == "gpu11-1-312"
    assert find_node(nodes, "gpu1-2-9") == "gpu1-2-9"
    with pytest.raises(ConfigurationError, match="give one of them in full"):
        find_node(nodes, "gpu1")
    with pytest.raises(ConfigurationError, match="there are gpu1-0-311"):
        find_node(nodes, "gpu")
