"""Random models and layouts for property tests: everything a description can say, in sizes of a few elements."""

import os
from dataclasses import replace

from hypothesis import HealthCheck, assume, settings
from hypothesis import strategies as st

from megatron_resilience.vps.families import ModelShape, build_catalogue
from megatron_resilience.vps.layout import ORDER, ORDER_PP_BEFORE_DP, Layout
from megatron_resilience.vps.space import StateSpace
from megatron_resilience.vps.state import complete_state
from megatron_resilience.vps.tensors import Cut, Kind, LogicalTensor

_CHECKS = [
    HealthCheck.too_slow,
    HealthCheck.filter_too_much,
    HealthCheck.data_too_large,
    HealthCheck.large_base_example,
]


def few(examples):
    """Settings of a property in the default run."""
    # The same examples in every run: a failure of CI is a failure here.
    return settings(max_examples=examples, deadline=None, suppress_health_check=_CHECKS, derandomize=True)


def many():
    """Settings of the same property in the full run; MEGATRON_RESILIENCE_EXAMPLES asks for more or fewer."""
    examples = int(os.environ.get("MEGATRON_RESILIENCE_EXAMPLES", "1000"))
    return settings(max_examples=examples, deadline=None, suppress_health_check=_CHECKS)


@st.composite
def shapes(draw):
    """A model of a few layers; sizes divide by 2, 3 and 4 often, not always."""
    experts = draw(st.sampled_from([0, 0, 2, 4]))
    layers = draw(st.sampled_from([2, 3, 4, 6]))
    mtp = draw(st.integers(0, 2)) if draw(st.integers(0, 3)) == 0 else 0
    tied = not mtp and draw(st.booleans())
    heads = draw(st.sampled_from([4, 6, 12]))
    pattern = tuple(draw(st.lists(st.integers(0, 1), min_size=layers, max_size=layers))) if experts else None
    return ModelShape(
        "random",
        layers=layers,
        hidden=draw(st.sampled_from([4, 6, 12])),
        ffn=draw(st.sampled_from([6, 12])),
        heads=heads,
        head_size=draw(st.integers(1, 2)),
        query_groups=draw(st.sampled_from([g for g in (2, 3, 6, 12) if heads % g == 0])),
        vocabulary=draw(st.integers(5, 40)),
        gated=draw(st.booleans()),
        bias=draw(st.booleans()),
        norm_bias=draw(st.booleans()),
        tied=tied,
        learned_positions=0 if mtp else draw(st.sampled_from([0, 3])),
        query_key_norm=draw(st.booleans()),
        experts=experts,
        expert_ffn=12 if experts else 0,
        moe_pattern=pattern,
        mtp=mtp,
        shared_expert_ffn=draw(st.sampled_from([0, 12])) if experts else 0,
        router_bias=draw(st.booleans()),
        impl=draw(st.sampled_from(["local", "te"])),
    )


@st.composite
def odd_tensors(draw, layers):
    """Tensors of other architectures: any number of dimensions, any cut, interleaved blocks, frozen, of other dtypes."""
    out = []
    for number in range(draw(st.integers(0, 3))):
        dims = draw(st.integers(1, 4))
        axis = draw(st.integers(0, dims - 1))
        blocks = tuple(12 * n for n in draw(st.lists(st.integers(1, 2), min_size=1, max_size=5 if dims < 3 else 2)))
        shape = tuple(sum(blocks) if d == axis else draw(st.integers(1, 4)) for d in range(dims))
        cut = Cut(axis, blocks) if draw(st.booleans()) else None
        layer = draw(st.integers(0, layers - 1))
        kind = draw(st.sampled_from([Kind.PARAMETER, Kind.PARAMETER, Kind.FROZEN, Kind.BUFFER]))
        dtype = draw(st.sampled_from(["bfloat16", "float32"]))
        out.append(LogicalTensor(f"odd.{number}", shape, dtype, kind, layer=layer, cut=cut))
    return out


@st.composite
def layouts(draw, shape, most=12):
    """A layout of at most ``most`` ranks that can carry ``shape``."""
    tp = draw(st.sampled_from([1, 1, 2, 3]))
    pp = draw(st.sampled_from([p for p in (1, 1, 2, 3, 4) if p <= shape.layers and tp * p <= most]))
    cp = draw(st.sampled_from([c for c in (1, 1, 1, 2) if tp * pp * c <= most]))
    dp = draw(st.sampled_from([d for d in (1, 2, 2, 3, 4) if tp * pp * cp * d <= most]))
    ep, etp = 1, None
    if shape.experts:
        whole = tp * cp * dp
        etp = draw(st.sampled_from([None, *(t for t in (1, 2, 3) if whole % t == 0)]))
        ep = draw(
            st.sampled_from([e for e in (1, 2, 4) if shape.experts % e == 0 and whole % ((etp or tp) * e) == 0] or [1])
        )
    uneven = {}
    if pp > 1 and draw(st.booleans()):
        if draw(st.booleans()):
            uneven = {"first_stage_layers": draw(st.integers(0, shape.layers)) if pp > 1 else None}
            uneven |= {"last_stage_layers": draw(st.sampled_from([None, 0, 1, 2]))}
        else:
            uneven = {"count_embedding": draw(st.booleans()), "count_loss": draw(st.booleans())}
    buckets = {}
    if draw(st.booleans()):
        buckets = {"overlap_grad_reduce": True, "bucket_size": draw(st.sampled_from([50, 300, 2000]))}
        if draw(st.integers(0, 3)) == 0:
            buckets |= {"num_buckets": draw(st.integers(1, 4))}
    try:
        return Layout(
            tp=tp,
            pp=pp,
            dp=dp,
            cp=cp,
            ep=ep,
            etp=etp,
            vpp=draw(st.sampled_from([1, 1, 2, 3])) if pp > 1 else 1,
            order=draw(st.sampled_from([ORDER, ORDER, ORDER_PP_BEFORE_DP])),
            vocabulary_multiple=draw(st.sampled_from([1, 2, 8])),
            pad_for_busbw=draw(st.integers(0, 9)) == 0,
            **uneven,
            **buckets,
        )
    except ValueError:
        assume(False)
        raise


@st.composite
def models(draw, count=1, most=12):
    """``count`` state spaces of one random model, each under a layout of its own; sharded optimizers or not."""
    shape = draw(shapes())
    chosen = [draw(layouts(shape, most)) for _ in range(count)]
    catalogue = build_catalogue(shape).with_tensors(draw(odd_tensors(shape.layers)))
    if draw(st.booleans()):
        catalogue = complete_state(catalogue, chosen, step_per_parameter=draw(st.booleans()), device_stream_bytes=3)
        small = [replace(t, shape=(3,)) if t.kind in (Kind.RNG, Kind.SCALAR) else t for t in catalogue.tensors]
        catalogue = replace(catalogue, tensors=tuple(small))
    sharded = draw(st.integers(0, 4)) > 0
    try:
        return [StateSpace(catalogue, layout, sharded_optimizer=sharded).check() for layout in chosen]
    except ValueError:
        assume(False)
        raise
