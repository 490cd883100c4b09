"""A slot on its way from rank to rank."""

import pytest
import torch

from megatron_resilience.deadpool.protection import receive_slot, send_slot
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


def segment(*names):
    inventory = Inventory(tuple(TensorSpec(name, Kind.MOMENT, "float32", (3,)) for name in names))
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
