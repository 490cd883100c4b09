"""One JSON-lines log per job: everything that happened to it, in order."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

_LONGEST = 200


class EventLog:
    """Appends events to a file of mode 0600, one JSON object per line.

    Every event has ``time`` (``time.time()``, seconds), ``kind`` and ``by`` (the node that wrote it).
    """

    def __init__(self, path: Path | None, by: str) -> None:
        self._path = path
        self._by = by

    def write(self, kind: str, **fields: Any) -> None:
        """Appends one event; without a path it does nothing."""
        if self._path is None:
            return
        line = json.dumps({"time": round(time.time(), 4), "kind": kind, "by": self._by, **fields}) + "\n"
        fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            os.write(fd, line.encode())
        finally:
            os.close(fd)


def read_events(path: Path) -> list[dict[str, Any]]:
    """The events of a job, oldest first; a line cut off by a crash is left out.

    Args:
        path: of one log, or of a folder with one for each agent, whose clocks may differ a little.
    """
    if path.is_dir():
        found = [event for log in sorted(path.glob("*.jsonl")) for event in read_events(log)]
        return sorted(found, key=lambda event: event["time"])
    result = []
    for text in path.read_text().splitlines():
        try:
            result.append(json.loads(text))
        except json.JSONDecodeError:
            continue
    return result


def line(event: dict[str, Any]) -> str:
    """An event for people: when, who wrote it, what; long texts (stacks) are cut."""
    when = time.strftime("%m-%d %H:%M:%S", time.localtime(event["time"])) + f"{event['time'] % 1:.2f}"[1:]
    fields = {k: v for k, v in event.items() if k not in ("time", "kind", "by", "marks")}
    told = " ".join(f"{name}={_short(value)}" for name, value in fields.items())
    return f"{when}  {event['by']:<16}  {event['kind']:<12}  {told}".rstrip()


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    text = text.replace("\n", " | ")
    return text if len(text) <= _LONGEST else text[:_LONGEST] + "..."
