"""Anonymous shared memory: lives as long as some process of the node holds it, and has no name.

An agent creates it and passes the descriptor to its ranks. When a rank dies the agent still has it; when the
whole node is killed the kernel frees it, and nothing of the victim can be read afterwards.
"""

from __future__ import annotations

import mmap
import os

from megatron_resilience.errors import StateError


class SharedMemory:
    """A mapped memfd.

    Args:
        populate: have the kernel fill this process's page tables now, instead of page by page when first touched; for
            memory that will be wanted in a hurry later.

    Attributes:
        fd: its descriptor, to be passed to another process of the node.
        size: bytes.
    """

    def __init__(self, fd: int, size: int, populate: bool = False) -> None:
        self.fd = fd
        self.size = size
        self._map = mmap.mmap(fd, size, flags=mmap.MAP_SHARED | (mmap.MAP_POPULATE if populate else 0))
        self.buffer = memoryview(self._map)

    @classmethod
    def create(cls, label: str, size: int) -> SharedMemory:
        """A new, zeroed piece.

        Args:
            label: seen in ``/proc/PID/maps`` only.
            size: bytes.

        Raises:
            StateError: the kernel refuses (too little memory, a limit).
        """
        remedy = "give the node more memory, or train with fewer ranks on it"
        free = available_bytes()
        if size > free:
            # Asked for, it would bring the kernel's out-of-memory killer upon this node.
            raise StateError(
                f"no {size / 2**20:.0f} MiB of shared memory for {label}, {free / 2**20:.0f} MiB are left: {remedy}"
            )
        try:
            fd = os.memfd_create(label, os.MFD_CLOEXEC)
            os.ftruncate(fd, size)
            # Reserve now: a page that cannot be had later would kill the rank with SIGBUS in mid-training.
            os.posix_fallocate(fd, 0, size)
            return cls(fd, size)
        except OSError as error:
            raise StateError(
                f"no {size / 2**20:.0f} MiB of shared memory for {label} ({error.strerror}): {remedy}"
            ) from error

    def close(self) -> None:
        """Unmaps and closes; views that somebody still holds keep the mapping alive until they go."""
        try:
            self.buffer.release()
            self._map.close()
        except BufferError:
            pass
        os.close(self.fd)


def available_bytes() -> int:
    """Bytes of memory the kernel would still give out here, within this process's cgroup."""
    import psutil

    free = psutil.virtual_memory().available
    try:
        with open("/sys/fs/cgroup/memory.max") as file:
            limit = file.read().strip()
        with open("/sys/fs/cgroup/memory.current") as file:
            used = int(file.read())
    except OSError:
        return free
    return free if limit == "max" else min(free, int(limit) - used)
