"""The wide matrix: every configuration is killed in every moment, and the result is bit-equal to its oracle.

Who dies is chosen so that every configuration and every moment meets every kind of victim: each node, led by each of its
ranks into the moment; each rank alone; all ranks of a node whose agent lives on. Tests of one configuration follow one another,
so that they share its oracle.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from megatron_resilience.observe.trace import differences
from tests.e2e.test_hot_swap import longer
from tests.e2e.test_resumption import TAIL
from tests.support.configurations import CONFIGURATIONS, Configuration
from tests.support.job import TRAIN_AND_DIE, job
from tests.support.template import Template

pytestmark = [pytest.mark.e2e, pytest.mark.full]

ITERATIONS = 8
NODES = 2
MOMENTS = (
    "forward",
    "backward",
    "reduction",
    "optimizer",
    "gather",
    "scheduler",
    "logging",
    "evaluation",
    "checkpoint",
    "first",
    "between",
)
ABSENT = {("no_distributed_optimizer", "gather")}
"""Nothing is gathered where every rank has the whole optimizer state."""
SAVE = ("--save-interval", "4", "--ckpt-format", "torch_dist")


@dataclass(frozen=True)
class Victim:
    """Who dies when ``rank`` comes to the moment.

    Attributes:
        what: ``"node"``, ``"ranks"`` (all of its node) or ``"rank"`` (it alone).
    """

    what: str
    rank: int

    def __str__(self) -> str:
        return f"{self.what}-of-{self.rank}" if self.what != "rank" else f"rank-{self.rank}"


def victims(world_size: int) -> list[Victim]:
    """All kinds, for two nodes."""
    per_node = world_size // NODES
    everyone = range(world_size)
    all_of_a_node = [Victim("ranks", node * per_node) for node in range(NODES)] if per_node > 1 else []
    return [*(Victim("node", r) for r in everyone), *(Victim("rank", r) for r in everyone), *all_of_a_node]


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


def death(name: str, moment: str, victim: Victim, marker: Path) -> dict[str, str]:
    """What ``train_and_die.py`` is told; the same every time."""
    chance = random.Random(f"{name}/{moment}")
    inside, at, latest = moment, chance.randint(2, 5), 0.03
    if moment == "first":
        inside, at = chance.choice(("forward", "backward", "reduction", "optimizer")), 1
    elif moment == "checkpoint":
        # Its writers are at work for seconds.
        at, latest = 4, 1.0
    return {
        "DIE_IN": inside,
        "DIE_AT": str(at),
        "DIE_RANK": str(victim.rank),
        "DIE_WHAT": victim.what,
        "DIE_AFTER": str(chance.choice([0, chance.uniform(0, latest)])),
        "DIE_MARKER": str(marker),
    }


@pytest.mark.parametrize(("name", "moment", "victim"), matrix(), ids=lambda value: str(value))
def test_matrix(
    template: Template,
    tmp_path: Path,
    oracle: Callable[[Configuration], Path],
    name: str,
    moment: str,
    victim: Victim,
) -> None:
    configuration = longer(name, ITERATIONS, *TAIL)
    env = death(name, moment, victim, tmp_path / "died")
    extra = ["--deadpool"]
    if moment == "checkpoint":
        extra += ["--save", str(tmp_path / "save"), *SAVE]
    spares = int(victim.what == "node")
    with job(template, tmp_path / "run", configuration, extra, spares=spares, script=TRAIN_AND_DIE, env=env) as running:
        running.finish()
    assert (tmp_path / "died").exists(), f"rank {victim.rank} never came to {moment}"
    assert differences(running.trace, oracle(configuration)) == []
    recovered = running.of_kind("recovered")
    # Several ranks of a node die one after the other: the second death may begin another recovery.
    assert 1 <= len(recovered) <= (2 if victim.what == "ranks" else 1), recovered
    assert all(event["steps_again"] <= 1 for event in recovered), recovered
    assert bool(running.of_kind("node_lost")) == (victim.what == "node")


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
