"""Medians with their range, goals, and the file they go to."""

from __future__ import annotations

import json
import os
import platform
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

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
