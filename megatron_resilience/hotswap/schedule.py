"""When which layout is wanted: ``--hotswap-schedule FILE``, YAML, iteration to layout. Pure.

::

    100: TP2 PP2 DP2
    500: {tp: 4, pp: 1, dp: 2}

A layout holds from the end of its iteration on. Dimensions that are left out have size 1.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from megatron_resilience.errors import ConfigurationError
from megatron_resilience.vps.layout import Layout, parse_layout

Schedule = tuple[tuple[int, Layout], ...]
"""(iteration, layout), ascending."""


def read_schedule(path: Path, live: Layout) -> Schedule:
    """The schedule in a file.

    Args:
        live: layout of the command line; what a layout's text does not say (buckets, order of ranks) is as there.

    Raises:
        ConfigurationError: names the file, the entry, and what it should be.
    """
    flag = f"--hotswap-schedule {path}"
    try:
        data = yaml.safe_load(path.read_text()) or {}
    except (OSError, yaml.YAMLError) as error:
        raise ConfigurationError(f"{flag}: {error}") from error
    if not isinstance(data, dict) or not all(isinstance(k, int) and k > 0 for k in data):
        raise ConfigurationError(f"{flag}: expected lines like `100: TP2 PP2 DP2`, a positive iteration and a layout")
    return tuple((at, parse_entry(value, live, f"{flag}, iteration {at}")) for at, value in sorted(data.items()))


def parse_entry(value: Any, live: Layout, where: str) -> Layout:
    """One layout, as text or as a mapping of dimensions.

    Raises:
        ConfigurationError: begins with ``where``.
    """
    text = ",".join(f"{k}{v}" for k, v in value.items()) if isinstance(value, dict) else str(value)
    try:
        return parse_layout(text, bare(live))
    except ValueError as error:
        raise ConfigurationError(f"{where}: {error}") from error


def bare(live: Layout) -> Layout:
    """``live`` on one rank: its settings without its sizes."""
    return replace(live, tp=1, pp=1, dp=1, cp=1, ep=1, etp=None, vpp=1, first_stage_layers=None, last_stage_layers=None)


def due(schedule: Schedule, generation: int, live: Layout) -> tuple[int, Layout] | None:
    """What to ask for on entry to the step after ``generation``: a change that is overdue, else the next one to come."""
    past = [(at, layout) for at, layout in schedule if at <= generation]
    if past and str(past[-1][1]) != str(live):
        return generation + 1, past[-1][1]
    return next(((at, layout) for at, layout in schedule if at > generation and str(layout) != str(live)), None)
