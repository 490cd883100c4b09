"""State beside the parameters: optimizer counters, random streams and scalars, as logical tensors.

A random stream is named after the ranks that share it, as Megatron seeds it (``_set_random_seed`` in
training/initialize.py, ``model_parallel_cuda_manual_seed`` in core/tensor_parallel/random.py): by pipeline rank, and
by TP rank or by EP and ETP rank in the tracker. A stream that the source layout has no ranks for is in no plan; the
ranks that need it seed it as Megatron does at start-up.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from megatron_resilience.vps.catalogue import Catalogue
from megatron_resilience.vps.layout import Layout
from megatron_resilience.vps.tensors import Coordinate, Kind, LogicalTensor, Place

CPU_STREAM_BYTES = 5056
"""``torch.get_rng_state()``: a Mersenne twister."""
DEVICE_STREAM_BYTES = 16
"""``torch.cuda.get_rng_state()``: Philox seed and offset."""
HOST_STREAM_BYTES = 2512
"""Python's ``random`` and NumPy's global generator: 624 words, position, and the spare Gaussian."""


def complete_state(
    catalogue: Catalogue,
    layouts: Iterable[Layout],
    step_per_parameter: bool = False,
    device_stream_bytes: int = DEVICE_STREAM_BYTES,
) -> Catalogue:
    """``catalogue`` with all that a rank's training state has beside it.

    Args:
        layouts: the layouts between which the state will move; streams of all of them are listed.
        step_per_parameter: torch's Adam counts steps per parameter, TE's and Apex's FusedAdam per parameter group
            (then it is one of the scalars).
        device_stream_bytes: size of a device generator's state; `CPU_STREAM_BYTES` where the CPU plays the device.
    """
    more = [*random_streams(layouts, catalogue.experts > 0, device_stream_bytes), scalars()]
    return catalogue.with_tensors([*more, *steps(catalogue)] if step_per_parameter else more)


def steps(catalogue: Catalogue) -> Iterator[LogicalTensor]:
    """torch Adam's ``step`` (a float32 scalar) of every parameter."""
    for tensor in catalogue.tensors:
        if tensor.kind is Kind.PARAMETER:
            yield LogicalTensor(
                f"{tensor.name}/step",
                (),
                "float32",
                Kind.STEP,
                tensor.place,
                tensor.layer,
                tensor.expert,
                of=tensor.name,
            )


def random_streams(layouts: Iterable[Layout], experts: bool, device_stream_bytes: int) -> list[LogicalTensor]:
    """The streams of all ``layouts``, each once."""
    found: dict[str, LogicalTensor] = {}

    def add(name: str, size: int, coordinate: Coordinate) -> None:
        place = "".join(f".{k}{v}" for k, v in vars(coordinate).items() if v >= 0)
        full = f"rng.{name}{place}"
        found[full] = LogicalTensor(full, (size,), "uint8", Kind.RNG, Place.RANKS, coordinate=coordinate)

    for layout in layouts:
        for pp in range(layout.pp):
            add("cpu", CPU_STREAM_BYTES, Coordinate(pp=pp))
            add("python", HOST_STREAM_BYTES, Coordinate(pp=pp))
            add("numpy", HOST_STREAM_BYTES, Coordinate(pp=pp))
            add("device", device_stream_bytes, Coordinate(pp=pp))
            add("tracker.data-parallel-rng", device_stream_bytes, Coordinate(pp=pp))
            for tp in range(layout.tp):
                add("tracker.model-parallel-rng", device_stream_bytes, Coordinate(tp=tp, pp=pp))
            for ep in range(layout.ep if experts else 0):
                for tp in range(layout.expert_tp):
                    add("tracker.expert-parallel-rng", device_stream_bytes, Coordinate(tp=tp, ep=ep, pp=pp))
    return list(found.values())


def scalars(size: int = 4096) -> LogicalTensor:
    """Scheduler, grad scaler, consumed samples and scalars of parameter groups: a record of ``size`` bytes that every
    rank has alike."""
    return LogicalTensor("scalars", (size,), "uint8", Kind.SCALAR, Place.RANKS, coordinate=Coordinate())
