"""One rank's life under ``--deadpool``: join an epoch, train, be interrupted, join the next.

The same road serves first starts, survivors, ranks restarted in place and promoted spares:

    settle → say what we hold → meet (store, groups) → restore → rebuild → verify → commit → train

A newer epoch interrupts it anywhere, and it starts again from the top; nothing that the next attempt needs is
destroyed before the commit.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist

from megatron_resilience import exits
from megatron_resilience.accelerator.base import Accelerator
from megatron_resilience.control.link import AgentLink
from megatron_resilience.deadpool.allowance import StallAllowance
from megatron_resilience.deadpool.config import DeadpoolConfig
from megatron_resilience.deadpool.host_memory import HostMemory
from megatron_resilience.deadpool.meeting import MEETING_TIMEOUT_S, Meeting, is_communication_error
from megatron_resilience.deadpool.protection import (
    Protection,
    TrainingState,
    receive_slot,
    send_slot,
    views,
)
from megatron_resilience.deadpool.recovery import RestorePlan
from megatron_resilience.errors import Interrupted, SetAside, StateError
from megatron_resilience.hotswap.arrival import Arrival, Reshapable
from megatron_resilience.state.inventory import ITEM_SIZES
from megatron_resilience.state.ledger import Ledger
from megatron_resilience.state.segment import Slot
from megatron_resilience.topology.epoch import Epoch
from megatron_resilience.transport.base import Fabric

KEPT_REMAINS = 50
"""A process in which so many worlds have left something is not kept for another return of its layout."""


class RestorableState(TrainingState, Protocol):
    """What a session needs of the live training state beyond what protection reads."""

    rank: int
    world_size: int
    out: list[int]
    """Iterations whose output people have seen, by kind of output."""

    def dp_groups(self) -> list[list[int]]:
        """All data-parallel groups of the job as global ranks, in ring order."""

    def load(self, tensors: list[torch.Tensor], volatile_only: bool = False) -> None:
        """Makes the live tensors what a slot holds, in inventory order. No collectives."""

    def load_record(self, record: dict[str, Any]) -> None:
        """Makes the live scalars what a record says. No collectives."""

    def rebuild(self) -> None:
        """Recomputes what the inventory leaves out (model parameters from masters). Collectives."""

    def disagreements(self) -> list[str]:
        """Names of parameters that differ among ranks which must hold the same. Collectives."""


@dataclass(frozen=True)
class Place:
    """Where this rank runs: its node's id, address of the configured interface."""

    node: str
    address: str


@dataclass(frozen=True)
class Relayout:
    """What a session needs where the layout may change (``--hotswap-parallelism``).

    Attributes:
        live: the state in the terms of other layouts.
        exclusive: the device has no room for another layout's tensors beside these.
        keep_worlds: says, when this process parks, how many layouts' processes its node may keep after they were left, this one's
            among them; 0: it must end with its world.
        before_training: called with the generation from which this rank can train, before anybody is told so.
    """

    live: Reshapable
    exclusive: bool
    keep_worlds: Callable[[], int]
    before_training: Callable[[int], None]


