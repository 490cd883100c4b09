"""Ownership: every layout tiles the logical space, and both directions of the map agree."""

import numpy as np
import pytest
from hypothesis import given

from megatron_resilience.vps.families import build_catalogue
from megatron_resilience.vps.layout import Layout
from megatron_resilience.vps.space import StateSpace
from tests.vps.models import DENSE, LAYOUTS, MOE, fits, index_of
from tests.vps.reference import held_by
from tests.vps.strategies import few, many, models


def masks_of(space, rank):
    """{(tensor name, copy): how often each element is in the rank's boxes} in canonical shape."""
    out = {}
    boxes = space.boxes_of(rank)
    for i in range(len(boxes)):
        tensor = space.catalogue.tensors[boxes.tensor[i]]
        mask = out.setdefault((tensor.name, int(boxes.copy[i])), np.zeros(tensor.canonical_shape, int))
        mask[index_of(boxes, i)] += 1
    return out


def check_ownership(space):
    """Boxes equal the slow reference on every rank; replicas are who `replicas` says; together they tile the space."""
    counts = {}
    for rank in range(space.layout.world):
        found, expected = masks_of(space, rank), held_by(space, rank)
        assert found.keys() == expected.keys(), f"rank {rank}: {set(found) ^ set(expected)}"
        for key, mask in found.items():
            assert (mask == expected[key]).all(), f"rank {rank}: {key}"
            counts[key] = counts.get(key, 0) + mask
        boxes = space.boxes_of(rank)
        for i in range(len(boxes)):
            shard = int(boxes.base[i]), int(space.tensor_class[boxes.tensor[i]]), int(boxes.span[i])
            assert rank in space.replicas(*shard)
    for number, tensor in enumerate(space.catalogue.tensors):
        inst = space.instances
        for copy, rows in enumerate((inst.first, inst.second)):
            if rows[number] < 0:
                assert (tensor.name, copy) not in counts
                continue
            span = int(inst.shards[rows[number]]) if space.is_step[number] else 1
            base = _base(space, number, copy)
            replicas = len(space.replicas(base, int(space.tensor_class[number]), span))
            assert (counts[tensor.name, copy] == replicas).all(), tensor.name


def _base(space, number, copy):
    for rank in range(space.layout.world):
        boxes = space.boxes_of(rank)
        rows = np.flatnonzero((boxes.tensor == number) & (boxes.copy == copy))
        if len(rows):
            return int(boxes.base[rows[0]])
    raise AssertionError("nobody has it")


def check_inverse(space):
    """The boxes of a rank find themselves as owners, shard by shard."""
    for rank in range(space.layout.world):
        boxes = space.boxes_of(rank)
        row, found = space.owners_of(boxes, boxes.copy)
        assert sorted(row.tolist()) == list(range(len(boxes)))
        order = np.argsort(row)
        for name in ("tensor", "o0", "o1", "c0", "c1", "i0", "i1", "base", "span"):
            assert (getattr(found, name)[order] == getattr(boxes, name)).all(), name


@pytest.mark.parametrize("shape", [DENSE, MOE], ids=["dense", "moe"])
def test_every_element_has_exactly_its_replicas(shape):
    catalogue = build_catalogue(shape)
    for layout in LAYOUTS:
        if fits(catalogue, layout):
            check_ownership(StateSpace(catalogue, layout))


@few(50)
@given(models())
def test_any_layout_tiles_the_space_of_any_model(spaces):
    check_ownership(spaces[0])
    check_inverse(spaces[0])


@pytest.mark.full
@many()
@given(models(most=24))
def test_thousands_of_layouts_tile_the_space(spaces):
    check_ownership(spaces[0])
    check_inverse(spaces[0])


def test_boxes_of_one_layout_find_their_owners_in_the_same_layout():
    layout = Layout(tp=2, pp=2, dp=4, ep=2, etp=1, overlap_grad_reduce=True, bucket_size=500)
    check_inverse(StateSpace(build_catalogue(MOE), layout))
