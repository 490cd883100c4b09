"""The layout changes while a real GPT trains: what follows equals stock Megatron loading the same state at that layout."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from megatron_resilience.hotswap.flags import under_layout
from megatron_resilience.observe.events import read_events
from megatron_resilience.observe.trace import read
from megatron_resilience.vps.layout import parse_layout
from tests.e2e.test_commands import People
from tests.e2e.test_hot_swap import longer
from tests.e2e.test_load import STEADY, stock
from tests.support.configurations import Configuration
from tests.support.job import LAUNCHER, end_together, job, kill_node
from tests.support.template import Child, Template, free_port, plain_environment

pytestmark = pytest.mark.e2e

SWITCH, LAST, ENDLESS = 6, 12, 100_000
RESHARDABLE = (*STEADY, "--dist-ckpt-optim-fully-reshardable")
LOGICAL = str(Path(__file__).parents[1] / "support" / "logical.py")
DIE_IN_SWITCH = str(Path(__file__).parents[1] / "support" / "die_in_switch.py")
HOTSWAP = ("--deadpool", "--hotswap-parallelism")


def at_layout(configuration: Configuration, layout: str) -> Configuration:
    """The same training under another layout."""
    parsed = parse_layout(layout)
    return Configuration(parsed.world, tuple(under_layout(configuration.argv, parsed)))


def resharded_oracle(template: Template, folder: Path, base: Configuration, at: int, layout: str, last: int) -> Path:
    """Stock Megatron: trained under ``base`` up to ``at``, saved, loaded under ``layout``, trained to ``last``."""
    checkpoint = ("--save", str(folder / "ckpt"), "--save-interval", str(at))
    stock(template, base.world_size, [*base.argv, "--train-iters", str(at), *checkpoint])
    return loaded(template, folder / "oracle", at_layout(base, layout), folder / "ckpt", last)


def loaded(template: Template, trace: Path, target: Configuration, checkpoint: Path, last: int) -> Path:
    """Stock Megatron goes on from a checkpoint to ``last``."""
    argv = [*target.argv, "--train-iters", str(last), "--load", str(checkpoint), "--trace-dir", str(trace)]
    stock(template, target.world_size, argv)
    return trace


def chained_oracle(template: Template, folder: Path, base: Configuration, stops: dict[int, str], last: int) -> Path:
    """Stock Megatron trained to ``last``, saved and loaded at each of ``stops`` under the layout that begins there."""
    trace, checkpoint, target = folder / "oracle", folder / "ckpt", base
    for at, then in zip([*stops, last], [*stops.values(), ""], strict=True):
        load = ("--load", str(checkpoint)) if checkpoint.exists() else ()
        save = ("--save", str(checkpoint), "--save-interval", str(at))
        part = trace / f"until{at}"
        stock(
            template,
            target.world_size,
            [*target.argv, "--train-iters", str(at), *load, *save, "--trace-dir", str(part)],
        )
        target = at_layout(base, then) if then else target
    return trace


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


def logical_state(folder: Path, moment: str, generation: int) -> dict[str, int | float]:
    """The sums of all ranks together; of a step's number, which every rank with a part has, the one number."""
    total: dict[str, int | float] = {}
    # A step that was interrupted had begun in the old world too.
    old = {path.name.split(".")[2] for path in folder.glob(f"end{generation}.*.json")}
    for path in folder.glob(f"{moment}{generation}.*.json"):
        if moment == "begin" and path.name.split(".")[2] in old:
            continue
        for name, value in json.loads(path.read_text()).items():
            if name.endswith("/step"):
                assert total.setdefault(name, value) == value
            else:
                total[name] = (total.get(name, 0) + value) % 2**64
    return total


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


def assert_equal_until(trace: Path, oracle: Path, generation: int) -> None:
    """Every execution of every step up to a generation is the oracle's."""
    for rank, lines in read(oracle).items():
        expected = {line["iteration"]: line for line in lines}
        for line in read(trace)[rank]:
            if line["iteration"] <= generation:
                assert line == expected[line["iteration"]]