class Session:
    """See the module.

    Args:
        link: to the agent.
        place: of this process.
        config: the settings.
        state: the live state.
        device_fabric: makes the fabric for device tensors from ``(store, rank)``, or None on CPU.
        device: that training runs on.
        timeout_s: of a collective of training (Megatron's ``--distributed-timeout-minutes``).
        relayout: where the layout may change.
        saves: training saves a checkpoint and ends when it is told to leave.
    """

    def __init__(
        self,
        link: AgentLink,
        place: Place,
        config: DeadpoolConfig,
        state: RestorableState,
        device_fabric: Callable[[Any, int], Fabric] | None,
        device: Accelerator,
        timeout_s: float,
        relayout: Relayout | None = None,
        saves: bool = False,
    ) -> None:
        self._link = link
        self._place = place
        self._config = config
        self._state = state
        self._device = device
        self._timeout_s = timeout_s
        self._meeting = Meeting(state.rank, place.address, device_fabric, timeout_s, link.latest)
        self._relayout = relayout
        self._set_aside = False
        self._moved: int | None = None
        self._world = 0
        self._saves = saves
        self._exclusive = relayout is not None and relayout.exclusive
        self._lock = threading.Lock()
        self._epoch = 0
        self._fresh = False
        self._first_generation = 0
        self._allowance = StallAllowance(config.max_stall_s)
        self._restored_slot = 0
        self._memory = HostMemory(link, state, device, config.replicas, relayout.live if relayout else None)
        self._ledger = Ledger()
        self._protection: Protection | None = None
        self._times: dict[str, Any] = {}
        link.on_superseded = self._abort
        link.protected = self._protected

    @property
    def epoch(self) -> int:
        """Number of the epoch this rank trains in."""
        return self._epoch

    def join(self) -> int:
        """Joins the newest epoch; returns the generation from which training goes on.

        Raises:
            StateError: parameters differ among replicas after the restore; nothing may train on that.
        """
        if self._set_aside:
            self._leave_world()
        while True:
            epoch = self._link.wait_epoch(self._epoch)
            try:
                return self._join(epoch)
            except Interrupted:
                continue
            except (RuntimeError, dist.DistError) as error:
                if not self._superseded(epoch.number, error):
                    raise

    def interrupted(self, error: BaseException) -> bool:
        """Whether an exception out of the training loop means that the world has changed.

        A broken connection may be noticed here before anybody else knows why: it is reported, and the agents
        find out who died.
        """
        if isinstance(error, SetAside):
            self._set_aside = True
            return True
        if isinstance(error, Interrupted) or self._link.latest() > self._epoch:
            return self._superseded(self._epoch, error)
        return is_communication_error(error) and self._superseded(self._epoch, error)

    def reload_volatile(self, generation: int) -> None:
        """Last thing before training goes on: rebuilding iterators draws random numbers, the slot has the last word."""
        assert self._memory.segment is not None
        index = self._ledger.slot_of(generation)
        if index is not None:
            self._state.load(views(self._memory.segment.slots[index], self._state.inventory), volatile_only=True)

    def protect(self, generation: int) -> None:
        """On entry to the step after ``generation``: protects the state as it stands."""
        assert self._protection is not None
        if not self._link.may_enter(generation):
            self._park(generation)
        self._link.send("progress", generation=generation, in_step=True, protected=self._protected())
        self._check()
        if generation == self._moved:
            # The switch to this world has protected it already.
            return
        self._protection.protect(generation)
        if generation == self._first_generation and self._fresh:
            # Nothing may be lost from the first step on.
            self._protection.wait_committed(generation)
            self._fresh = False

    def before_optimizer(self) -> None:
        """Before anything changes the state."""
        assert self._protection is not None
        self._protection.wait_copied()
        self._check()

    def after_step(self, generation: int) -> None:
        """After a step has completed: the end of a recovery's time is the first of these."""
        self._link.send("progress", generation=generation, in_step=False, protected=self._protected())
        self._moved = None
        if "first_step" not in self._times:
            self._mark("first_step")
            self._link.send("stepped", epoch=self._epoch, generation=generation, times=self._times)

    def _park(self, generation: int) -> None:
        """Stands still for a change of layout; returns when that was given up."""
        assert self._protection is not None and self._relayout is not None
        stopped = time.time()
        self._link.send("progress", generation=generation, in_step=False, protected=self._protected())
        if generation == self._moved:
            slot = self._ledger.slot_of(generation)
        else:
            slot = self._protection.seal(generation)
            self._moved = generation
        with self._aside():
            self._link.send(
                "parked",
                epoch=self._epoch,
                generation=generation,
                slot=slot,
                stopped=stopped,
                layout=str(self._relayout.live.layout),
                keeps=self._relayout.keep_worlds() if self._meeting.remains < KEPT_REMAINS else 0,
            )
            self._link.wait_resumed(generation)
        if self._exclusive:
            assert self._memory.segment is not None and slot is not None
            self._state.load(views(self._memory.segment.slots[slot], self._state.inventory))
            self._state.rebuild()

    @contextlib.contextmanager
    def _aside(self) -> Iterator[None]:
        """While another world is prepared: without device memory, if there is none to share. What was in it is sealed."""
        if not self._exclusive:
            yield
            return
        assert self._relayout is not None
        self._vacate(self._relayout.live)
        try:
            yield
        except SetAside:
            raise
        except BaseException:
            self._relayout.live.reoccupy()
            raise
        self._relayout.live.reoccupy()

    def _vacate(self, live: Reshapable) -> None:
        self._device.synchronize()
        live.vacate()
        self._device.release_cached()

    def finish(self) -> None:
        """After the last iteration: returns when every rank is through; from then on nothing is protected.

        Raises:
            Interrupted, RuntimeError: somebody died before; the loop is entered again.
        """
        self._meeting.barrier()
        self._link.send("finished", epoch=self._epoch)
        self._end_protection()

    def _leave_world(self) -> None:
        """Gives up everything that belongs to the world that went on without this process, but for what takes long to make."""
        assert self._relayout is not None
        self._end_protection()
        self._meeting.release()
        self._memory.release()
        self._vacate(self._relayout.live)
        self._world = 0

    # -- joining -----------------------------------------------------------------------------------

    def _join(self, epoch: Epoch) -> int:
        if self._world not in (0, epoch.world):
            raise StateError(f"this rank is of world {self._world}, and was told of an epoch of world {epoch.world}")
        self._world = epoch.world
        self._times, self._moved = {}, None
        self._mark("told")
        self._end_protection()
        self._mark("settled")
        if self._set_aside:
            assert self._relayout is not None
            self._relayout.live.reoccupy()
            self._relayout.live.begin_anew()
            self._set_aside = False
        self._link.send("ready", epoch=epoch.number, rank=self._state.rank)
        if epoch.lost:
            # Too few nodes are left for this layout: the next epoch is another world's, or this one's again.
            with self._aside():
                self._link.wait_epoch(epoch.number)
            raise Interrupted
        self._meeting.meet(epoch)
        self._mark("met")
        self._memory.provide(epoch, self._meeting.store)
        if epoch.before is not None:
            generation = self._arrive(epoch)
        elif epoch.fresh:
            generation = int(self._state.record()["iteration"])
        else:
            plan = self._link.wait_plan(epoch.number)
            self._restore(epoch, plan)
            generation = plan.generation
        self._mark("restored")
        if not epoch.fresh:
            self._state.rebuild()
            self._mark("rebuilt")
        if self._config.verify:
            differing = self._state.disagreements()
            if differing:
                text = (
                    f"rank {self._state.rank}: after the restore to generation {generation} these parameters "
                    f"differ from their replicas: {', '.join(differing[:5])}"
                )
                self._link.send("fatal", error=text, epoch=epoch.number)
                raise StateError(text)
        self._mark("verified")
        self._commit(epoch, generation)
        self._mark("committed")
        if epoch.before is not None:
            self._joined(epoch, generation)
            self._link.wait_go(epoch.number)
            self._mark("gone")
        return generation

    def _arrive(self, epoch: Epoch) -> int:
        """In the first epoch of a world that grew out of another: waits for that one's state, and takes it."""
        if self._relayout is None:
            raise StateError("the layout changes, but this rank runs without --hotswap-parallelism")
        arrival = Arrival(self._link, epoch, self._place.node, self._relayout.live, self._meeting.store)
        # A rehearsal, while the old world trains: connections are made and memory is touched that the switch would wait for.
        self._state.rebuild()
        self._state.disagreements()
        self._link.send("prepared", epoch=epoch.number)
        plan = self._link.wait_plan(epoch.number)
        self._mark("planned")
        arrival.move(plan, self._meeting.transfer)
        self._mark("moved")
        tally = arrival.tally
        self._times["bytes"] = {"kept": tally.kept, "received": tally.received, "peak": tally.peak}
        return plan.generation

    def _restore(self, epoch: Epoch, plan: RestorePlan) -> None:
        """Own copy where there is one, else the partner's over the network, into the slot of the same index."""
        assert self._memory.segment is not None
        mine = plan.sources[self._state.rank]
        works = []
        # After a change of partners the only copy may lie with one that is to keep it no longer.
        strangers = {r for r, s in enumerate(plan.sources) if s.holder == self._state.rank != r}
        self._memory.map(strangers, self._meeting.store)
        for rank, source in enumerate(plan.sources):
            if source.holder == self._state.rank and rank != self._state.rank:
                slot = self._memory.kept[rank].slots[source.slot]
                self._trust(slot, rank)
                works += send_slot(self._meeting.replica, slot, source.slot, rank)
        if mine.holder != self._state.rank:
            receive_slot(self._meeting.replica, self._memory.segment.slots, mine.holder, epoch.number)
        for work in works:
            work.wait()
        slot = self._memory.segment.slots[mine.slot]
        self._trust(slot, self._state.rank)
        if slot.verify().generation != plan.generation:
            raise StateError(f"slot {mine.slot} holds another generation than {plan.generation}")
        self._state.load(views(slot, self._state.inventory))
        self._state.load_record(slot.read_record())
        self._restored_slot = mine.slot

    def _trust(self, slot: Slot, rank: int) -> None:
        """Lets only an undamaged copy through.

        Raises:
            RuntimeError: the checksum does not match. The copy is discarded, and the next epoch, which this error
                leads to, is planned without it: from another copy, or an older generation.
        """
        try:
            slot.verify()
        except StateError as error:
            slot.discard()
            self._link.send("damaged", rank=rank, error=str(error))
            raise RuntimeError(f"connection given up: a copy of rank {rank} is damaged") from error

    def _commit(self, epoch: Epoch, generation: int) -> None:
        self._state.out[:] = self._meeting.barrier(generation, self._state.out)
        self._epoch = epoch.number
        self._first_generation = generation
        self._fresh = epoch.fresh
        assert self._memory.segment is not None
        self._settle_slots(epoch, generation)
        protection = Protection(
            epoch.number,
            self._state,
            self._memory.segment,
            self._ledger,
            self._memory.partners,
            self._memory.kept,
            frozenset(next(g for g in self._state.dp_groups() if self._state.rank in g)),
            self._meeting.replica,
            self._allowance,
            self._report,
            self._copy_aside,
            None if epoch.fresh or epoch.before is not None else generation,
        )
        with self._lock:
            self._protection = protection
        self._link.trains(epoch.number, generation, epoch.world)
        if epoch.before is None:
            self._joined(epoch, generation)
            return
        # Nothing of the old world may go before this is complete everywhere.
        protection.protect(generation)
        protection.wait_committed(generation)
        self._moved = generation

    def _joined(self, epoch: Epoch, generation: int) -> None:
        if self._relayout is not None:
            self._relayout.before_training(generation)
        self._link.send(
            "joined",
            epoch=epoch.number,
            generation=generation,
            times=self._times,
            replicas=self._config.replicas,
            saves=self._saves,
            exclusive=self._exclusive,
            hang_timeout_s=min(self._config.hang_timeout_s, self._timeout_s / 2),
        )

    def _protected(self) -> int | None:
        """The newest generation that is complete on all ranks with all its copies. On any thread."""
        protection = self._protection
        return None if protection is None else protection.protected

    def _report(self, kind: str, **fields: Any) -> None:
        # The outcome of a round is the same on all ranks: one of them says it.
        if kind not in ("protected", "unprotected") or self._state.rank == 0:
            self._link.send(kind, rank=self._state.rank, **fields)

    def _settle_slots(self, epoch: Epoch, generation: int) -> None:
        """Frees what the commit made obsolete. Not before: until then an older generation may still be needed."""
        assert self._memory.segment is not None
        if epoch.fresh or epoch.before is not None:
            self._ledger = Ledger()
            return
        self._ledger.resume(generation, self._restored_slot)
        self._memory.drop_superfluous()
        for index, other in enumerate(self._memory.segment.slots):
            if index != self._restored_slot:
                other.discard()
        for segment in self._memory.kept.values():
            for slot in segment.slots:
                header = slot.header()
                if header is not None and header.generation > generation:
                    slot.discard()

    def _copy_aside(self, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        with self._device.copy_stream():
            for destination, source in pairs:
                destination.copy_(source, non_blocking=True)
            done = self._device.record_copy_event()
        done.synchronize()

    # -- interruption ------------------------------------------------------------------------------

    def _abort(self) -> None:
        """On the link's thread: whatever this process is doing belongs to the past."""
        self._meeting.abort()
        with self._lock:
            if self._protection is not None:
                self._protection.interrupt()

    def _check(self) -> None:
        if self._link.latest() > self._epoch:
            raise Interrupted

    def _superseded(self, number: int, error: BaseException) -> bool:
        """Waits for the epoch that explains an error; False when none comes."""
        if self._link.latest() <= number:
            self._link.send("broken", rank=self._state.rank, epoch=number, error=str(error)[:500])
        try:
            self._link.wait_epoch(number, timeout_s=MEETING_TIMEOUT_S)
        except TimeoutError:
            return False
        return True

    def _end_protection(self) -> None:
        with self._lock:
            protection, self._protection = self._protection, None
        if protection is not None and not protection.settle(self._config.unblock_timeout_s):
            self._link.send("stuck", rank=self._state.rank)
            os._exit(exits.STUCK)

    def _mark(self, phase: str) -> None:
        self._times[phase] = time.time()


assert all(hasattr(torch, name) for name in ITEM_SIZES), "state.inventory names a dtype that torch lacks"
