"""Training that begins with ``--load`` of a stock checkpoint is protected like any other."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_resilience.observe.trace import differences, read
from tests.e2e.test_hot_swap import assert_swapped, longer
from tests.support.job import job, kill_node
from tests.support.oracles import STEADY, stock
from tests.support.template import Template

pytestmark = pytest.mark.e2e

SAVED, LAST = 4, 16

# fully_reshardable files of several padded buckets are corrupt: Megatron 0.19 saves unpadded buckets by padded offsets.
FORMATS = [("tp2_dp2_bf16_overlap", False), ("tp2_dp2_fp32", True), ("no_distributed_optimizer", False)]


@pytest.mark.parametrize(
    ("name", "reshardable"), [FORMATS[0], *(pytest.param(*known, marks=pytest.mark.full) for known in FORMATS[1:])]
)
def test_a_node_dies_after_a_load(template: Template, tmp_path: Path, name: str, reshardable: bool) -> None:
    """Moments and step counts come from the checkpoint, and the newcomer, which has loaded none, gets them with the state."""
    more = ("--dist-ckpt-optim-fully-reshardable",) if reshardable else ()
    checkpoint = (*STEADY, *more)
    save = longer(name, SAVED, *checkpoint, "--save", str(tmp_path / "ckpt"), "--save-interval", str(SAVED))
    stock(template, save.world_size, save.argv)
    load = longer(name, LAST, *checkpoint, "--load", str(tmp_path / "ckpt"))
    stock(template, load.world_size, [*load.argv, "--trace-dir", str(tmp_path / "oracle")])
    assert read(tmp_path / "oracle")[0][0]["iteration"] == SAVED + 1, "the checkpoint was found"
    with job(template, tmp_path / "run", load) as running:
        running.wait_for_step(SAVED + 3)
        kill_node(running.agents()[1])
        running.finish()
        assert_swapped(running, tmp_path / "oracle")


@pytest.mark.full
@pytest.mark.parametrize(("name", "reshardable"), FORMATS)
def test_stock_megatron_continues_bit_for_bit(template: Template, tmp_path: Path, name: str, reshardable: bool) -> None:
    """The oracle itself: with its defects corrected, saving and loading is as if training had gone on."""
    checkpoint = (*STEADY, *(("--dist-ckpt-optim-fully-reshardable",) if reshardable else ()))
    whole = longer(name, 8, *checkpoint, "--trace-dir", str(tmp_path / "whole"))
    stock(template, whole.world_size, [*whole.argv, "--save", str(tmp_path / "ckpt"), "--save-interval", "4"])
    (tmp_path / "ckpt" / "latest_checkpointed_iteration.txt").write_text("4")
    rest = longer(name, 8, *checkpoint, "--trace-dir", str(tmp_path / "rest"))
    stock(template, rest.world_size, [*rest.argv, "--load", str(tmp_path / "ckpt")])
    for rank, lines in read(tmp_path / "rest").items():
        assert lines == read(tmp_path / "whole")[rank][4:]
    assert [
        d for d in differences(tmp_path / "rest", tmp_path / "whole") if "iterations" not in d and "groups" not in d
    ] == []
