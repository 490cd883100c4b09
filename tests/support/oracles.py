"""What tests compare with: stock Megatron, at another layout too, and what ranks noted of their state."""

from __future__ import annotations

import json
from pathlib import Path

from megatron_resilience.hotswap.flags import under_layout
from megatron_resilience.observe.trace import read
from megatron_resilience.vps.layout import parse_layout
from tests.support.configurations import Configuration
from tests.support.template import Template

ENDLESS = 100_000
HOTSWAP = ("--deadpool", "--hotswap-parallelism")
STEADY = ("--ckpt-format", "torch_dist", "--lr-decay-iters", "100", "--override-opt_param-scheduler")
"""Saving and loading that changes nothing of how training goes on."""
RESHARDABLE = (*STEADY, "--dist-ckpt-optim-fully-reshardable")
LOGICAL = str(Path(__file__).with_name("logical.py"))


def stock(template: Template, world_size: int, argv: list[str] | tuple[str, ...]) -> None:
    """Runs Megatron without --deadpool."""
    failed = [result for result in template.run_ranks(world_size, list(argv)) if result.returncode != 0]
    # The first to fail takes the others down.
    assert not failed, max(failed, key=lambda result: result.returncode).output[-4000:]


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


def assert_equal_until(trace: Path, oracle: Path, generation: int) -> None:
    """Every step up to a generation was executed, and every execution of it is the oracle's: a death repeats some."""
    for rank, lines in read(oracle).items():
        expected = {line["iteration"]: line for line in lines if line["iteration"] <= generation}
        ours = [line for line in read(trace)[rank] if line["iteration"] <= generation]
        assert {line["iteration"] for line in ours} == set(expected)
        assert all(line == expected[line["iteration"]] for line in ours)
