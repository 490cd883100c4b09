"""Ownership: every layout tiles the logical space, and both directions of the map agree."""

import numpy as np
import pytest

from megatron_resilience.vps.families import build_catalogue
from megatron_resilience.vps.layout import Layout
from megatron_resilience.vps.space import StateSpace
from tests.vps.models import DENSE, LAYOUTS, MOE, fits, index_of, label_arrays


@pytest.mark.parametrize("shape", [DENSE, MOE], ids=["dense", "moe"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_element_has_exactly_its_replicas(shape, layout):
    catalogue = build_catalogue(shape)
    if not fits(catalogue, layout):
        pytest.skip("layout is for MoE models")
    space = StateSpace(catalogue, layout)
    counts = {name: np.zeros(a.shape, int) for name, a in label_arrays(catalogue).items()}
    for rank in range(layout.world):
        boxes = space.boxes_of(rank)
        for i in range(len(boxes)):
            counts[catalogue.tensors[boxes.tensor[i]].name][index_of(boxes, i)] += 1
    for number, tensor in enumerate(catalogue.tensors):
        copies = 2 if space.instances.second[number] >= 0 else 1
        expected = len(space.replicas(0, int(space.tensor_class[number]))) * copies
        assert (counts[tensor.name] == expected).all(), tensor.name


def test_boxes_of_one_layout_find_their_owners_in_the_same_layout():
    catalogue = build_catalogue(MOE)
    space = StateSpace(catalogue, Layout(tp=2, pp=2, dp=4, ep=2, etp=1, overlap_grad_reduce=True, bucket_size=500))
    for rank in range(space.layout.world):
        boxes = space.boxes_of(rank)
        row, found = space.owners_of(boxes, boxes.copy)
        assert sorted(row.tolist()) == list(range(len(boxes)))
        order = np.argsort(row)
        for name in ("tensor", "o0", "o1", "c0", "c1", "i0", "i1", "base"):
            assert (getattr(found, name)[order] == getattr(boxes, name)).all(), name
