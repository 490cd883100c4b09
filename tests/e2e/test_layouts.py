"""The layout changes while a real GPT trains: what follows equals stock Megatron loading the same state at that layout."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_resilience.hotswap.flags import under_layout
from megatron_resilience.observe.trace import differences, read
from megatron_resilience.vps.layout import parse_layout
from tests.e2e.test_hot_swap import longer
from tests.e2e.test_load import STEADY, stock
from tests.support.configurations import Configuration
from tests.support.job import job
from tests.support.template import Template

pytestmark = pytest.mark.e2e

SAVED, SWITCH, LAST = 2, 6, 12
RESHARDABLE = (*STEADY, "--dist-ckpt-optim-fully-reshardable")
HOTSWAP = ("--deadpool", "--hotswap-parallelism")


def at_layout(configuration: Configuration, layout: str) -> Configuration:
    """The same training under another layout."""
    parsed = parse_layout(layout)
    return Configuration(parsed.world, tuple(under_layout(configuration.argv, parsed)))


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("tp2_dp2_fp32", "TP1 PP2 DP2"),
    ],
)
def test_training_goes_on_as_stock_megatron_would(template: Template, tmp_path: Path, name: str, layout: str) -> None:
    base = longer(name, LAST, *RESHARDABLE)
    checkpoint = str(tmp_path / "ckpt")
    save = longer(name, SWITCH, *RESHARDABLE, "--save", checkpoint, "--save-interval", str(SWITCH))
    stock(template, save.world_size, save.argv)
    target = at_layout(base, layout)
    stock(template, target.world_size, [*target.argv, "--load", checkpoint, "--trace-dir", str(tmp_path / "oracle")])
    schedule = tmp_path / "schedule.yaml"
    schedule.write_text(f"{SWITCH}: {layout}\n")
    extra = (*HOTSWAP, "--hotswap-schedule", str(schedule))
    with job(template, tmp_path / "run", base, extra) as running:
        running.finish()
        print(running.child.output[-3000:])
        (switched,) = running.of_kind("switch_done")
        assert switched["generation"] == SWITCH
    for rank, lines in read(tmp_path / "oracle").items():
        ours = [line for line in read(running.trace)[rank] if line["iteration"] > SWITCH]
        assert ours == lines
