"""The real thing: nothing is patched; copies run on a stream of their own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from megatron_resilience.accelerator.base import Accelerator, CopyEvent


class CudaAccelerator(Accelerator):
    """An NVIDIA GPU, the one that ``torch.cuda.current_device()`` names."""

    name = "cuda"
    distributed_backend = "nccl"

    def __init__(self) -> None:
        # Made on first use: a stream creates a CUDA context, and ranks may still be forked before that.
        self._copy_stream: torch.cuda.Stream | None = None

    def install(self) -> None:
        """Nothing to do: Megatron is written for this device."""

    def torch_device(self) -> torch.device:
        return torch.device("cuda", torch.cuda.current_device())

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def release_cached(self) -> None:
        torch.cuda.empty_cache()

    def pinned_empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(tuple(shape), dtype=dtype, pin_memory=True)

    def pin(self, tensor: torch.Tensor) -> None:
        size = tensor.numel() * tensor.element_size()
        code = int(torch.cuda.cudart().cudaHostRegister(tensor.data_ptr(), size, 0))
        if code != 0:
            raise RuntimeError(
                f"cudaHostRegister of {size} bytes failed with CUDA error {code}; raise the locked-memory "
                "limit (ulimit -l) or use a smaller segment"
            )

    def unpin(self, tensor: torch.Tensor) -> None:
        code = int(torch.cuda.cudart().cudaHostUnregister(tensor.data_ptr()))
        if code != 0:
            raise RuntimeError(f"cudaHostUnregister failed with CUDA error {code}; was the memory pinned?")

    @contextmanager
    def copy_stream(self) -> Iterator[None]:
        if self._copy_stream is None:
            self._copy_stream = torch.cuda.Stream()
        self._copy_stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._copy_stream):
            yield

    def record_copy_event(self) -> CopyEvent:
        event = torch.cuda.Event()
        event.record()
        return event

    def rng_streams(self) -> dict[str, torch.Tensor]:
        return {"device": torch.cuda.get_rng_state(), "host": torch.get_rng_state()}

    def set_rng_streams(self, states: Mapping[str, torch.Tensor]) -> None:
        self.check_rng_names(states)
        torch.cuda.set_rng_state(states["device"])
        torch.set_rng_state(states["host"])
