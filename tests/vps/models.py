"""Small models and layouts that the tests of vps and routing share."""

import numpy as np

from megatron_resilience.vps.families import ModelShape
from megatron_resilience.vps.layout import ORDER_PP_BEFORE_DP, Layout
from megatron_resilience.vps.space import StateSpace

DENSE = ModelShape(
    "dense",
    layers=4,
    hidden=12,
    ffn=24,
    heads=12,
    query_groups=6,
    head_size=2,
    vocabulary=37,
    gated=True,
    learned_positions=5,
)
MOE = ModelShape(
    "moe",
    layers=4,
    hidden=8,
    ffn=12,
    heads=12,
    query_groups=12,
    head_size=1,
    vocabulary=29,
    gated=True,
    bias=False,
    norm_bias=False,
    tied=False,
    experts=4,
    expert_ffn=12,
    dense_first=1,
    shared_expert_ffn=12,
    router_bias=True,
)
_BUCKETS = {"overlap_grad_reduce": True, "bucket_size": 700, "vocabulary_multiple": 4}
LAYOUTS = [
    Layout(vocabulary_multiple=1),
    Layout(dp=2),
    Layout(dp=3, vocabulary_multiple=8),
    Layout(dp=4, **_BUCKETS),
    Layout(tp=2, vocabulary_multiple=8),
    Layout(tp=3, **_BUCKETS),
    Layout(tp=2, dp=2, **_BUCKETS),
    Layout(pp=2, vocabulary_multiple=1),
    Layout(pp=4, dp=2),
    Layout(tp=2, pp=2, dp=3, **_BUCKETS),
    Layout(tp=2, pp=2, dp=2, vpp=2, **_BUCKETS),
    Layout(pp=3, dp=2, first_stage_layers=1, last_stage_layers=1),
    Layout(pp=3, count_embedding=True, count_loss=True),
    Layout(tp=2, cp=2, dp=2, **_BUCKETS),
    Layout(tp=2, pp=2, dp=2, order=ORDER_PP_BEFORE_DP, **_BUCKETS),
    Layout(tp=6, vocabulary_multiple=1, pad_for_busbw=True),
    Layout(tp=3, dp=2),
    Layout(tp=2, pp=4, vocabulary_multiple=4),
    Layout(dp=6, pad_for_busbw=True),
    Layout(pp=2, cp=2, vpp=2, **_BUCKETS),
    Layout(pp=4, dp=2, overlap_grad_reduce=True, num_buckets=3),
    Layout(dp=2, ep=2),
    Layout(dp=4, ep=4, **_BUCKETS),
    Layout(tp=2, dp=4, ep=2, **_BUCKETS),
    Layout(tp=2, dp=4, ep=4, etp=1),
    Layout(tp=2, pp=2, dp=4, ep=2, etp=1, vpp=2, **_BUCKETS),
    Layout(tp=2, dp=2, etp=1),
    Layout(dp=2, cp=2, ep=2, pp=2),
    Layout(tp=1, dp=4, ep=2, etp=2),
]


def fits(catalogue, layout):
    """Whether the layout is for this model (EP and ETP of their own need experts)."""
    return catalogue.experts > 0 or (layout.ep == 1 and layout.etp is None)


def label_arrays(catalogue):
    """Per tensor, an array in canonical shape whose values are unique over the whole model."""
    arrays, start = {}, 0
    for tensor in catalogue.tensors:
        size = int(np.prod(tensor.canonical_shape))
        arrays[tensor.name] = np.arange(start, start + size).reshape(tensor.canonical_shape)
        start += size
    return arrays


def index_of(boxes, i):
    """Index of box i in an array of canonical shape."""
    return tuple(slice(getattr(boxes, d + "0")[i], getattr(boxes, d + "1")[i]) for d in "oci")


def spaces(catalogue):
    """A state space for every layout that fits."""
    return [StateSpace(catalogue, layout) for layout in LAYOUTS if fits(catalogue, layout)]
