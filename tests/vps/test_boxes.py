"""The algebra of boxes, and the vectorised version held against it."""

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from megatron_resilience.vps.boxes import Box, boxes_of_range, intersect, subtract, whole
from megatron_resilience.vps.pieces import Boxes, ranges_to_local_boxes
from megatron_resilience.vps.split import split
from tests.vps.strategies import few

SHAPES = st.lists(st.integers(1, 5), min_size=0, max_size=4).map(tuple)


@st.composite
def boxes_in(draw, shape):
    """A box of a tensor of ``shape``, empty ones too."""
    start = tuple(draw(st.integers(0, n)) for n in shape)
    return Box(start, tuple(draw(st.integers(a, n)) for a, n in zip(start, shape, strict=True)))


def cells(box):
    """Its elements, as index tuples."""
    return set(itertools.product(*(range(a, b) for a, b in zip(box.start, box.stop, strict=True))))


@few(60)
@given(st.data(), SHAPES)
def test_intersection_and_difference_are_those_of_sets(data, shape):
    a, b = data.draw(boxes_in(shape)), data.draw(boxes_in(shape))
    common = intersect(a, b)
    assert (cells(common) if common else set()) == cells(a) & cells(b)
    rest = subtract(a, b)
    assert sum(box.numel for box in rest) == len(cells(a) - cells(b))
    assert set().union(*map(cells, rest)) == cells(a) - cells(b)
    assert len(rest) <= max(1, 2 * len(shape))


@few(60)
@given(st.data(), SHAPES)
def test_a_range_becomes_its_elements_in_order(data, shape):
    size = whole(shape).numel
    low = data.draw(st.integers(0, size))
    high = data.draw(st.integers(low, size))
    boxes = list(boxes_of_range(low, high, shape))
    index = np.arange(size).reshape(shape)
    found = [index[box.slices()].ravel() for box in boxes]
    assert (np.concatenate([*found, []]) == np.arange(low, high)).all()
    assert len(boxes) <= max(1, 2 * len(shape) - 1)


@few(60)
@given(st.data(), st.tuples(*[st.integers(1, 6)] * 3))
def test_ranges_in_bulk_are_the_same(data, shape):
    size = whole(shape).numel
    lows = data.draw(st.lists(st.integers(0, size), min_size=1, max_size=4))
    highs = [data.draw(st.integers(low, size)) for low in lows]
    count = len(lows)
    rows = ranges_to_local_boxes(np.array(lows), np.array(highs), np.full(count, shape[1]), np.full(count, shape[2]))
    for number in range(count):
        found = np.zeros(shape, int)
        parts = [tuple(int(x[i]) for x in rows[1:]) for i in np.flatnonzero(rows[0] == number)]
        for o0, o1, c0, c1, i0, i1 in parts:
            found[o0:o1, c0:c1, i0:i1] += 1
        expected = np.zeros(shape, int)
        for box in boxes_of_range(lows[number], highs[number], shape):
            expected[box.slices()] += 1
        assert (found == expected).all()
        assert len(parts) <= 5


@few(40)
@given(st.data(), st.tuples(*[st.integers(1, 7)] * 3), st.integers(1, 9))
def test_a_split_box_is_the_box(data, shape, parts):
    box = data.draw(boxes_in(shape).filter(lambda b: b.numel))
    bounds = [np.array([x]) for pair in zip(box.start, box.stop, strict=True) for x in pair]
    row, number, pieces = split(Boxes(*[np.zeros(1, int)] * 3, *bounds, *[np.zeros(1, int)] * 2), np.array([parts]))
    found = np.zeros(shape, int)
    for i in range(len(row)):
        found[pieces.o0[i] : pieces.o1[i], pieces.c0[i] : pieces.c1[i], pieces.i0[i] : pieces.i1[i]] += 1
    expected = np.zeros(shape, int)
    expected[box.slices()] = 1
    assert (found == expected).all()
    assert number.tolist() == list(range(min(parts, max(box.shape))))
    assert pieces.numel.max() <= -(-max(box.shape) // min(parts, max(box.shape))) * box.numel // max(box.shape)
