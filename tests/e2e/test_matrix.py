"""The wide matrix: every configuration is killed in every moment, and the result is bit-equal to its oracle.

Who dies is chosen so that every configuration and every moment meets every kind of victim: each node, led by each of its
ranks into the moment; each rank alone; all ranks of a node whose agent lives on. A job suffers a few deaths, one after the
other. Tests of one configuration follow one another, so that they share its oracle.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_resilience.observe.trace import differences
from tests.e2e.test_hot_swap import longer
from tests.e2e.test_resumption import TAIL
from tests.support.configurations import CONFIGURATIONS, Configuration
from tests.support.deaths import Death, environment, missing
from tests.support.job import TRAIN_AND_DIE, job
from tests.support.template import Template

pytestmark = [pytest.mark.e2e, pytest.mark.full]

ITERATIONS = 13
NODES = 2
JOBS = (
    ("first", "checkpoint", "forward"),
    ("backward", "between", "logging"),
    ("reduction", "scheduler", "evaluation"),
    ("optimizer", "gather"),
)
"""The moments that one job meets, in order."""
MOMENTS = tuple(moment for moments in JOBS for moment in moments)
ABSENT = {("no_distributed_optimizer", "gather")}
"""Nothing is gathered where every rank has the whole optimizer state."""
SAVE = ("--save-interval", "8", "--ckpt-format", "torch_dist")
Victim = tuple[str, int]
"""``Death.what`` and ``Death.rank``."""


def victims(world_size: int) -> list[Victim]:
    """All kinds, for two nodes."""
    per_node = world_size // NODES
    everyone = range(world_size)
    all_of_a_node = [("ranks", node * per_node) for node in range(NODES)] if per_node > 1 else []
    return [*(("node", r) for r in everyone), *(("rank", r) for r in everyone), *all_of_a_node]


def matrix() -> list[tuple[str, str, Victim]]:
    """``(configuration, moment, victim)``: every pair of two of them that there is, with as few rows as moments need."""
    rows = []
    sizes: dict[int, int] = {}
    for name, configuration in CONFIGURATIONS.items():
        c = sizes[configuration.world_size] = sizes.get(configuration.world_size, -1) + 1
        kinds = victims(configuration.world_size)
        for m, moment in enumerate(MOMENTS):
            if (name, moment) not in ABSENT:
                rows.append((name, moment, kinds[(c + m) % len(kinds)]))
    return rows


def death(name: str, moment: str, victim: Victim, place: int) -> Death:
    """The same every time; ``place`` in the order of its job."""
    chance = random.Random(f"{name}/{moment}")
    what, rank = victim
    inside, at, latest = moment, 4 * place + chance.randint(2, 3), 0.03
    if moment == "first":
        inside, at = chance.choice(("forward", "backward", "reduction", "optimizer")), 1
    elif moment == "checkpoint":
        # Its writers are at work for seconds, the first time.
        at, latest = 8, 1.0
    return Death(inside, at, rank, what, chance.choice([0, chance.uniform(0, latest)]))


def jobs() -> list[tuple[str, tuple[Death, ...]]]:
    """The matrix, as ``(configuration, deaths)``."""
    victim = {(name, moment): who for name, moment, who in matrix()}
    return [
        (name, tuple(death(name, m, victim[name, m], place) for place, m in enumerate(moments) if (name, m) in victim))
        for name in CONFIGURATIONS
        for moments in JOBS
    ]


@pytest.mark.parametrize(
    ("name", "deaths"), jobs(), ids=lambda value: value if isinstance(value, str) else ",".join(map(str, value))
)
def test_matrix(
    template: Template,
    tmp_path: Path,
    oracle: Callable[[Configuration], Path],
    name: str,
    deaths: tuple[Death, ...],
) -> None:
    configuration = longer(name, ITERATIONS, *TAIL)
    extra = ["--deadpool"]
    if any(d.moment == "checkpoint" for d in deaths):
        extra += ["--save", str(tmp_path / "save"), *SAVE]
    whole = sum(d.what == "node" for d in deaths)
    env = environment(tmp_path, *deaths)
    with job(template, tmp_path / "run", configuration, extra, spares=whole, script=TRAIN_AND_DIE, env=env) as running:
        running.finish()
    assert not missing(tmp_path, *deaths)
    assert differences(running.trace, oracle(configuration)) == []
    recovered = running.of_kind("recovered")
    # Several ranks of a node die one after the other: the second death may begin another recovery.
    assert len(deaths) <= len(recovered) <= len(deaths) + sum(d.what == "ranks" for d in deaths), recovered
    assert all(event["steps_again"] <= 1 for event in recovered), recovered
    assert len(running.of_kind("node_lost")) == whole


@pytest.mark.parametrize("fields", [(0, 1), (0, 2), (1, 2)])
def test_the_matrix_covers_every_pair(fields: tuple[int, int]) -> None:
    rows = matrix()
    covered = {tuple(row[f] for f in fields) for row in rows}
    wanted = {
        tuple((name, moment, victim)[f] for f in fields)
        for name, configuration in CONFIGURATIONS.items()
        for moment in MOMENTS
        for victim in victims(configuration.world_size)
    }
    # A configuration may miss the one victim that its absent moment would have met.
    assert len(wanted - covered) <= len(ABSENT)