def dying(folder: Path, what: str, rank: int) -> tuple[Path, dict[str, str]]:
    """A schedule with one change, and what die_in_switch.py is told about the death in the middle of it."""
    schedule = folder / "schedule.yaml"
    schedule.write_text("4: PP2 DP2\n")
    (folder / "sums").mkdir()
    marker = str(folder / "died")
    return schedule, {"SUMS": str(folder / "sums"), "DIE_RANK": str(rank), "DIE_WHAT": what, "DIE_MARKER": marker}


@pytest.mark.parametrize(("what", "rank"), [("rank", 1), ("node", 0), pytest.param("node", 3, marks=full)])
def test_a_death_in_the_middle_of_a_switch_loses_nothing(
    template: Template, tmp_path: Path, oracle: Callable[[Configuration], Path], what: str, rank: int
) -> None:
    """The old layout trains on (with a spare where a node died), and the change is made later."""
    base = longer("tp2_dp2_fp32", 60)
    schedule, env = dying(tmp_path, what, rank)
    extra = (*HOTSWAP, "--hotswap-schedule", str(schedule))
    with job(template, tmp_path / "run", base, extra, script=DIE_IN_SWITCH, env=env) as running:
        running.finish(timeout=200)
    (abandoned,) = running.of_kind("switch_abandoned")
    (switched,) = running.of_kind("switch_done")
    assert len(running.of_kind("recovered")) == (what == "node")
    assert abandoned["layout"] == "TP1·PP2·DP2" and switched["generation"] > 4
    ended, began = (logical_state(tmp_path / "sums", moment, switched["generation"]) for moment in ("end", "begin"))
    assert ended and ended == began
    assert_equal_until(running.trace, oracle(base), switched["generation"])


@pytest.mark.parametrize(("what", "rank"), [("rank", 1), pytest.param("node", 0, marks=full)])
def test_where_two_layouts_do_not_fit_the_old_one_makes_room(
    template: Template, tmp_path: Path, oracle: Callable[[Configuration], Path], what: str, rank: int
) -> None:
    """It takes its memory again when the change fails, and trains on with what it had; the next attempt succeeds."""
    base = longer("tp2_dp2_bf16_overlap", 40)
    schedule, env = dying(tmp_path, what, rank)
    (tmp_path / "tenants").mkdir()
    env["TENANTS"] = str(tmp_path / "tenants")
    extra = (*HOTSWAP, "--hotswap-exclusive-memory", "--hotswap-schedule", str(schedule))
    with job(template, tmp_path / "run", base, extra, script=DIE_IN_SWITCH, env=env) as running:
        running.finish(timeout=200)
    assert len(running.of_kind("switch_abandoned")) == 1
    assert len(running.of_kind("recovered")) == (what == "node")
    (switched,) = running.of_kind("switch_done")
    assert switched["wait_s"] > 0 and switched["prepare_s"] < 0.1, "nothing of it was hidden"
    ended, began = (logical_state(tmp_path / "sums", moment, switched["generation"]) for moment in ("end", "begin"))
    assert ended and ended == began
    assert_equal_until(running.trace, oracle(base), switched["generation"])
    # Whenever a rank of the new world began to make tensors, no rank of the old one held any.
    found = [int(line) for line in (tmp_path / "tenants" / "found").read_text().splitlines()]
    assert len(found) >= 8 and not any(found), found


