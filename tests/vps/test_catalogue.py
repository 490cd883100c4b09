"""Catalogues survive being written down; families have the sizes that their papers state."""

import json

import numpy as np
import pytest
from hypothesis import given

from megatron_resilience.vps.catalogue import catalogue_from_json
from megatron_resilience.vps.families import load_model
from megatron_resilience.vps.layout import Layout
from megatron_resilience.vps.local import local_views, storage_size
from megatron_resilience.vps.space import StateSpace
from megatron_resilience.vps.state import complete_state
from megatron_resilience.vps.tensors import Kind
from tests.routing.exchange import storage_of
from tests.vps.strategies import few, models


@few(12)
@given(models())
def test_a_catalogue_written_down_is_the_same(spaces):
    catalogue = spaces[0].catalogue
    assert catalogue_from_json(json.loads(json.dumps(catalogue.to_json()))) == catalogue


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("gpt-1.3b", 1.3e9),
        ("llama2-7b", 6.74e9),
        ("llama2-13b", 13.0e9),
        ("llama2-70b", 69.0e9),
        ("qwen3-moe-30b", 30.5e9),
        ("qwen3-moe-235b", 235e9),
    ],
)
def test_families_have_the_published_sizes(name, parameters):
    found = sum(t.numel for t in load_model(name).tensors if t.kind is Kind.PARAMETER)
    assert found == pytest.approx(parameters, rel=0.02)


def test_a_rank_s_whole_state():
    layout = Layout(tp=2, pp=2, dp=2, ep=2, etp=1)
    catalogue = complete_state(load_model("qwen3-moe-30b"), [layout], step_per_parameter=True)
    space = StateSpace(catalogue, layout)
    names = [catalogue.tensors[t].name for t in np.unique(space.boxes_of(3).tensor)]
    # Rank 3 is TP 1, EP 1 and ETP 0 of the first stage.
    rng = [n for n in names if n.startswith("rng.tracker")]
    assert rng == [
        "rng.tracker.data-parallel-rng.pp0",
        "rng.tracker.model-parallel-rng.tp1.pp0",
        "rng.tracker.expert-parallel-rng.tp0.ep1.pp0",
    ]
    assert "scalars" in names
    with_part = {n for n in names if not n.endswith("/step")} - {n for n in names if n.startswith(("rng", "scalars"))}
    assert {n.removesuffix("/step") for n in names if n.endswith("/step")} == with_part


@few(12)
@given(models())
def test_boxes_lie_inside_the_storage_of_their_rank_only(spaces):
    space = spaces[0]
    for rank in range(space.layout.world):
        boxes = space.boxes_of(rank)
        views = local_views(space, rank, boxes)
        last = views.offset + ((views.sizes - 1) * views.strides).sum(axis=1)
        for i, (tensor, copy) in enumerate(zip(boxes.tensor.tolist(), boxes.copy.tolist(), strict=True)):
            assert 0 <= views.offset[i] <= last[i] < storage_size(space, rank, tensor, copy)
        for (tensor, copy), storage in storage_of(space, rank).items():
            assert storage_size(space, rank, tensor, copy) == len(storage)
    other = space.boxes_of(space.layout.world - 1)
    foreign = [
        i
        for i in range(len(other))
        if 0 not in space.replicas(int(other.base[i]), int(space.tensor_class[other.tensor[i]]), int(other.span[i]))
    ]
    if foreign:
        with pytest.raises(ValueError, match=r"rank 0 of .* does not (hold|own)"):
            local_views(space, 0, other.take(np.array(foreign[:1])))
