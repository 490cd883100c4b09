"""One JSON-lines log per job: everything that happened to it, in order."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any


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
    """The events of a job, oldest first; a line cut off by a crash is left out."""
    result = []
    for line in path.read_text().splitlines():
        try:
            result.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return result
