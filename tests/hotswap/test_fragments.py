"""Fragments as packed bytes, cut anywhere."""

import itertools

import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_resilience.hotswap.fragments import pack, unpack


@st.composite
def fragments(draw):
    """Fields of one shape, as views of a larger tensor, some of them strided; of several widths."""
    outer, cut, inner = (draw(st.integers(1, 4)) for _ in range(3))
    out = {}
    for name in draw(st.lists(st.sampled_from("abc"), min_size=1, unique=True)):
        dtype = draw(st.sampled_from([torch.uint8, torch.int16, torch.int32, torch.int64]))
        space = torch.arange((outer + 1) * (cut + 2) * (inner + 3)).to(dtype).view(outer + 1, cut + 2, inner + 3)
        out[name] = (
            space[1:, 1 : cut + 1, 2 : inner + 2]
            if draw(st.booleans())
            else space[1:].reshape(-1)[: outer * cut * inner].view(outer, cut, inner)
        )
    return out


def whole(fields):
    """All bytes, in order of name."""
    return torch.cat([view.reshape(-1).contiguous().view(torch.uint8) for _, view in sorted(fields.items())])


@given(fragments(), st.data())
def test_any_part_is_packed_and_any_parts_make_the_fragment(fields, data):
    expected = whole(fields)
    cuts = data.draw(st.lists(st.integers(0, len(expected)), max_size=5))
    shift = data.draw(st.integers(0, 8))
    bounds = [0, *sorted(cuts), len(expected)]
    # The new memory is not what the old one was, and lies as the old one did.
    target = {name: view.clone().zero_().transpose(0, 1).contiguous().transpose(0, 1) for name, view in fields.items()}
    for low, high in itertools.pairwise(bounds):
        buffer = torch.zeros(shift + high - low, dtype=torch.uint8)[shift:]
        pack(fields, buffer, low)
        assert torch.equal(buffer, expected[low:high])
        unpack(target, buffer, low)
    assert torch.equal(whole(target), expected)
