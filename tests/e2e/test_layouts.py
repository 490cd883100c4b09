"""The layout changes while a real GPT trains: what follows equals stock Megatron loading the same state at that layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron_resilience.observe.trace import read
from megatron_resilience.vps.layout import parse_layout
from tests.e2e.test_commands import People
from tests.e2e.test_hot_swap import longer
from tests.support.job import job
from tests.support.oracles import (
    ENDLESS,
    HOTSWAP,
    LOGICAL,
    RESHARDABLE,
    at_layout,
    chained_oracle,
    loaded,
    logical_state,
    resharded_oracle,
)
from tests.support.template import Template

pytestmark = pytest.mark.e2e

SWITCH, LAST = 6, 12

full = pytest.mark.full


@pytest.mark.parametrize(
    ("name", "layout", "more"),
    [
        # Streams start anew, and go on.
        ("tp2_dp2_dropout", "PP2 DP2", ()),
        pytest.param("tp2_dp2_dropout", "TP2", (), marks=full),
        # 101 rows, padded to 102, and to 104.
        pytest.param("tp2_dp2_fp32", "TP4", ("--vocab-size", "101"), marks=full),
        pytest.param("tp2_dp2_fp32", "DP4", ("--vocab-size", "101"), marks=full),
        pytest.param("moe_ep2_dp4", "TP2 DP2 EP2", ("--sequence-parallel",), marks=full),
        pytest.param("no_distributed_optimizer", "TP4", (), marks=full),
        pytest.param("fp16", "DP4", (), marks=full),
        # After six steps the batches are of 8 and 12 samples, and no longer of 4.
        pytest.param("batch_rampup", "PP2 DP2", (), marks=full),
    ],
)
def test_training_goes_on_as_stock_megatron_would(
    template: Template, tmp_path: Path, name: str, layout: str, more: tuple[str, ...]
) -> None:
    """With evaluations before and after; and what it saves after the switch, stock Megatron goes on from."""
    evaluated = ("--eval-iters", "2", "--eval-interval", "4", "--split", "90,5,5")
    base = longer(name, LAST, *RESHARDABLE, *evaluated, *more)
    schedule = tmp_path / "schedule.yaml"
    schedule.write_text(f"{SWITCH}: {layout}\n")
    saved = ("--save", str(tmp_path / "saved"), "--save-interval", str(LAST))
    # Two ranks are one node, which has nobody to keep its copies.
    copies = ("--deadpool-replicas", str(int(parse_layout(layout).world > base.world_size // 2)))
    extra = (*HOTSWAP, *copies, "--hotswap-schedule", str(schedule), *saved)
    with job(template, tmp_path / "run", base, extra) as running:
        running.finish(timeout=300)
        (switched,) = running.of_kind("switch_done")
        assert switched["generation"] == SWITCH
    expected = read(resharded_oracle(template, tmp_path, base, SWITCH, layout, LAST + 1))
    continued = read(loaded(template, tmp_path / "on", at_layout(base, layout), tmp_path / "saved", LAST + 1))
    for rank, (*lines, last) in expected.items():
        assert [line for line in read(running.trace)[rank] if line["iteration"] > SWITCH] == lines
        assert continued[rank] == [last]


@full
def test_a_resize_every_five_steps_for_a_hundred(template: Template, tmp_path: Path) -> None:
    """Every step equals a chain of stock Megatrons that save and load at the same steps. Most processes serve several times."""
    base = longer("dp4", 100, *RESHARDABLE, "--global-batch-size", "12", "--micro-batch-size", "1")
    around = ("DP2", "DP3", "TP2 DP2", "PP2", "DP4")
    stops = {at: around[i % len(around)] for i, at in enumerate(range(5, 100, 5))}
    schedule = tmp_path / "schedule.yaml"
    schedule.write_text("".join(f"{at}: {layout}\n" for at, layout in stops.items()))
    extra = (*HOTSWAP, "--hotswap-schedule", str(schedule), "--hotswap-keep-worlds", "5")
    with job(template, tmp_path / "run", base, extra, nodes=4, spares=0) as running:
        running.finish(timeout=1200)
    assert [event["generation"] for event in running.of_kind("switch_done")] == list(stops)
    assert len(running.of_kind("recalled")) > len(stops)
    oracle = chained_oracle(template, tmp_path, base, stops, 100)
    trained = read(running.trace)
    expected: dict[int, list[dict[str, Any]]] = {rank: [] for rank in range(4)}
    for at in [*stops, 100]:
        for rank, lines in read(oracle / f"until{at}").items():
            expected[rank] += lines
    assert {rank: [line["iteration"] for line in lines] for rank, lines in trained.items()} == {
        rank: [line["iteration"] for line in lines] for rank, lines in expected.items()
    }
    assert trained == expected


@full
def test_nodes_are_added_and_any_are_taken_away(template: Template, tmp_path: Path) -> None:
    """Two nodes, three, four, and two again: the coordinator's own is one of those that leave."""
    people, sums = People(tmp_path / "job"), tmp_path / "sums"
    sums.mkdir()
    base = longer("dp4", ENDLESS, "--global-batch-size", "12", "--micro-batch-size", "1")
    base = at_layout(base, "DP2")
    launch, env = ("--job-dir", str(people.folder)), {"SUMS": str(sums)}
    with job(template, tmp_path, base, HOTSWAP, spares=2, script=LOGICAL, env=env, launch=launch) as running:
        running.wait_for(lambda: list(sums.glob("end2.*")))
        for size, where in ((3, ()), (4, ()), (2, ("--nodes", "n1", "n3"))):
            done = people.run("reshard", "--dp", str(size), *where)
            assert done.status == 0, done.error
        assert [slot["node"] for slot in people.status()["slots"]] == ["n1", "n3"]
        running.wait_for(lambda: len(people.of_kind("switch_done")) == 3)
        last = people.of_kind("switch_done")[-1]["generation"]
        running.wait_for(lambda: list(sums.glob(f"end{last + 2}.*")))
    for switch in people.of_kind("switch_done"):
        ended, began = (logical_state(sums, moment, switch["generation"]) for moment in ("end", "begin"))
        assert ended and ended == began