@pytest.mark.parametrize("memory", [(), pytest.param(("--hotswap-exclusive-memory",), marks=full)])
def test_a_node_is_lost_and_no_spare_is_left(
    template: Template, tmp_path: Path, oracle: Callable[[Configuration], Path], memory: tuple[str, ...]
) -> None:
    """The survivors go on in a smaller layout, sourced partly from copies, as stock Megatron would with that state there."""
    base = longer("dp4", 30, *RESHARDABLE)
    extra = (*HOTSWAP, *memory, "--deadpool-on-no-spare", "shrink")
    with job(template, tmp_path / "run", base, extra, nodes=4, spares=0) as running:
        running.wait_for_step(5)
        kill_node(running.agents()[2])
        running.finish(timeout=200)
    (switched,) = running.of_kind("switch_done")
    at = switched["generation"]
    assert "DP2" in switched["cause"] and 4 <= at <= 29
    stock_trace = resharded_oracle(template, tmp_path, base, at, "DP2", 30)
    for rank, lines in read(stock_trace).items():
        after = [line for line in read(running.trace)[rank] if line["iteration"] > at]
        assert after[-len(lines) :] == lines
    assert_equal_until(running.trace, oracle(base), at)


def test_a_node_that_comes_back_is_used_again(template: Template, tmp_path: Path) -> None:
    """Three nodes train, one dies, two go on, a third joins, three go on: no element is lost or moved on the way."""
    base = longer("dp4", ENDLESS, "--global-batch-size", "12", "--micro-batch-size", "1")
    port, events, sums, children = free_port(), tmp_path / "events.jsonl", tmp_path / "sums", []
    sums.mkdir()
    environment = plain_environment() | {"MEGATRON_RESILIENCE_SECRET": "between us", "SUMS": str(sums)}

    def start(rank: int) -> Child:
        argv = ["launch", "--nnodes", "3", "--nproc-per-node", "1", "--node-rank", str(rank), "--rdzv-endpoint"]
        argv += [f"127.0.0.1:{port}", "--events", str(events), LOGICAL, *base.argv, *HOTSWAP]
        children.append(template.fork(LAUNCHER, [*argv, "--deadpool-on-no-spare", "shrink"], env=environment))
        return children[-1]

    def seen(kind: str) -> list[dict[str, Any]]:
        return [event for event in (read_events(events) if events.exists() else []) if event["kind"] == kind]

    def wait_for(kind: str, count: int) -> None:
        while len(seen(kind)) < count:
            assert first.poll() is None, first.output[-4000:]
            time.sleep(0.02)

    try:
        first, _, third = (start(rank) for rank in range(3))
        wait_for("training", 1)
        while not list(sums.glob("end6.*")):
            time.sleep(0.02)
        kill_node(psutil.Process(third.pid))
        wait_for("switch_done", 1)
        start(2)
        wait_for("switch_done", 2)
    finally:
        end_together(children)
    smaller, larger = seen("switch_done")
    assert "DP2" in smaller["cause"] and "DP3" in larger["cause"]
    for switch in (smaller, larger):
        ended, began = (logical_state(sums, moment, switch["generation"]) for moment in ("end", "begin"))
        assert ended and ended == began


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
def test_a_leader_without_ranks_dies_before_a_change(template: Template, tmp_path: Path) -> None:
    """Ranks have been told where to stop, and nobody prepares yet: whoever leads next must know of it, or they stand for ever."""
    people, schedule = People(tmp_path / "job"), tmp_path / "schedule.yaml"
    schedule.write_text("200: PP2 DP2\n")
    extra = (*HOTSWAP, "--hotswap-exclusive-memory", "--hotswap-schedule", str(schedule))
    base = longer("tp2_dp2_fp32", ENDLESS)
    with job(template, tmp_path, base, extra, launch=("--job-dir", str(people.folder))) as running:
        running.wait_for_step(4)
        leader = running.agents()[0]
        assert people.run("drain", "n0").status == 0
        running.wait_for(lambda: len(people.of_kind("switch_agreed")) == 2)
        kill_node(leader)
        running.wait_for(lambda: people.of_kind("switch_done"))
        (switched,) = people.of_kind("switch_done")
        assert switched["generation"] == 200 and people.status()["leader"] == "n1"
