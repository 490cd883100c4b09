"""The processes and the memory of one node: what an agent commands, without knowing why."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_resilience.control.channel import Channel
from megatron_resilience.control.options import LaunchOptions
from megatron_resilience.control.stacks import StackFile
from megatron_resilience.control.watch import Pulse
from megatron_resilience.errors import StateError
from megatron_resilience.hotswap.endpoints import couriers
from megatron_resilience.state.memory import SharedMemory, available_bytes
from megatron_resilience.state.segment import sealed_generations
from megatron_resilience.topology.epoch import Epoch
from megatron_resilience.transport.environment import ENVIRONMENT

NEWCOMER, NODE, ADDRESS = (f"MEGATRON_RESILIENCE_{name}" for name in ("NEWCOMER", "NODE", "ADDRESS"))
"""Environment variables that tell a rank what it is."""
_MEMORY_RESERVE = 0.05
_LAST = 19
"""The lowest priority (nice)."""
_COURIER = str(Path(__file__).parents[1] / "hotswap" / "courier.py")


@dataclass
class RankProcess:
    """A rank's process on this node.

    Attributes:
        rank: its global rank.
        channel: our end.
        pid: once the zygote has told it.
        newcomer: it runs its start-up alone.
        world: that it belongs to (``Epoch.world``).
        killed: we ended it on purpose, its exit is no news.
        hung: why it was ended for making no progress.
        pulse: its signs of life.
        stacks: where it writes its stacks when asked.
        layout: that it trains in, as text; known once it has parked for a change of layout.
        keeps: how many layouts' processes it says may be kept, its own among them; 0: it must end with its world.
        parked_in: the epoch in which it parked last.
    """

    rank: int
    channel: Channel
    newcomer: bool
    world: int = 1
    pid: int | None = None
    killed: bool = False
    hung: str = ""
    ready_epoch: int = 0
    pulse: Pulse = field(default_factory=Pulse)
    stacks: StackFile = field(default_factory=StackFile)
    said: dict[str, dict[str, Any]] = field(default_factory=dict)
    layout: str = ""
    keeps: int = 0
    parked_in: int = 0

    def kill(self) -> None:
        """Ends it at once; what it held is closed by the kernel, which every peer notices."""
        self.killed = True
        if self.pid is not None:
            try:
                os.kill(self.pid, signal.SIGKILL)
            except ProcessLookupError:
                return

    def step_back(self) -> None:
        """Lets everybody else have the processor first: taking down a large process is work, done in its name."""
        if self.pid is not None:
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, self.pid, _LAST)
                # Where the kernel shares the processor out by session, a priority counts within the session only.
                Path(f"/proc/{self.pid}/autogroup").write_text(str(_LAST))

    def recall(self, epoch: Epoch) -> None:
        """Makes a process that was kept one of a new world."""
        self.world, self.ready_epoch, self.keeps = epoch.world, epoch.number, 0
        self.pulse = Pulse()
        self.said.clear()


class Node:
    """This node's ranks and shared memory.

    Args:
        node: its id.
        address: of the configured interface.
        options: the launcher's.
        zygote: channel to it.
        watch: called with a new rank, to read its channel.
        unwatch: called with a rank whose process has ended, before its channel is closed.
    """

    def __init__(
        self,
        node: str,
        address: str,
        options: LaunchOptions,
        zygote: Channel,
        watch: Callable[[RankProcess], None],
        unwatch: Callable[[RankProcess], None],
    ) -> None:
        self.node = node
        self._address = address
        self._options = options
        self._zygote = zygote
        self._watch, self._unwatch = watch, unwatch
        self._tickets: dict[int, RankProcess] = {}
        self._last_ticket = 0
        self.ranks: dict[int, RankProcess] = {}
        self.skeletons: dict[int, RankProcess] = {}
        self.world = 1
        self.next: dict[int, RankProcess] = {}
        self.next_epoch: Epoch | None = None
        self.aside: dict[str, dict[int, RankProcess]] = {}
        self._leaves = False
        self._memory: dict[tuple[int, int, int], SharedMemory] = {}
        self._shelves: dict[tuple[int, int], SharedMemory] = {}

    # -- processes ---------------------------------------------------------------------------------

    def enter(self, epoch: Epoch) -> None:
        """Makes this node's processes those of an epoch.

        Fresh: everything starts anew. Otherwise ranks that run go on, a spare's ranks that wait at the door are
        promoted, and what is missing starts alone. What holds no slot any more is ended.
        """
        mine = epoch.ranks_of(self.node)
        if self.next_epoch is not None and self.next_epoch.world == epoch.world:
            # The switch was made; word of it got lost with a leader.
            self.take_next(self.next_epoch)
        self.end_next()
        if epoch.fresh:
            self.end_all()
        for rank in [r for r, process in self.ranks.items() if process.world != epoch.world]:
            self.ranks.pop(rank).kill()
        self.world = epoch.world
        for rank in list(self.ranks):
            if rank not in mine:
                self.ranks.pop(rank).kill()
        for rank in mine:
            if rank in self.ranks or epoch.lost:
                continue
            if rank in self.skeletons:
                self.ranks[rank] = self.skeletons.pop(rank)
            else:
                self.ranks[rank] = self._start(rank, epoch, newcomer=not epoch.fresh)
        if mine:
            self.end_skeletons()
        else:
            self._free_memory()
        for rank in [r for r in mine if r in self.ranks]:
            self.tell(self.ranks[rank], {"kind": "epoch", "epoch": epoch.to_json()})

    def prepare(self, epoch: Epoch, slots: int) -> None:
        """On a spare: starts ranks for the first ``slots`` slots, which wait at the door of training."""
        for rank in range(min(slots * epoch.nproc_per_node, epoch.world_size)):
            if rank not in self.skeletons:
                self.skeletons[rank] = self._start(rank, epoch, newcomer=True)

    def plan(self, message: dict[str, Any]) -> None:
        """Passes a restore plan on to the ranks."""
        for process in [*self.ranks.values(), *self.next.values()]:
            self.tell(process, message)

    def tell_all(self, message: dict[str, Any]) -> None:
        """Passes a message on to the ranks that train."""
        for process in self.ranks.values():
            self.tell(process, message)

    def tell_rank_zero(self, message: dict[str, Any]) -> None:
        """Passes a question on to rank 0, which is here."""
        if 0 in self.ranks:
            self.tell(self.ranks[0], message)

    # -- the next world ----------------------------------------------------------------------------

    def prepare_next(self, epoch: Epoch) -> list[int]:
        """Starts this node's ranks of the next world beside those that train; returns those for which a process was kept."""
        self.end_next()
        self.next_epoch = epoch
        mine = epoch.ranks_of(self.node)
        if mine:
            self.end_skeletons()
        kept = self.aside.pop(epoch.layout, {})
        recalled = sorted(set(mine) & set(kept))
        for rank in mine:
            self.next[rank] = kept.pop(rank) if rank in kept else self._start(rank, epoch, newcomer=True)
        for rank in recalled:
            self.next[rank].recall(epoch)
        _end(kept)
        endpoint = couriers(epoch).get(self.node)
        if endpoint is not None:
            self.next[endpoint] = self._start(endpoint, epoch, newcomer=True, courier=True)
        for process in self.next.values():
            self.tell(process, {"kind": "epoch", "epoch": epoch.to_json()})
        return recalled

    def parked(self, process: RankProcess, epoch: int, layout: str, keeps: int) -> None:
        """A rank stands still for a change of layout, and says whether it may be kept afterwards."""
        process.parked_in, process.layout, process.keeps = epoch, layout, keeps

    def end_next(self) -> None:
        """Ends the next world's ranks, and gives their memory back."""
        if self.next_epoch is None:
            return
        _end(self.next)
        self._free_memory(self.next_epoch.world)
        self.next, self.next_epoch = {}, None

    def take_next(self, epoch: Epoch) -> None:
        """Makes the next world this node's; the old one's ranks end or are kept, and their memory is given back."""
        before = self.next_epoch.before if self.next_epoch is not None else None
        old, world = self.ranks, self.world
        couriers = [self.next.pop(r) for r in list(self.next) if r not in epoch.ranks_of(self.node)]
        self.ranks, self.next, self.next_epoch, self.world = self.next, {}, None, epoch.world
        for process in self.ranks.values():
            process.ready_epoch = epoch.number
            self.tell(process, {"kind": "go", "epoch": epoch.number})
        for process in couriers:
            process.kill()
        self._set_aside(old, before.number if before is not None else 0)
        self.end_skeletons()
        self._free_memory(world)

    def _set_aside(self, ranks: dict[int, RankProcess], epoch: int) -> None:
        """Keeps the ranks of a world that ends for the return of its layout, as many worlds as they say, or ends them.

        Args:
            epoch: its last one. Who has not parked in it is somewhere else.
        """
        staying = {
            rank: process
            for rank, process in ranks.items()
            if process.keeps and process.parked_in == epoch and not self._leaves
        }
        leaving = {rank: process for rank, process in ranks.items() if rank not in staying}
        for process in leaving.values():
            process.step_back()
        _end(leaving)
        for process in staying.values():
            self.tell(process, {"kind": "set_aside"})
        if staying:
            layout = next(iter(staying.values())).layout
            _end(self.aside.pop(layout, {}))
            self.aside[layout] = staying
            while len(self.aside) > max(process.keeps for process in staying.values()):
                _end(self.aside.pop(next(iter(self.aside))))

    def leave(self) -> None:
        """This node will not be used again: it keeps no world for a return."""
        self._leaves = True
        for processes in self.aside.values():
            _end(processes)
        self.aside.clear()

    def keep_shelf(self, process: RankProcess, owner: int, fd: int, size: int) -> None:
        """Keeps the table of a rank's segment, with which others can read it."""
        known = self._shelves.pop((process.world, owner), None)
        if known is not None:
            known.close()
        self._shelves[process.world, owner] = SharedMemory(fd, size)

    def lend(self, process: RankProcess, world: int, sources: list[list[int]]) -> None:
        """Hands a rank the memory of another world: of each source its holder's segment, and the owner's table.

        Args:
            sources: ``(owner, holder)``.
        """
        for owner, holder in sources:
            memory, shelf = self._memory.get((world, holder, owner)), self._shelves.get((world, owner))
            if memory is None or shelf is None:
                self.tell(
                    process, {"kind": "lent", "error": f"node {self.node} holds no copy of rank {owner} any more"}
                )
                return
            sizes = {"owner": owner, "bytes": memory.size, "table_bytes": shelf.size}
            try:
                process.channel.send({"kind": "lent", **sizes}, [memory.fd, shelf.fd])
            except OSError:
                return

    def seen(self) -> dict[str, Any]:
        """Where this node's ranks stand, for :func:`megatron_resilience.control.status.status`."""
        ranks = sorted(self.ranks.items())
        return {
            "ranks": [(r, p.pulse.generation, p.pulse.in_step, p.pulse.protected) for r, p in ranks],
            "waiting": len(self.skeletons),
        }

    def end_skeletons(self) -> None:
        """Ends the ranks that wait for a promotion."""
        _end(self.skeletons)
        self.skeletons.clear()

    def end_all(self) -> None:
        """Ends every rank and frees the memory."""
        for processes in (self.ranks, self.skeletons, *self.aside.values()):
            _end(processes)
        self.aside.clear()
        self.ranks.clear()
        self.skeletons.clear()
        self._free_memory()

    def zygote_said(self, message: dict[str, Any], fds: list[int]) -> tuple[RankProcess, int] | None:
        """Digests a message of the zygote; returns a process and its status when one ended by itself."""
        if message["kind"] == "started":
            process = self._tickets[message["ticket"]]
            process.pid = message["pid"]
            if process.killed:
                process.kill()
            return None
        ended = next((p for p in self._tickets.values() if p.pid == message["pid"]), None)
        if ended is None:
            return None
        self._tickets = {t: p for t, p in self._tickets.items() if p is not ended}
        self._unwatch(ended)
        known = self.ranks.get(ended.rank) is ended
        if known:
            del self.ranks[ended.rank]
        if self.skeletons.get(ended.rank) is ended:
            del self.skeletons[ended.rank]
        if self.next.get(ended.rank) is ended:
            known = True
            del self.next[ended.rank]
        if self.aside.get(ended.layout, {}).get(ended.rank) is ended:
            del self.aside[ended.layout][ended.rank]
            if not self.aside[ended.layout]:
                del self.aside[ended.layout]
        ended.channel.close()
        ended.stacks.close()
        return (ended, message["status"]) if known and not ended.killed else None

    def all_ready(self, epoch: Epoch) -> bool:
        """Whether every rank of this node waits at the door of the epoch."""
        mine = epoch.ranks_of(self.node)
        if epoch.lost:
            mine = tuple(r for r in mine if r in self.ranks)
        return bool(mine) and all(r in self.ranks and self.ranks[r].ready_epoch == epoch.number for r in mine)

    def _start(self, rank: int, epoch: Epoch, newcomer: bool, courier: bool = False) -> RankProcess:
        ours, theirs = Channel.pair()
        process = RankProcess(rank, ours, newcomer, epoch.world, ready_epoch=epoch.number if epoch.before else 0)
        self._last_ticket += 1
        self._tickets[self._last_ticket] = process
        message = {
            "ticket": self._last_ticket,
            "argv": [_COURIER] if courier else [self._options.script, *self._arguments(epoch)],
            "env": self._environment(rank, epoch, newcomer),
        }
        self._zygote.send(message, [theirs.sock.fileno(), process.stacks.fd])
        theirs.close()
        self._watch(process)
        return process

    def _arguments(self, epoch: Epoch) -> list[str]:
        if not epoch.layout:
            return list(self._options.script_args)
        # Imported late: numpy comes with it, and most jobs never change their layout.
        from megatron_resilience.hotswap.flags import under_layout
        from megatron_resilience.vps.layout import parse_layout

        return under_layout(self._options.script_args, parse_layout(epoch.layout))

    def _environment(self, rank: int, epoch: Epoch, newcomer: bool) -> dict[str, str]:
        per_node = epoch.nproc_per_node
        result = ENVIRONMENT | dict(os.environ)
        result |= {
            "RANK": str(rank),
            "WORLD_SIZE": str(epoch.world_size),
            "LOCAL_RANK": str(rank % per_node),
            "LOCAL_WORLD_SIZE": str(len(epoch.ranks_of(self.node)) or per_node),
            "GROUP_RANK": str(rank // per_node),
            "GROUP_WORLD_SIZE": str(len(epoch.slots)),
            "ROLE_RANK": str(rank),
            "ROLE_WORLD_SIZE": str(epoch.world_size),
            "ROLE_NAME": "default",
            "MASTER_ADDR": epoch.store[0],
            "MASTER_PORT": str(epoch.store[1]),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": str(epoch.number),
            "TORCHELASTIC_MAX_RESTARTS": str(self._options.max_restarts),
            "TORCHELASTIC_RUN_ID": epoch.token,
            NODE: self.node,
            ADDRESS: self._address,
        }
        if newcomer:
            result[NEWCOMER] = "1"
        return result

    @staticmethod
    def tell(process: RankProcess, message: dict[str, Any]) -> None:
        """Sends a message to a rank."""
        try:
            process.channel.send(message)
        except OSError:
            # It is dying; the zygote is about to say so.
            return

    # -- memory ------------------------------------------------------------------------------------

    def provide_memory(self, process: RankProcess, sizes: list[list[int]]) -> None:
        """Answers a rank's request: what a predecessor left is handed over as it is."""
        try:
            missing = sum(s for owner, s in sizes if not self._fits(process, owner, s))
            free = available_bytes()
            if missing > free * (1 - _MEMORY_RESERVE):
                raise StateError(
                    f"protecting rank {process.rank} takes {missing / 2**20:.0f} MiB of memory on node {self.node}, "
                    f"which has {free / 2**20:.0f} MiB left: use fewer ranks per node, or --deadpool-replicas 0"
                )
            for owner, size in sizes:
                if not self._fits(process, owner, size):
                    label = f"mr-{process.rank}-{owner}"
                    self._memory[process.world, process.rank, owner] = SharedMemory.create(label, size)
        except StateError as error:
            self.tell(process, {"kind": "memory", "error": str(error)})
            return
        owners = [owner for owner, _ in sizes]
        try:
            process.channel.send(
                {"kind": "memory", "ranks": owners},
                [self._memory[process.world, process.rank, o].fd for o in owners],
            )
        except OSError:
            return

    def drop_memory(self, process: RankProcess, owners: list[int]) -> None:
        """Frees copies that a rank has been told to keep no longer."""
        for owner in owners:
            memory = self._memory.pop((process.world, process.rank, owner), None)
            if memory is not None:
                memory.close()

    def _free_memory(self, world: int | None = None) -> None:
        """Of a world, or all."""
        for segment in [key for key in self._memory if world in (None, key[0])]:
            self._memory.pop(segment).close()
        for shelf in [key for key in self._shelves if world in (None, key[0])]:
            self._shelves.pop(shelf).close()

    def holdings(self) -> list[tuple[int, int, int, int]]:
        """``(rank, generation, slot, holder)`` of every sealed slot in this node's memory."""
        return [
            (owner, header.generation, slot, holder)
            for (world, holder, owner), memory in sorted(self._memory.items())
            for slot, header in enumerate(sealed_generations(memory.buffer))
            if header is not None and world == self.world
        ]

    def _fits(self, process: RankProcess, owner: int, size: int) -> bool:
        key = (process.world, process.rank, owner)
        return key in self._memory and self._memory[key].size == size


def _end(ranks: Mapping[int, RankProcess]) -> None:
    for process in ranks.values():
        process.kill()