# Name: where it begins, where it goes, what differs from the configuration.
TOURS = {
    "dense": ("tp2_dp2_fp32", "TP1 PP2 DP2, TP1 DP1, TP2 PP2, DP4, TP4, PP4, TP2 DP2", ("--num-layers", "4")),
    "llama": ("llama_tp2_sp_recompute", "PP2 DP2, TP2 PP2, DP4, DP1, PP2 VPP2 DP2, TP2 DP2", ("--num-layers", "4")),
    "moe": (
        "moe_ep2_dp4",
        "EP4 DP4, TP2 DP2, TP2 EP2 DP2, PP2 DP2 EP2, DP1, EP2 DP2, TP2 DP2 EP4 ETP1, EP2 DP4",
        ("--sequence-parallel",),
    ),
    "odd": (
        "tp2_dp2_bf16_overlap",
        "DP3, TP2 PP2, PP3, PP2 FIRST1 DP2, TP4, DP1, TP2 DP2",
        ("--num-layers", "6", "--global-batch-size", "12", "--micro-batch-size", "1", "--vocab-size", "101"),
    ),
    "plain optimizer": ("no_distributed_optimizer", "DP4, TP2 PP2, DP1, TP2 DP2", ()),
}


@pytest.mark.parametrize(
    "tour", ["moe", *(pytest.param(t, marks=full) for t in ("dense", "llama", "odd", "plain optimizer"))]
)
def test_a_tour_of_layouts_keeps_every_element_in_its_place(template: Template, tmp_path: Path, tour: str) -> None:
    """One step in each layout; what each begins with is what the one before ended with, by Megatron's own metadata."""
    name, layouts, more = TOURS[tour]
    stops = [text.strip() for text in layouts.split(",")]
    base = longer(name, 3 + len(stops), *more)
    schedule = tmp_path / "schedule.yaml"
    schedule.write_text("".join(f"{2 + i}: {layout}\n" for i, layout in enumerate(stops)))
    (tmp_path / "sums").mkdir()
    # One rank alone has nobody to keep its copies.
    extra = (*HOTSWAP, "--deadpool-replicas", "0", "--hotswap-schedule", str(schedule))
    env = {"SUMS": str(tmp_path / "sums")}
    with job(template, tmp_path / "run", base, extra, script=LOGICAL, env=env) as running:
        running.finish(timeout=400)
    switches = running.of_kind("switch_done")
    assert [s["generation"] for s in switches] == [2 + i for i in range(len(stops))], running.child.output[-3000:]
    for switch in switches:
        ended = logical_state(tmp_path / "sums", "end", switch["generation"])
        began = logical_state(tmp_path / "sums", "begin", switch["generation"])
        assert ended and ended == began, switch["cause"]


def test_people_change_the_layout_of_a_running_job(template: Template, tmp_path: Path) -> None:
    """There and back by command; what cannot be is refused with what could, and training does not notice."""
    people, sums = People(tmp_path / "job"), tmp_path / "sums"
    sums.mkdir()
    launch, env = ("--job-dir", str(people.folder)), {"SUMS": str(sums)}
    base = longer("tp2_dp2_fp32", ENDLESS)
    with job(template, tmp_path, base, HOTSWAP, spares=0, script=LOGICAL, env=env, launch=launch) as running:
        running.wait_for(lambda: list(sums.glob("end4.*")))
        refused = people.run("reshard", "--tp", "3")
        assert refused.status == 2 and "nearest layouts" in refused.error
        assert "alone, and --deadpool-replicas 1" in people.run("reshard", "--tp", "2").error
        assert people.run("reshard", "--pp", "2", "--dp", "2", "--dry-run").status == 0
        changed = people.run("reshard", "--pp", "2", "--dp", "2")
        assert changed.status == 0 and "training goes on in layout TP1·PP2·DP2" in changed.out, changed.error
        assert people.status()["layout"] == "TP1·PP2·DP2"
        back = people.run("reshard", "--tp", "2", "--dp", "2", "--nodes", "n1", "n0")
        assert back.status == 0, back.error
        assert [slot["node"] for slot in people.status()["slots"]] == ["n1", "n0"]
        running.wait_for(lambda: len(people.of_kind("switch_done")) == 2)
    for switch in people.of_kind("switch_done"):
        ended, began = (logical_state(sums, moment, switch["generation"]) for moment in ("end", "begin"))
        assert ended and ended == began


@full
def test_a_batch_is_judged_from_where_the_job_stands(template: Template, tmp_path: Path) -> None:
    """Batches of 4 up to iteration 200, then of 8; the layout takes 8 at once."""
    people = People(tmp_path / "job")
    base = longer("batch_rampup", ENDLESS, "--step-batch-size-schedule", "0:4 25600:8")
    with job(template, tmp_path, base, HOTSWAP, spares=0, launch=("--job-dir", str(people.folder))) as running:
        running.wait_for_step(20)
        ask = ("reshard", "--dp", "4", "--tp", "1", "--dry-run", "--at-iteration")
        assert "batches of 4 samples" in people.run(*ask, "190").error
        assert people.run(*ask, "201").status == 0
