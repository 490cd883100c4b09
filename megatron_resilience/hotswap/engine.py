"""Carries out one endpoint's part of a routing plan (DynaTrain's State Transition Engine).

Fragments are packed into contiguous host buffers of one chunk, several exchanges are in flight, and each chunk carries the
hash of its bytes. After the last one everything is read back from where it was put and hashed again: a fragment in the
wrong place, or one that changed on the way, is found before anybody trains on it.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash

from megatron_resilience.errors import StateError
from megatron_resilience.hotswap.fragments import Fields, Storage, fragments, pack, same_bits, unpack
from megatron_resilience.routing.plan import Moves, RankPlan, plan_endpoint
from megatron_resilience.routing.problem import Problem
from megatron_resilience.routing.program import Exchange, program
from megatron_resilience.routing.schedule import xor_rounds
from megatron_resilience.routing.staging import Chunk
from megatron_resilience.vps.space import StateSpace

IN_FLIGHT = 4
"""Exchanges that are under way at once; each takes two parts of the staging buffer."""
_LEAST_CHUNK, _LARGEST_CHUNK = 256 << 10, 8 << 20
_CHUNKS = 200
"""Parts of the staging buffer that a rank's state fills, between these bounds: all parts together are a few hundredths of it."""
_HASH = 16
_ALIGNMENT = 64
_FIRST_TAG = 100


@dataclass
class Tally:
    """What an endpoint has done, in bytes; ``peak`` is the size of its staging buffer."""

    kept: int = 0
    sent: int = 0
    received: int = 0
    peak: int = 0


class _Arrived(NamedTuple):
    chunk: Chunk
    digest: bytes


