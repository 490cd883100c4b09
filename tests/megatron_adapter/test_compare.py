"""Fingerprints see every bit, and its place; on a device by tensor operations."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_resilience.megatron_adapter.compare import device_fingerprint, fingerprint

DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.uint8)


@pytest.mark.parametrize("of", [fingerprint, device_fingerprint])
@given(st.sampled_from(DTYPES), st.integers(1, 200), st.data())
def test_every_bit_and_its_place_count(of, dtype, count, data):
    size = torch.empty((), dtype=dtype).element_size()
    content = bytearray(data.draw(st.binary(min_size=count * size, max_size=count * size)))
    tensor = torch.frombuffer(content, dtype=dtype)
    before = of(tensor)
    assert before.dtype == torch.int64 and before.shape == () and torch.equal(before, of(tensor.clone()))
    at = data.draw(st.integers(0, count * size - 1))
    content[at] ^= 1 << data.draw(st.integers(0, 7))
    assert not torch.equal(before, of(tensor))


@pytest.mark.parametrize("of", [fingerprint, device_fingerprint])
@given(st.lists(st.floats(width=32, allow_nan=False), min_size=2, max_size=40, unique=True))
def test_what_has_changed_places_is_seen(of, values):
    tensor = torch.tensor(values)
    assert not torch.equal(of(tensor), of(tensor.roll(1)))
