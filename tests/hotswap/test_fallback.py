"""Layouts for fewer nodes."""

from hypothesis import given
from hypothesis import strategies as st

from megatron_resilience.hotswap.fallback import fallbacks
from megatron_resilience.vps.layout import Layout


def names(found):
    return {count: str(layout) for count, layout in found.items()}


def test_tp_is_kept_first_then_pp_then_ep():
    live = Layout(tp=2, pp=2, dp=2)
    assert names(fallbacks(live, 4, 2, 1, lambda _: True)) == {
        4: "TP2·PP2·DP2",
        3: "TP2·PP2·DP1",
        2: "TP2·PP2·DP1",
        1: "TP2·PP1·DP1",
    }
    moe = Layout(dp=4, ep=4)
    assert names(fallbacks(moe, 4, 1, 2, lambda _: True)) == {
        4: "TP1·PP1·DP4·EP4",
        3: "TP1·PP1·DP2·EP2",
        2: "TP1·PP1·DP2·EP2",
    }


def test_the_batch_must_divide_and_the_users_list_comes_first():
    found = fallbacks(Layout(dp=4), 4, 1, 1, lambda layout: 8 % layout.dp == 0, [Layout(tp=3), Layout(pp=2)])
    assert names(found) == {4: "TP1·PP1·DP4", 3: "TP3·PP1·DP1", 2: "TP1·PP2·DP1", 1: "TP1·PP1·DP1"}
    assert names(fallbacks(Layout(dp=4), 4, 1, 3, lambda _: False)) == {4: "TP1·PP1·DP4"}


@given(st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4]), st.integers(1, 4), st.integers(1, 8))
def test_no_fallback_needs_more_than_is_there(tp, pp, dp, per_node):
    live = Layout(tp=tp, pp=pp, dp=dp)
    nodes = -(-live.world // per_node)
    for count, layout in fallbacks(live, nodes, per_node, 1, lambda _: True).items():
        assert layout.world <= count * per_node
