"""A slot is a generation only when it was sealed, whole, and untouched since."""

import hypothesis.strategies as st
import pytest
from hypothesis import given

from megatron_resilience.errors import StateError
from megatron_resilience.state.inventory import Inventory, Kind, TensorSpec
from megatron_resilience.state.memory import SharedMemory
from megatron_resilience.state.segment import RECORD_BYTES, Segment, Slot, sealed_generations

SPECS = (TensorSpec("w/master", Kind.MASTER, "float32", (5, 3)), TensorSpec("w/step", Kind.STEP, "float32", ()))
INVENTORY = Inventory(SPECS)


def segment():
    return Segment(memoryview(bytearray(INVENTORY.shape.segment_bytes)), INVENTORY.shape)


def test_nothing_is_visible_before_the_seal():
    slot = segment().slots[0]
    assert slot.header() is None
    slot.open()
    slot.payload[:4] = b"abcd"
    length = slot.write_record({"iteration": 3})
    assert slot.header() is None
    slot.seal(epoch=1, generation=3, record_bytes=length)
    assert slot.verify().generation == 3
    assert slot.read_record() == {"iteration": 3}
    slot.open()
    assert slot.header() is None


@given(st.data())
def test_any_flipped_bit_is_found(data):
    slot = segment().slots[1]
    slot.open()
    length = slot.write_record({"lr": 0.1})
    slot.seal(1, 7, length)
    place = data.draw(st.integers(0, len(slot.payload) + length - 1))
    target = slot.payload if place < len(slot.payload) else slot.record
    target[place % len(slot.payload) if target is slot.payload else place - len(slot.payload)] ^= 1 << data.draw(
        st.integers(0, 7)
    )
    with pytest.raises(StateError, match="damaged"):
        slot.verify()


def test_a_replica_that_arrives_damaged_is_not_sealed():
    sender, receiver = segment().slots[0], segment().slots[0]
    sender.open()
    header = sender.seal(1, 2, sender.write_record({}))
    receiver.open()
    receiver.payload[:] = bytes(len(receiver.payload) - 1) + b"x"
    receiver.record[:2] = b"{}"
    with pytest.raises(StateError, match="arrived damaged"):
        receiver.seal(1, 2, header.record_bytes, header.checksum)
    assert receiver.header() is None


def test_a_slot_of_another_layout_is_not_read():
    whole = segment()
    whole.slots[0].open()
    whole.slots[0].seal(1, 2, whole.slots[0].write_record({}))
    other = Inventory((*SPECS[:1], TensorSpec("w/exp_avg", Kind.MOMENT, "float32", ())))
    assert other.shape.slot_bytes == INVENTORY.shape.slot_bytes
    buffer = bytearray(INVENTORY.shape.slot_bytes)
    slot = Slot(memoryview(buffer), INVENTORY.shape)
    slot.open()
    slot.seal(1, 2, slot.write_record({}))
    assert Slot(memoryview(buffer), other.shape).header() is None


def test_a_record_that_does_not_fit_is_refused():
    with pytest.raises(StateError, match="room for"):
        segment().slots[0].write_record({"x": "y" * RECORD_BYTES})


def test_an_agent_lists_generations_without_knowing_the_inventory():
    memory = SharedMemory.create("test", INVENTORY.shape.segment_bytes)
    try:
        whole = Segment(memory.buffer, INVENTORY.shape)
        whole.slots[1].open()
        whole.slots[1].seal(2, 9, whole.slots[1].write_record({}))
        assert [h and h.generation for h in sealed_generations(memory.buffer)] == [None, 9]
        assert whole.generations() == (None, 9)
    finally:
        del whole
        memory.close()


def test_names_are_unique():
    with pytest.raises(ValueError, match="w/master"):
        Inventory((SPECS[0], SPECS[0]))


@given(st.lists(st.integers(0, 300), max_size=8))
def test_tensors_do_not_overlap(sizes):
    inventory = Inventory(tuple(TensorSpec(str(i), Kind.MOMENT, "bfloat16", (n,)) for i, n in enumerate(sizes)))
    ends = [o + s.nbytes for o, s in zip(inventory.offsets, inventory.specs, strict=True)]
    assert all(end <= start for end, start in zip(ends, inventory.offsets[1:], strict=False))
    assert all(o % 64 == 0 for o in inventory.offsets)
    assert not ends or ends[-1] <= inventory.payload_bytes


def test_memory_that_cannot_be_had_is_refused_with_the_remedy():
    with pytest.raises(StateError, match="give the node more memory"):
        SharedMemory.create("too-much", 1 << 50)
