"""Where random streams come from."""

from megatron_resilience.hotswap.streams import StreamSources, stream_sources
from megatron_resilience.vps.layout import Layout


def test_streams_go_on_while_their_coordinate_exists():
    old, new = Layout(tp=2, dp=2), Layout(tp=2, dp=4)
    assert [stream_sources(old, new, r).dense for r in range(8)] == [0, 1] * 4
    old, new = Layout(tp=2, pp=2, dp=2), Layout(tp=2, pp=2, dp=1)
    assert [stream_sources(old, new, r).dense for r in range(4)] == [0, 1, 4, 5]


def test_streams_start_anew_where_stock_megatron_starts_them_anew():
    for new in (Layout(dp=4), Layout(tp=2, pp=2), Layout(tp=4)):
        for rank in range(new.world):
            assert stream_sources(Layout(tp=2, dp=2), new, rank) == StreamSources(None, None)


def test_experts_follow_their_own_coordinate():
    old = Layout(dp=4, ep=2)
    assert [stream_sources(old, Layout(dp=8, ep=2), r).expert for r in range(4)] == [0, 1, 0, 1]
    assert [stream_sources(old, Layout(dp=4, ep=4), r).expert for r in range(4)] == [None] * 4
    assert [stream_sources(old, Layout(dp=4, ep=4), r).dense for r in range(4)] == [0] * 4
