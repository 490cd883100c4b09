"""The console and TensorBoard show each iteration once, whoever dies, as an undisturbed run shows them.

Killed in its evaluation, an iteration is done again that everybody has logged already.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

from megatron_resilience.observe.trace import differences
from tests.e2e.test_hot_swap import Oracle, longer
from tests.support.deaths import Death, environment
from tests.support.job import TRAIN_AND_DIE, job
from tests.support.template import Template

pytestmark = pytest.mark.e2e

ITERATIONS = 8
TAIL = ("--eval-interval", "2", "--eval-iters", "1", "--split", "90,5,5", "--log-interval", "1")
# Not to the end of the line: ranks share it, and another's may follow without a break.
LOGGED = re.compile(r" iteration +\d+/ +\d+ \|.*?nan iterations: +\d+ \|")
EVALUATED = re.compile(r"validation loss at iteration \d+ \| lm loss value: \S+ \| lm loss PPL: \S+")
TIMED = re.compile(r"elapsed time per iteration \(ms\): [\d.]+")


def shown(output: str) -> list[str]:
    """Lines of the log, without times, and of evaluations, sorted."""
    lines = [m.group() for pattern in (LOGGED, EVALUATED) for m in pattern.finditer(output)]
    return sorted(TIMED.sub("", line) for line in lines)


def points(folder: Path) -> Counter[tuple[str, int, float]]:
    """Every point in the event files, with how often it is there; times are left out."""
    found: Counter[tuple[str, int, float]] = Counter()
    for path in folder.glob("events.out.tfevents.*"):
        if path.suffix == ".json":
            continue
        for event in EventFileLoader(str(path)).Load():
            for value in event.summary.value if event.HasField("summary") else ():
                if value.HasField("tensor") and value.tensor.float_val and "time" not in value.tag:
                    found[value.tag, event.step, value.tensor.float_val[0]] += 1
    return found


@pytest.mark.parametrize(
    ("moment", "at", "rank"), [("forward", 4, 3), ("optimizer", 5, 0), ("evaluation", 4, 3), ("evaluation", 4, 0)]
)
def test_each_iteration_once(
    template: Template, tmp_path: Path, oracle: Oracle, moment: str, at: int, rank: int
) -> None:
    configuration = longer("tp2_dp2_fp32", ITERATIONS, *TAIL)
    ours, theirs = tmp_path / "tb-ours", tmp_path / "tb-theirs"
    argv = [*configuration.argv, "--tensorboard-dir", str(theirs), "--trace-dir", str(tmp_path / "oracle")]
    undisturbed = template.run_ranks(4, argv)
    assert all(result.returncode == 0 for result in undisturbed), undisturbed[3].output
    env = environment(tmp_path, Death(moment, at, rank))
    extra = ("--deadpool", "--tensorboard-dir", str(ours))
    with job(template, tmp_path / "run", configuration, extra, script=TRAIN_AND_DIE, env=env) as running:
        running.finish()
        assert differences(running.trace, tmp_path / "oracle") == []
        assert len(running.of_kind("recovered")) == 1
        assert shown(running.child.output) == shown("".join(result.output for result in undisturbed))
        assert len(shown(running.child.output)) >= ITERATIONS + ITERATIONS // 2
        assert points(ours) == points(theirs)
        assert set(points(theirs).values()) == {1}
