"""What people see of an iteration they see once: on the console, and in TensorBoard.

An iteration that is done again after a recovery would be printed and written again, to the bit. The ranks that are left agree
when they meet on what is out already (Megatron prints a line of the log before a collective that all ranks take part in, so
whoever is past it knows); repeated lines are then swallowed. TensorBoard's files belong to the last rank. A survivor drops
repeated points; a newcomer cuts its predecessor's file where the generation ended that it resumes from, which a note beside
the file tells.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from megatron.training import global_vars, training

from megatron_resilience.observe.trace import write_private

LOGGED, EVALUATED = 0, 1
"""Places in the list of iterations that are out."""
_NOTE = ".generations.json"
_KEPT = 4


class Once:
    """Holds what is out.

    Attributes:
        out: the last iteration whose line of the log is out, and the last whose evaluation is.
    """

    def __init__(self) -> None:
        self.out = [0, 0]
        self._agreed = [0, 0]
        self._quiet = False
        self._print: Callable[[str], None] = training.print_rank_last

    def install(self) -> None:
        """Wraps Megatron's printing, and the writer that TensorBoard's files come from."""
        training.print_rank_last = self._print_rank_last
        logging.getLogger("megatron.core.timers").addFilter(lambda record: not self._quiet)
        original = global_vars._set_tensorboard_writer

        @functools.wraps(original)
        def set_writer(args: Any) -> None:
            original(args)
            if global_vars._GLOBAL_TENSORBOARD_WRITER is not None:
                global_vars._GLOBAL_TENSORBOARD_WRITER = OnceWriter(global_vars._GLOBAL_TENSORBOARD_WRITER)

        global_vars._set_tensorboard_writer = set_writer

    def resumes(self, agreed: list[int]) -> None:
        """Training goes on; up to ``agreed`` all is out."""
        self._agreed = list(agreed)

    def ends(self) -> None:
        """Training is over: what follows is shown whatever it is (the final evaluations share a step)."""
        self._agreed = [0, 0]
        writer = global_vars._GLOBAL_TENSORBOARD_WRITER
        if isinstance(writer, OnceWriter):
            writer.take_all()

    @contextlib.contextmanager
    def showing(self, what: int, iteration: int) -> Iterator[None]:
        """While an iteration's log or evaluation is shown."""
        self._quiet = iteration <= self._agreed[what]
        try:
            yield
        finally:
            self._quiet = False

    def is_out(self, what: int, iteration: int) -> None:
        """Every rank's part of it has been shown."""
        self.out[what] = max(self.out[what], iteration)

    def generation_ends(self, generation: int) -> None:
        """Makes durable what the writer has of iterations up to ``generation``; called before that is protected."""
        writer = global_vars._GLOBAL_TENSORBOARD_WRITER
        if isinstance(writer, OnceWriter):
            writer.mark(generation)

    def _print_rank_last(self, message: str) -> None:
        if not self._quiet:
            self._print(message)


class OnceWriter:
    """A ``SummaryWriter`` that takes each step of a tag once, and knows where in its file a generation ends."""

    def __init__(self, writer: Any) -> None:
        self._writer = writer
        self._last: dict[str, int] | None = {}
        self._sizes: dict[int, int] = {}
        self._dirty = True

    def add_scalar(self, tag: str, scalar_value: Any, global_step: int | None = None, *rest: Any, **more: Any) -> None:
        """As ``SummaryWriter.add_scalar``; a step that the tag has had already is dropped."""
        if global_step is not None and self._last is not None:
            if global_step <= self._last.get(tag, -1):
                return
            self._last[tag] = global_step
        self._dirty = True
        self._writer.add_scalar(tag, scalar_value, global_step, *rest, **more)
        if self._last is None:
            # Megatron flushes for the last time before the final evaluations; a thread holds points, and nobody waits for it.
            self._writer.flush()

    def __getattr__(self, name: str) -> Any:
        self.__dict__["_dirty"] = True
        return getattr(self.__dict__["_writer"], name)

    def take_all(self) -> None:
        """From now on nothing is dropped, and every point is written at once."""
        self._last = None

    def mark(self, generation: int) -> None:
        """Flushes, and notes the size of the file as that of ``generation``."""
        path = _event_file(self._writer)
        if not self._dirty or path is None:
            return
        self._writer.flush()
        self._dirty = False
        self._sizes = dict(sorted({**self._sizes, generation: path.stat().st_size}.items())[-_KEPT:])
        note = path.with_name(path.name + _NOTE)
        new = note.with_name(note.name + ".new")
        write_private(new, json.dumps({"file": path.name, "sizes": self._sizes}))
        os.replace(new, note)


def cut_back(directory: str, generation: int) -> None:
    """Takes from the newest event file under ``directory`` what its writer wrote after ``generation`` ended.

    For the newcomer that replaces the writer. Without a note, or without the file, nothing is done.
    """
    notes = sorted(Path(directory).glob(f"*{_NOTE}"), key=lambda path: path.stat().st_mtime)
    if not notes:
        return
    note = json.loads(notes[-1].read_text())
    path = Path(directory) / note["file"]
    ended = [size for known, size in note["sizes"].items() if int(known) <= generation]
    if ended and path.exists():
        os.truncate(path, max(ended))


def _event_file(writer: Any) -> Path | None:
    events = getattr(getattr(writer, "file_writer", None), "event_writer", None)
    name = getattr(events, "_file_name", None)
    return None if name is None else Path(name)
