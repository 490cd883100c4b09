"""Medians with their range, goals, and the file they go to."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from megatron_resilience.bench import _model
from megatron_resilience.errors import ConfigurationError


def spread(values: Iterable[float]) -> dict[str, float]:
    """``{"median", "min", "max"}``."""
    all_values = list(values)
    return {"median": statistics.median(all_values), "min": min(all_values), "max": max(all_values)}


@dataclass(frozen=True)
class Goal:
    """A limit for the median of a value.

    Attributes:
        name: of the value in the report.
        limit: that it should keep.
        at_least: the limit is a lower one.
    """

    name: str
    limit: float
    at_least: bool = False

    def missed(self, report: Mapping[str, Any]) -> str | None:
        """A sentence if the median is beyond the limit."""
        median = report[self.name]["median"]
        if median >= self.limit if self.at_least else median <= self.limit:
            return None
        return f"{self.name} is {median:.4g}, the goal is {'>=' if self.at_least else '<='} {self.limit:g}"


def missed(goals: Iterable[Goal], report: Mapping[str, Any]) -> list[str]:
    """Sentences about the goals that a report misses."""
    return [sentence for goal in goals if (sentence := goal.missed(report)) is not None]


def machine() -> dict[str, Any]:
    """What the figures depend on."""
    return {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "python": platform.python_version(),
        "torch": version("torch"),
        "megatron-core": version("megatron-core"),
        "load_before": round(os.getloadavg()[0], 2),
    }


def parse(
    name: str,
    doc: str | None,
    counts: Mapping[str, tuple[int, str]],
    arguments: list[str],
    kinds: Sequence[str] = (),
) -> argparse.Namespace:
    """The command line of a bench that trains: ``--json``, ``--model``, and counts of something, each at least 1.

    Args:
        counts: default and help text by option name.
        kinds: of models, where there are several: ``--kinds`` chooses some.

    Raises:
        ConfigurationError: ``--json`` names a file that cannot be written.
    """
    parser = argparse.ArgumentParser(
        prog=f"python -m megatron_resilience.bench {name}",
        description=doc,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the report there")
    for option, (default, text) in counts.items():
        parser.add_argument(f"--{option}", type=int, default=default, help=f"{text} (default: {default})")
    parser.add_argument("--model", choices=_model.MODELS, default="standard", help="goals are for the standard one")
    if kinds:
        text = f"some of {', '.join(kinds)} (default: all)"
        parser.add_argument("--kinds", nargs="+", choices=kinds, default=list(kinds), metavar="KIND", help=text)
    options = parser.parse_args(arguments)
    for option in counts:
        if getattr(options, option) < 1:
            parser.error(f"--{option} {getattr(options, option)}: at least one is needed")
    check_writable(options.json)
    return options


def judged(problems: Sequence[str]) -> int:
    """Prints what is wrong with a run; the exit status."""
    for problem in problems:
        print(problem, file=sys.stderr)
    return int(bool(problems))


def check_writable(path: Path | None) -> None:
    """Before minutes are spent.

    Raises:
        ConfigurationError: ``--json`` names a file that cannot be written.
    """
    if path is not None and not (path.parent.is_dir() and os.access(path.parent, os.W_OK)):
        raise ConfigurationError(f"--json {path}: the folder {path.parent} does not exist or is not writable")


def write(path: Path | None, report: Mapping[str, Any]) -> None:
    """The whole report or nothing of it."""
    if path is not None:
        partial = path.with_name(path.name + ".part")
        partial.write_text(json.dumps(report, indent=1) + "\n")
        partial.replace(path)


def row(name: str, value: Mapping[str, float], unit: str = "", scale: float = 1.0) -> str:
    """One line of the printed table."""
    median, low, high = (value[key] * scale for key in ("median", "min", "max"))
    return f"{name:<34} {median:9.3f} {unit:<6} ({low:.3f} to {high:.3f})"
