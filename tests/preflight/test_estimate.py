"""Bytes against sums made by hand."""

from dataclasses import replace

import pytest

from megatron_resilience.errors import ConfigurationError
from megatron_resilience.preflight.estimate import estimate
from megatron_resilience.preflight.job import Hardware, load_job
from megatron_resilience.state.segment import Shape
from megatron_resilience.vps.layout import parse_layout

LAPTOP = load_job("laptop")
H, F, V, S, L = 32, 128, 128, 32, 2
LAYER = (3 * H * H + 3 * H) + (H * H + H) + (H * F + F) + (F * H + H) + 4 * H
PARAMETERS = V * H + S * H + L * LAYER + 2 * H


def beside(job) -> int:
    """Bytes of a rank's state that are no parameter's: random streams and scalars."""
    one = replace(
        job, layout=parse_layout("DP1"), nodes=1, ranks_per_node=1, deadpool=replace(job.deadpool, replicas=0)
    )
    return estimate(one).rank_bytes - 12 * PARAMETERS


def test_a_model_on_one_rank():
    assert 0 < beside(LAPTOP) < 32_768


def test_shards_add_up():
    """DP 4 without TP: the optimizer's state in four parts, parameters and gradients whole."""
    job = replace(LAPTOP, layout=parse_layout("DP4"), parameter_bytes=2)
    taken = estimate(job)
    shard = 12 * PARAMETERS / 4
    assert shard <= taken.rank_bytes - beside(job) <= shard * 1.1
    assert taken.device_bytes >= PARAMETERS * 6 + shard
    assert taken.sent_bytes == 2 * taken.rank_bytes
    assert taken.host_bytes == 4 * Shape(taken.rank_bytes, b"").segment_bytes


def test_without_the_distributed_optimizer_every_rank_has_all():
    job = replace(LAPTOP, layout=parse_layout("DP4"), sharded_optimizer=False)
    assert estimate(job).rank_bytes - beside(job) == 12 * PARAMETERS


def test_seconds_follow_from_the_links():
    job = replace(LAPTOP, hardware=Hardware(network_gbytes_s=1.0, host_link_gbytes_s=2.0))
    taken = estimate(job)
    assert taken.send_seconds == pytest.approx(taken.sent_bytes / 1e9)
    assert taken.copy_seconds == pytest.approx(taken.rank_bytes / 2e9)


def test_copies_stay_out_of_the_rack():
    racks = ("west", "west", "east", "east")
    job = replace(load_job("1.3b"), domains=racks)
    assert estimate(job).keepers == {0: (2,), 1: (3,), 2: (0,), 3: (1,)}
    with pytest.raises(ConfigurationError, match="failure domains"):
        estimate(replace(job, domains=("west",) * 4))


def test_too_few_nodes_for_the_copies():
    with pytest.raises(ConfigurationError, match="or --deadpool-replicas 1"):
        estimate(replace(LAPTOP, deadpool=replace(LAPTOP.deadpool, replicas=2)))
