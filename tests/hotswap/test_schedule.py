"""When which layout is wanted."""

import pytest

from megatron_resilience.errors import ConfigurationError
from megatron_resilience.hotswap.schedule import due, read_schedule
from megatron_resilience.vps.layout import Layout

LIVE = Layout(tp=2, dp=2, bucket_size=5000, vocabulary_multiple=4)


def test_a_schedule(tmp_path):
    path = tmp_path / "s.yaml"
    path.write_text("9: {tp: 1, dp: 4}\n5: PP2 DP2\n")
    schedule = read_schedule(path, LIVE)
    assert [(at, str(layout)) for at, layout in schedule] == [(5, "TP1·PP2·DP2"), (9, "TP1·PP1·DP4")]
    assert {layout.bucket_size for _, layout in schedule} == {5000}, "what the text does not say is as it was"
    assert due(schedule, 3, LIVE) == schedule[0]
    assert due(schedule, 5, LIVE) == (6, schedule[0][1]), "it was missed"
    assert due(schedule, 6, schedule[0][1]) == schedule[1]
    assert due(schedule, 12, schedule[1][1]) is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("5: XP2", "iteration 5: 'XP2' in layout"),
        ("0: TP2", "a positive iteration"),
        ("- TP2", "expected lines like"),
        ("5: [", "while parsing"),
        ("5: TP0 DP2", "TP=0"),
    ],
)
def test_what_is_wrong_is_named(tmp_path, text, message):
    path = tmp_path / "s.yaml"
    path.write_text(text)
    with pytest.raises(ConfigurationError, match="--hotswap-schedule") as caught:
        read_schedule(path, LIVE)
    assert message in str(caught.value)
    with pytest.raises(ConfigurationError, match="No such file"):
        read_schedule(tmp_path / "absent", LIVE)
