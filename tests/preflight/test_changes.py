"""What a planned change of layout takes is told before the job begins, and refused if it cannot be."""

from dataclasses import replace

import pytest

from megatron_resilience.preflight.changes import KEPT, change_rules, changes
from megatron_resilience.preflight.estimate import estimate
from megatron_resilience.preflight.job import GIB, Hardware, load_job
from megatron_resilience.vps.layout import parse_layout

JOB = load_job("7b")
OTHER = parse_layout("TP2 PP2 DP16", replace(JOB.layout, tp=1, pp=1, dp=1))
BOTH = replace(JOB, changes=(OTHER, JOB.layout))


def test_both_layouts_are_there_while_one_becomes_the_other():
    there, back = changes(BOTH)
    assert (there.before, there.after, back.before, back.after) == (JOB.layout, OTHER, OTHER, JOB.layout)
    old, new = estimate(JOB), estimate(replace(JOB, layout=OTHER))
    assert there.device_bytes == back.device_bytes == old.device_bytes + new.device_bytes
    assert there.host_bytes == old.host_bytes + new.host_bytes
    alone, _ = changes(replace(BOTH, exclusive_memory=True))
    assert alone.device_bytes == max(old.device_bytes, new.device_bytes)


def test_processes_that_are_kept_stay_beside_both_layouts():
    third = parse_layout("TP8 DP4", replace(JOB.layout, tp=1, pp=1, dp=1))
    tour = replace(JOB, changes=(OTHER, third, JOB.layout, OTHER, third))
    without = changes(tour)
    for kept, worlds in ((1, [0, 1, 1, 1, 1]), (5, [0, 1, 1, 1, 1])):
        found = changes(replace(tour, keep_worlds=kept))
        more = [c.device_bytes - w.device_bytes for c, w in zip(found, without, strict=True)]
        assert more == [KEPT * count for count in worlds], kept
        more = [c.host_bytes - w.host_bytes for c, w in zip(found, without, strict=True)]
        assert more == [KEPT * JOB.ranks_per_node * count for count in worlds]
    tight = replace(tour, keep_worlds=1, hardware=Hardware(device_memory_gib=1))
    assert all("a smaller --hotswap-keep-worlds (1 now)" in f.text for f in change_rules(tight, changes(tight)))


@pytest.mark.parametrize(
    ("job", "says"),
    [
        (replace(BOTH, changes=(parse_layout("TP8 DP32"),)), "takes 32 nodes"),
        (replace(BOTH, hardware=Hardware(host_memory_gib=64)), "of host memory per node"),
    ],
)
def test_refused_with_the_remedy(job, says):
    assert any(says in finding.text and finding.refused for finding in change_rules(job, changes(job)))


def test_a_device_with_room_for_one_layout_only():
    one = max(estimate(JOB).device_bytes, estimate(replace(JOB, layout=OTHER)).device_bytes)
    tight = replace(BOTH, hardware=Hardware(device_memory_gib=one * 1.2 / GIB))
    found = change_rules(tight, changes(tight))
    assert len(found) == 2 and all("--hotswap-exclusive-memory" in finding.text for finding in found)
    waiting = replace(tight, exclusive_memory=True)
    assert change_rules(waiting, changes(waiting)) == []


def test_settings_and_schedules_name_them(tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text(
        "model: llama2-7b\nlayout: TP2·PP1·DP8\nnodes: 2\nranks_per_node: 8\nchanges: [TP4 DP4, {tp: 8, dp: 2}]\n"
        "exclusive_memory: true\nkeep_worlds: 2\n"
    )
    job = load_job(str(path))
    assert [layout.tp for layout in job.changes] == [4, 8] and job.exclusive_memory and job.keep_worlds == 2
    assert len(changes(job)) == 2
