"""Checkpoints that other processes still write while training goes on (``--async-save``).

A dead rank's part of such a checkpoint is lost, and the state it was made of is over. So while one is being written nothing
newer than its own generation is protected: a recovery goes back to the moment of the save, and begins it again. It costs the
steps since then, and the log says ``unprotected`` meanwhile; the checkpoints on disk are those of an undisturbed run.
"""

from __future__ import annotations

import contextlib
from typing import Any

from megatron.training import async_utils, get_timers, training


class AsyncSaves:
    """Knows which saves are not finalized. All ranks know the same: Megatron finalizes by a collective."""

    def __init__(self) -> None:
        self._scheduled: list[int] = []

    def unfinished(self) -> list[int]:
        """Iterations whose checkpoints are still being written, oldest first."""
        queue = async_utils._async_calls_queue
        count = 0 if queue is None else queue.get_num_unfinalized_calls()
        self._scheduled = self._scheduled[len(self._scheduled) - count :]
        return list(self._scheduled)

    def tail_ended(self, iteration: int) -> None:
        """Called at the end of an iteration, which may have begun a save."""
        queue = async_utils._async_calls_queue
        if queue is not None and queue.get_num_unfinalized_calls() > len(self._scheduled):
            self._scheduled.append(iteration)

    def give_up(self) -> None:
        """After an interruption: ends the writers and forgets what they wrote, which nobody will finalize."""
        queue, self._scheduled = async_utils._async_calls_queue, []
        if queue is None:
            return
        for request in queue.async_calls:
            process = getattr(request.async_caller, "process", None)
            if process is not None:
                with contextlib.suppress(ValueError):
                    process.kill()
                    process.join()
        # A new one counts its calls from the start, as that of a newcomer does.
        async_utils._async_calls_queue = None

    def begin_again(
        self, iteration: int, model: Any, optimizer: Any, scheduler: Any, operations: float, context: Any, data: Any
    ) -> None:
        """Saves ``iteration`` again, at the state that training goes on from. Collectives."""
        get_timers()("interval-time", log_level=0).start(barrier=True)
        training.save_checkpoint_and_time(
            iteration, model, optimizer, scheduler, operations, context, train_data_iterator=data
        )
        self.tail_ended(iteration)
