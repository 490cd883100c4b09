"""The host memory in which a rank's state is protected: its own segment, and those it keeps for others. Agents own it all."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from megatron_resilience.accelerator.base import Accelerator
from megatron_resilience.control.link import AgentLink
from megatron_resilience.deadpool.placement import partners
from megatron_resilience.hotswap.arrival import Reshapable
from megatron_resilience.state.memory import SharedMemory
from megatron_resilience.state.segment import Segment, Shape
from megatron_resilience.topology.epoch import Epoch


class HostMemory:
    """Of one rank, in one world.

    Args:
        link: to the agent.
        state: the live state (``session.RestorableState``).
        device: whose copies come here.
        replicas: copies of each rank's state in other failure domains.
        live: the state in the terms of other layouts, where the layout may change.

    Attributes:
        segment: this rank's; None until it was provided.
        kept: of other ranks.
        partners: ranks that keep a copy of this one's.
    """

    def __init__(
        self, link: AgentLink, state: Any, device: Accelerator, replicas: int, live: Reshapable | None
    ) -> None:
        self._link, self._state, self._device = link, state, device
        self._replicas, self._live = replicas, live
        self._memory: dict[int, SharedMemory] = {}
        self._pinned: torch.Tensor | None = None
        self._keeps: tuple[int, ...] = ()
        self.segment: Segment | None = None
        self.kept: dict[int, Segment] = {}
        self.partners: tuple[int, ...] = ()

    def provide(self, epoch: Epoch, store: Any) -> None:
        """Everything that this rank needs in an epoch, new or as a predecessor of this process left it.

        Args:
            store: of the epoch.

        Raises:
            StateError: the node has not enough memory.
        """
        state = self._state
        nodes = [epoch.node_of(rank) for rank in range(epoch.world_size)]
        domains = [epoch.domain_of(rank) for rank in range(epoch.world_size)]
        chosen = partners(nodes, domains, state.dp_groups(), self._replicas)
        self.partners = chosen[state.rank]
        self._keeps = tuple(rank for rank, keepers in enumerate(chosen) if state.rank in keepers)
        shape = state.inventory.shape
        store.set(f"shape/{state.rank}", f"{shape.payload_bytes} {shape.digest.hex()}")
        if epoch.fresh and state.rank == 0:
            self._announce(epoch, chosen, store)
        if self._live is not None:
            store.set(f"table/{state.rank}", self._live.table().to_bytes())
        # A next world has the time for it; a recovery has not.
        self.map({state.rank, *self._keeps}, store, populate=epoch.before is not None)

    def map(self, ranks: Iterable[int], store: Any, populate: bool = False) -> None:
        """Gets the segments of ranks from the agent, but for those that are here."""
        mine, shapes = self._state.rank, {}
        for rank in set(ranks) - set(self.kept) - ({mine} if self.segment else set()):
            size, digest = store.get(f"shape/{rank}").decode().split()
            shapes[rank] = Shape(int(size), bytes.fromhex(digest))
        if not shapes:
            return
        fds = self._link.request_memory(mine, {r: s.segment_bytes for r, s in shapes.items()})
        for rank, fd in fds.items():
            memory = SharedMemory(fd, shapes[rank].segment_bytes, populate)
            self._memory[rank] = memory
            segment = Segment(memory.buffer, shapes[rank])
            if self._live is not None:
                self._shelve(rank, store)
            if rank == mine:
                self.segment = segment
                self._pinned = torch.frombuffer(memory.buffer, dtype=torch.uint8)
                self._device.pin(self._pinned)
            else:
                self.kept[rank] = segment

    def drop_superfluous(self) -> None:
        """Gives up the segments that this rank is to keep no longer."""
        dropped = sorted(set(self.kept) - set(self._keeps))
        for rank in dropped:
            del self.kept[rank]
            self._memory.pop(rank).close()
        if dropped:
            self._link.send("drop_memory", rank=self._state.rank, owners=dropped)

    def release(self) -> None:
        """Lets go of everything; the agent frees it."""
        if self._pinned is not None:
            self._device.unpin(self._pinned)
        self._pinned, self.segment, self.kept = None, None, {}
        for memory in self._memory.values():
            memory.close()
        self._memory = {}

    def _shelve(self, rank: int, store: Any) -> None:
        """Gives the agent the table of a segment, for the ranks of a next world on this node."""
        text = store.get(f"table/{rank}")
        table = SharedMemory.create(f"mr-table-{rank}", len(text))
        table.buffer[:] = text
        self._link.send("shelf", [table.fd], owner=rank, size=len(text))
        table.close()

    def _announce(self, epoch: Epoch, chosen: list[tuple[int, ...]], store: Any) -> None:
        """Prints what protection takes, before it is taken: bytes per rank, and of the fullest node."""
        sizes = [int(store.get(f"shape/{rank}").decode().split()[0]) for rank in range(epoch.world_size)]
        segments = [Shape(size, b"").segment_bytes for size in sizes]
        nodes = dict.fromkeys(epoch.slots, 0)
        for rank, size in enumerate(segments):
            nodes[epoch.node_of(rank)] += size
            for keeper in chosen[rank]:
                nodes[epoch.node_of(keeper)] += size
        copies = f"{self._replicas} cop{'y' if self._replicas == 1 else 'ies'} elsewhere"
        kinds = ", ".join(f"{k.value} {b / 2**20:.1f}" for k, b in self._state.inventory.bytes_by_kind().items())
        fullest = max(nodes, key=nodes.__getitem__)
        print(
            f"[megatron-resilience] protection: {max(sizes) / 2**20:.1f} MiB per generation and rank (rank 0: {kinds}), "
            f"two generations, {copies}; "
            f"{nodes[fullest] / 2**20:.0f} MiB of host memory on node {fullest}",
            flush=True,
        )
