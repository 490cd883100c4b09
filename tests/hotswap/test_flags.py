"""The script's arguments under another layout."""

from megatron_resilience.hotswap.flags import under_layout
from megatron_resilience.vps.layout import Layout, parse_layout


def test_only_the_layout_changes():
    argv = [
        "--bf16",
        "--tensor-model-parallel-size",
        "2",
        "--lr=1e-3",
        "--pipeline-model-parallel-size=4",
        "--seed",
        "2",
    ]
    new = under_layout(argv, Layout(tp=4, dp=2))
    assert new[:4] == ["--bf16", "--lr=1e-3", "--seed", "2"]
    pairs = dict(zip(new[4::2], new[5::2], strict=True))
    assert pairs == {
        "--tensor-model-parallel-size": "4",
        "--pipeline-model-parallel-size": "1",
        "--context-parallel-size": "1",
        "--expert-model-parallel-size": "1",
    }


def test_there_and_back_is_the_same_layout():
    for text in ("TP2 PP2 DP2 VPP2", "EP2 DP4 ETP1", "PP3 FIRST1 LAST2"):
        layout = parse_layout(text)
        once = under_layout(["--x"], layout)
        assert under_layout(under_layout(once, Layout(tp=8)), layout) == once
        assert parse_layout(str(layout)) == layout
