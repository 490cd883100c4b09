"""The fabric of one epoch: every backend that the epoch's process groups run on, made and ended together."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class GroupKey:
    """Names one process group alike on all its ranks, whatever each process did before.

    Attributes:
        description: Megatron's ``group_desc``, such as ``TENSOR_MODEL_PARALLEL_GROUP``.
        ranks: global ranks, in group order.
        occurrence: counts groups of the same description and ranks, in order of creation.
    """

    description: str
    ranks: tuple[int, ...]
    occurrence: int = 0

    def prefix(self) -> str:
        """The group's name space in the epoch's store."""
        return f"{self.description}/{'.'.join(map(str, self.ranks))}/{self.occurrence}"


class Fabric(ABC):
    """Backends for device tensors of one kind, in one epoch.

    Building blocks until all ranks of the group take part; every rank builds its groups in the same order.
    """

    @abstractmethod
    def build(self, key: GroupKey) -> Any:
        """A ``torch.distributed`` backend over ``key.ranks``, of which this rank is one.

        Raises:
            RuntimeError: a peer did not come, the connection broke, or the fabric was aborted.
        """

    @abstractmethod
    def built(self) -> None:
        """Notes that the last group is there: from now on :meth:`abort` closes exactly what was opened."""

    @abstractmethod
    def abort(self) -> None:
        """Makes every operation in flight, on any thread, return with an error soon. Any thread; idempotent."""

    @abstractmethod
    def bury(self) -> None:
        """Lets go of everything, in the background: what is still in flight may take its time."""
