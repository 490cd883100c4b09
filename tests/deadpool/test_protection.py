"""A slot on its way from rank to rank."""

import pytest
import torch

from megatron_resilience.deadpool.protection import pieces_to_send, receive_slot, send_slot
from megatron_resilience.errors import StateError
from megatron_resilience.state.inventory import Inventory, Kind, TensorSpec
from megatron_resilience.state.segment import Segment


class Loopback:
    """Carries tensors in order, as gloo does between two ranks."""

    def __init__(self):
        self._wire = []

    def send(self, tensors, to, tag):
        self._wire.append((tag, tensors[0].clone()))

    def recv(self, tensors, sender, tag):
        found, data = self._wire.pop(0)
        assert found == tag and data.numel() == tensors[0].numel()
        tensors[0].copy_(data)
        return self

    def wait(self):
        return None


def inventory_of(*names):
    return Inventory(tuple(TensorSpec(name, Kind.MOMENT, "float32", (3,)) for name in names))


def segment(*names):
    inventory = inventory_of(*names)
    return Segment(memoryview(bytearray(inventory.shape.segment_bytes)), inventory.shape)


def sealed(*names):
    owner = segment(*names)
    slot = owner.slots[1]
    slot.open()
    torch.frombuffer(slot.payload, dtype=torch.float32)[:3] = torch.tensor([1.0, 2.0, 3.0])
    slot.seal(1, 7, slot.write_record({"iteration": 7}))
    return slot


def test_it_arrives_in_the_slot_of_the_same_index():
    wire, keeper, slot = Loopback(), segment("a", "b"), sealed("a", "b")
    send_slot(wire, slot, 1, to=1)
    assert receive_slot(wire, keeper.slots, 0, epoch=2) == 7
    assert keeper.generations() == (None, 7)
    assert keeper.slots[1].read_record() == {"iteration": 7}
    assert keeper.slots[1].payload == slot.payload


def test_a_skipped_generation_is_said_in_a_word():
    wire, keeper = Loopback(), segment("a")
    send_slot(wire, None, 0, to=1)
    assert receive_slot(wire, keeper.slots, 0, epoch=2) is None
    assert keeper.generations() == (None, None)


def test_a_copy_of_another_inventory_is_refused():
    """The same tensors in another order take the same bytes, and would silently change places."""
    wire, newcomer = Loopback(), segment("b", "a")
    send_slot(wire, sealed("a", "b"), 1, to=1)
    with pytest.raises(StateError, match="lists other tensors, or in another order"):
        receive_slot(wire, newcomer.slots, 0, epoch=2)
    assert newcomer.generations() == (None, None)


def test_what_the_keeper_holds_itself_is_not_sent():
    names = ("a", "b", "rng")
    wire, keeper, slot, twin = Loopback(), segment(*names), sealed(*names), sealed(*names)
    slot.open()
    slot.payload[128:140] = bytes(12)
    slot.seal(1, 7, slot.write_record({"iteration": 7, "rank": 0}))
    pieces = pieces_to_send(inventory_of(*names), frozenset({0, 1}))
    assert pieces == [(128, 192)]
    send_slot(wire, slot, 1, 1, pieces)
    assert sum(data.numel() for tag, data in wire._wire if tag == 2) == 64 + slot.header().record_bytes
    assert receive_slot(wire, keeper.slots, 0, 2, pieces, twin) == 7
    assert keeper.slots[1].payload == slot.payload
    assert keeper.slots[1].read_record() == {"iteration": 7, "rank": 0}


def test_replicas_that_are_not_alike_are_noticed():
    names = ("a", "b")
    wire, keeper, slot, twin = Loopback(), segment(*names), sealed(*names), sealed(*names)
    twin.payload[0] ^= 1
    pieces = pieces_to_send(inventory_of(*names), frozenset({0}))
    send_slot(wire, slot, 1, 1, pieces)
    with pytest.raises(StateError, match="damaged"):
        receive_slot(wire, keeper.slots, 0, 2, pieces, twin)


def test_a_keeper_that_skipped_the_generation_keeps_no_half_of_it():
    names = ("a", "b")
    wire, keeper = Loopback(), segment(*names)
    pieces = pieces_to_send(inventory_of(*names), frozenset({0}))
    send_slot(wire, sealed(*names), 1, 1, pieces)
    assert receive_slot(wire, keeper.slots, 0, 2, pieces, None) is None
    assert keeper.generations() == (None, None)
    assert not wire._wire, "all that was sent was taken"
