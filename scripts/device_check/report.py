"""What was checked, as a table and as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Check:
    """One line.

    Attributes:
        part: of the check, such as ``copies``.
        what: was measured or compared.
        found: a figure with its unit, or words.
        wanted: what it must be; empty where nothing is.
        held: whether it is so; None where nothing is wanted, or it could not be tried.
    """

    part: str
    what: str
    found: str
    wanted: str = ""
    held: bool | None = None


def table(checks: Sequence[Check]) -> str:
    """For people."""
    words = {True: "held", False: "FAILED", None: ""}
    rows = [("part", "what", "found", "wanted", "")]
    rows += [(c.part, c.what, c.found, c.wanted, words[c.held]) for c in checks]
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def write(path: Path, machine: dict[str, Any], checks: Sequence[Check]) -> None:
    """The same for programs; folders are made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"machine": machine, "checks": [asdict(check) for check in checks]}, indent=1) + "\n")