class Transfer:
    """One endpoint's part in a switch.

    Args:
        problem: the same on all endpoints.
        endpoint: this one.
        peers: endpoints in the order of their places in the backend.
        target: live storage of the rank that this endpoint becomes; None for a courier.
        chunk: bytes of a part of the staging buffer, the same everywhere; default: :func:`chunk_of` the problem.
    """

    def __init__(
        self, problem: Problem, endpoint: int, peers: list[int], target: Storage | None, chunk: int | None = None
    ) -> None:
        self.problem = problem
        self.plan: RankPlan = plan_endpoint(problem, endpoint)
        self._place = {peer: place for place, peer in enumerate(peers)}
        self._exchanges = list(program(self.plan, xor_rounds(len(peers)), chunk or chunk_of(problem)))
        self._arrived: list[_Arrived] = []
        self._target = target
        self._kept = self._views(problem.target, self.plan.keeps, np.full(len(self.plan.keeps), self._rank), False)
        self._receives = self._views(problem.target, self.plan.receives, self.plan.receives.rank, False)
        self._staging = _parts(self._exchanges)
        self.tally = Tally(peak=sum(part.numel() for part in self._staging))

    def read_from(self) -> list[int]:
        """Ranks of the source layout whose storage this endpoint reads."""
        first = self.plan.sends.rank[self.plan.sends.phase == 0]
        return np.unique(np.concatenate([self.plan.keeps.rank, first])).tolist()

    def run(self, sources: Callable[[int], Storage], backend: Any) -> None:
        """Moves everything.

        Args:
            sources: storage of a rank of the source layout that this endpoint can read.
            backend: ``torch.distributed`` backend over the peers, for host tensors.

        Raises:
            StateError: a chunk arrived damaged.
            RuntimeError: a connection broke.
        """
        self._sources = sources
        plan, problem = self.plan, self.problem
        self._keeps = self._views(problem.source, _fed(problem, plan.keeps), plan.keeps.rank, source=True)
        early = np.flatnonzero(plan.sends.phase == 0)
        sends = _fed(problem, plan.sends)
        self._sends: list[Fields] = [{} for _ in range(len(plan.sends))]
        for rows, moves, space, is_source in (
            (early, sends, problem.source, True),
            (np.flatnonzero(plan.sends.phase > 0), plan.sends, problem.target, False),
        ):
            for row, views in zip(
                rows.tolist(), self._views(space, _rows(moves, rows), plan.sends.rank[rows], is_source), strict=True
            ):
                self._sends[row] = views
        for source, copy in zip(self._keeps, self._kept, strict=True):
            for name, view in copy.items():
                view.copy_(source[name])
        self.tally.kept = plan.keeps.total_bytes
        self._exchange(backend)

    def verify(self) -> None:
        """Reads everything back from where it lies now.

        Raises:
            StateError: a fragment is not what its source holds; names the tensor.
        """
        for row, (source, copy) in enumerate(zip(self._keeps, self._kept, strict=True)):
            if not same_bits(source, copy):
                raise StateError(f"{self._name(self.plan.keeps, row)} differs from its source after the switch")
        for chunk, digest in self._arrived:
            buffer = self._staging[0][: chunk.size]
            self._pack(chunk, self._receives, buffer)
            if _hash(buffer) != digest:
                name = self._name(self.plan.receives, int(chunk.fragment[0]))
                raise StateError(f"{name}, or one of the next {len(chunk.fragment)} fragments, differs from its source")

    def forget(self) -> None:
        """Lets go of all views and of the staging buffer."""
        self._keeps = self._kept = self._receives = self._sends = []
        self._arrived, self._staging = [], []

    # -- inside ------------------------------------------------------------------------------------

    @property
    def _rank(self) -> int:
        found = np.flatnonzero(self.problem.target_at == self.plan.endpoint)
        return int(found[0]) if len(found) else -1

    def _views(self, space: StateSpace, moves: Moves, ranks: np.ndarray, source: bool) -> list[Fields]:
        out: list[Fields] = [{} for _ in range(len(moves))]
        for rank in np.unique(ranks).tolist():
            rows = np.flatnonzero(ranks == rank)
            storage = self._sources(rank) if source else self._target
            assert storage is not None
            boxes = moves.boxes.take(rows)
            for row, views in zip(rows.tolist(), fragments(space, rank, boxes, storage), strict=True):
                out[row] = views
        return out

    def _exchange(self, backend: Any) -> None:
        flying: deque[tuple[Exchange, list[Any], torch.Tensor | None, torch.Tensor | None]] = deque()
        free = list(self._staging)
        tags: Counter[int] = Counter()
        phase = 0

        def land() -> None:
            exchange, works, out, back = flying.popleft()
            for work in works:
                work.wait()
            for buffer in (out, back):
                if buffer is not None:
                    free.append(buffer)
            if exchange.incoming is not None and back is not None:
                self._land(exchange.incoming, back[: exchange.incoming.size + _HASH])

        for exchange in self._exchanges:
            while flying and (len(flying) >= IN_FLIGHT or exchange.phase != phase):
                land()
            phase = exchange.phase
            peer, tag = self._place[exchange.peer], _FIRST_TAG + tags[exchange.peer]
            tags[exchange.peer] += 1
            works, out, back = [], None, None
            if exchange.incoming is not None:
                back = free.pop()
                works.append(backend.recv([back[: exchange.incoming.size + _HASH]], peer, tag))
            if exchange.outgoing is not None:
                out = free.pop()
                body, hashed = out[: exchange.outgoing.size], out[: exchange.outgoing.size + _HASH]
                self._pack(exchange.outgoing, self._sends, body)
                hashed[exchange.outgoing.size :] = torch.frombuffer(bytearray(_hash(body)), dtype=torch.uint8)
                works.append(backend.send([hashed], peer, tag))
                self.tally.sent += exchange.outgoing.size
            flying.append((exchange, works, out, back))
        while flying:
            land()

    def _land(self, chunk: Chunk, buffer: torch.Tensor) -> None:
        body, digest = buffer[: chunk.size], bytes(buffer[chunk.size :].numpy())
        if _hash(body) != digest:
            name = self._name(self.plan.receives, int(chunk.fragment[0]))
            raise StateError(f"a chunk with {name} from endpoint {chunk.peer} arrived damaged")
        self._arrived.append(_Arrived(chunk, digest))
        self.tally.received += chunk.size
        at = 0
        for row, begin, end in zip(chunk.fragment.tolist(), chunk.begin.tolist(), chunk.end.tolist(), strict=True):
            unpack(self._receives[row], body[at : at + end - begin], begin)
            at += end - begin

    def _pack(self, chunk: Chunk, views: list[Fields], out: torch.Tensor) -> None:
        at = 0
        for row, begin, end in zip(chunk.fragment.tolist(), chunk.begin.tolist(), chunk.end.tolist(), strict=True):
            pack(views[row], out[at : at + end - begin], begin)
            at += end - begin

    def _name(self, moves: Moves, row: int) -> str:
        boxes = moves.boxes
        bounds = ", ".join(f"{getattr(boxes, d + '0')[row]}:{getattr(boxes, d + '1')[row]}" for d in "oci")
        return f"{self.problem.source.catalogue.tensors[int(boxes.tensor[row])].name}[{bounds}]"


def chunk_of(problem: Problem) -> int:
    """Bytes of a part of the staging buffer."""
    share = problem.source.catalogue.state_bytes // min(problem.source.layout.world, problem.target.layout.world)
    return min(max(share // _CHUNKS // _ALIGNMENT * _ALIGNMENT, _LEAST_CHUNK), _LARGEST_CHUNK)


def _parts(exchanges: list[Exchange]) -> list[torch.Tensor]:
    """The staging buffer, in parts: for an outgoing and an incoming chunk of each exchange in flight. Touched, so that the kernel
    need not find the memory while everybody waits."""
    sizes = [c.size for e in exchanges for c in (e.outgoing, e.incoming) if c is not None]
    if not sizes:
        return []
    part = -(-(max(sizes) + _HASH) // _ALIGNMENT) * _ALIGNMENT
    return list(torch.zeros((min(2 * IN_FLIGHT, len(sizes)), part), dtype=torch.uint8))


def _fed(problem: Problem, moves: Moves) -> Moves:
    """The same moves with the copy of the source that feeds them."""
    return replace(moves, boxes=replace(moves.boxes, copy=problem.source_copy[moves.boxes.copy, moves.boxes.tensor]))


def _rows(moves: Moves, rows: np.ndarray) -> Moves:
    return Moves(moves.boxes.take(rows), *(c[rows] for c in (moves.peer, moves.phase, moves.rank, moves.bytes)))


def _hash(data: torch.Tensor) -> bytes:
    return xxhash.xxh3_128_digest(data.numpy())
