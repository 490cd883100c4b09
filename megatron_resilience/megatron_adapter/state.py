"""A rank's live training state, read from and written to Megatron's model, optimizer, scheduler and globals.

Presents it as ``state.inventory`` describes it. Layout facts: Megatron's ``DistributedOptimizer`` (distrib_optimizer.py),
``Float16OptimizerWithFloat16Params`` and ``FP32Optimizer`` (optimizer.py); all keep their masters in the inner optimizer's
``param_groups`` and their moments in its ``state``.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from megatron.core import mpu, tensor_parallel
from megatron.core.num_microbatches_calculator import get_num_microbatches, update_num_microbatches
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.tensor_parallel.random import _get_cuda_rng_state, _set_cuda_rng_state
from megatron.training import training

from megatron_resilience.errors import StateError, UnsupportedError
from megatron_resilience.megatron_adapter import buckets
from megatron_resilience.megatron_adapter.buckets import chained
from megatron_resilience.megatron_adapter.compare import differing_parameters
from megatron_resilience.state.inventory import Inventory, Kind, TensorSpec

_VOLATILE = (Kind.BUFFER, Kind.RNG)
_ARGS = (
    "consumed_train_samples",
    "consumed_valid_samples",
    "skipped_train_samples",
    "do_train",
    "do_valid",
    "do_test",
)
_GROUP_SCALARS = (int, float, bool, type(None))
_MOMENTS = ("exp_avg", "exp_avg_sq", "momentum_buffer")


@dataclass(frozen=True)
class _Entry:
    spec: TensorSpec
    read: Callable[[], torch.Tensor]
    write: Callable[[torch.Tensor], None]


class MegatronState:
    """See the module.

    Args:
        model: DDP-wrapped model chunks.
        optimizer: Megatron's, chained or not.
        scheduler: ``OptimizerParamScheduler``.
        args: Megatron's.

    Attributes:
        position: completed iterations and the samples consumed by them, as they were on entry to the newest step; None in a
            newcomer that has not yet been told.

    Raises:
        UnsupportedError: an optimizer whose state nobody has described here.
    """

    def __init__(self, model: list[Any], optimizer: Any, scheduler: Any, args: Any) -> None:
        self.rank: int = args.rank
        self.world_size: int = args.world_size
        self._model = model
        self._optimizer = optimizer
        self._parts = [o for o in chained(optimizer) if not getattr(o, "is_stub_optimizer", False)]
        self._scheduler = scheduler
        self._args = args
        for part in self._parts:
            prime(part.optimizer)
        # By name: the order of an optimizer's state is that of its making, which a loaded checkpoint changes.
        entries = [*self._optimizer_entries(), *self._module_entries(), *self._rng_entries()]
        self._entries = sorted(entries, key=lambda entry: entry.spec.name)
        self.replicated = self._replicated()
        self.inventory = Inventory(tuple(e.spec for e in self._entries))
        self.iteration: int = args.iteration
        self.position: tuple[int, int] | None = (args.iteration, args.consumed_train_samples)
        self.floating_point_operations: float = args.num_floating_point_operations_so_far
        self.loop: dict[str, Any] = {}
        self.out: list[int] = []

    # -- tensors -----------------------------------------------------------------------------------

    def stable(self) -> list[tuple[int, torch.Tensor]]:
        """``(index, live tensor)`` of what only ``optimizer.step`` changes."""
        return [(i, e.read()) for i, e in enumerate(self._entries) if e.spec.kind not in _VOLATILE]

    def volatile(self) -> list[tuple[int, torch.Tensor]]:
        """``(index, tensor)`` of module buffers and random number generators, as they are now."""
        return [(i, e.read()) for i, e in enumerate(self._entries) if e.spec.kind in _VOLATILE]

    @torch.no_grad()
    def load(self, tensors: list[torch.Tensor], volatile_only: bool = False) -> None:
        """Makes the live tensors equal to ``tensors``, in inventory order. No collectives."""
        for entry, tensor in zip(self._entries, tensors, strict=True):
            if not volatile_only or entry.spec.kind in _VOLATILE:
                entry.write(tensor)

    # -- scalars -----------------------------------------------------------------------------------

    def record(self) -> dict[str, Any]:
        """The scalars, as a JSON object that restores them exactly."""
        rerun = get_rerun_state_machine()
        return {
            "iteration": self.iteration,
            "floating_point_operations": self.floating_point_operations,
            "microbatches": get_num_microbatches(),
            "args": {name: getattr(self._args, name, None) for name in _ARGS},
            "scheduler": self._scheduler.state_dict(),
            "groups": [
                [
                    {k: _pack(v) for k, v in group.items() if k != "params" and _is_scalar(v)}
                    for group in part.optimizer.param_groups
                ]
                for part in self._parts
            ],
            "scalers": [
                {k: _pack(v) for k, v in part.grad_scaler.state_dict().items()} if part.grad_scaler else None
                for part in self._parts
            ],
            "python_rng": _as_lists(random.getstate()),
            "numpy_rng": _as_lists(np.random.get_state()),
            "loop": {key: _pack_all(value) for key, value in self.loop.items()},
            "rerun": {"large_value_counts": rerun.large_value_counts, "max_values": rerun.max_values},
            "checkpoints_reported": training.num_checkpoints_memory_reported,
            "out": list(self.out),
        }

    def load_record(self, record: dict[str, Any]) -> None:
        """Makes the live scalars what :meth:`record` returned.

        Raises:
            StateError: the record belongs to another configuration.
        """
        args = self._args
        self.iteration = args.iteration = args.curr_iteration = record["iteration"]
        self.floating_point_operations = record["floating_point_operations"]
        args.num_floating_point_operations_so_far = record["floating_point_operations"]
        for name, value in record["args"].items():
            setattr(args, name, value)
        self.position = (self.iteration, args.consumed_train_samples)
        update_num_microbatches(args.consumed_train_samples, consistency_check=False)
        if get_num_microbatches() != record["microbatches"]:
            raise StateError(
                f"generation {self.iteration} was trained with {record['microbatches']} microbatches, this rank "
                f"would use {get_num_microbatches()}: --micro-batch-size and --global-batch-size must not change"
            )
        for name, value in record["scheduler"].items():
            # Not by load_state_dict(): it checks, prints and steps. A loaded checkpoint may have set any of them.
            setattr(self._scheduler, name, value)
        if [len(g) for g in record["groups"]] != [len(p.optimizer.param_groups) for p in self._parts]:
            raise StateError("the record has other parameter groups than this rank's optimizer")
        for part, saved_groups in zip(self._parts, record["groups"], strict=True):
            for group, saved in zip(part.optimizer.param_groups, saved_groups, strict=True):
                for key in [k for k, v in group.items() if k != "params" and _is_scalar(v) and k not in saved]:
                    del group[key]
                for key, value in saved.items():
                    _unpack_into(group, key, value)
        for part, saved in zip(self._parts, record["scalers"], strict=True):
            if saved is not None:
                device = part.grad_scaler.scale.device
                part.grad_scaler.load_state_dict(
                    {k: v.to(device) if torch.is_tensor(v := _unpack(p)) else v for k, p in saved.items()}
                )
        version, internal, gauss = record["python_rng"]
        random.setstate((version, tuple(internal), gauss))
        name, keys, *rest = record["numpy_rng"]
        np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))
        self.loop = {key: _unpack_all(value) for key, value in record["loop"].items()}
        rerun = get_rerun_state_machine()
        rerun.large_value_counts = dict(record["rerun"]["large_value_counts"])
        rerun.max_values = dict(record["rerun"]["max_values"])
        training.num_checkpoints_memory_reported = record["checkpoints_reported"]

    @torch.no_grad()
    def load_streams(self, streams: dict[str, bytes]) -> None:
        """Sets random number generators, by the names of their tensors in the inventory."""
        for entry in self._entries:
            if entry.spec.name in streams:
                entry.write(torch.frombuffer(bytearray(streams[entry.spec.name]), dtype=torch.uint8))

    # -- the world ---------------------------------------------------------------------------------

    def dp_groups(self) -> list[list[int]]:
        """All data-parallel groups, as global ranks in ring order (``mpu.RankGenerator``)."""
        args = self._args
        model_parallel = (
            args.tensor_model_parallel_size * args.pipeline_model_parallel_size * args.context_parallel_size
        )
        generator = mpu.RankGenerator(
            tp=args.tensor_model_parallel_size,
            ep=1,
            dp=args.world_size // model_parallel,
            pp=args.pipeline_model_parallel_size,
            cp=args.context_parallel_size,
            order="tp-cp-ep-pp-dp" if args.use_tp_pp_dp_mapping else "tp-cp-ep-dp-pp",
        )
        return generator.get_ranks("dp")

    @torch.no_grad()
    def rebuild(self) -> None:
        """Model parameters from masters, then the distributed optimizer's all-gather, in full. Collectives."""
        buckets.reset(self._model, self._optimizer)
        for part in self._parts:
            if hasattr(part, "_copy_main_params_to_model_params"):
                part._copy_main_params_to_model_params()
        for chunk in self._model:
            if chunk.ddp_config.use_distributed_optimizer:
                chunk.start_param_sync(force_sync=True)

    def disagreements(self) -> list[str]:
        """Names of parameters that differ among ranks which must hold the same. Collectives."""
        return differing_parameters(self._model)

    def _replicated(self) -> frozenset[int]:
        """Without the distributed optimizer all of it is alike over the data-parallel group (experts: over another group)."""
        if self._args.use_distributed_optimizer or self._args.num_experts:
            return frozenset()
        kinds = (Kind.MASTER, Kind.MOMENT, Kind.STEP, Kind.FROZEN)
        return frozenset(i for i, entry in enumerate(self._entries) if entry.spec.kind in kinds)

    # -- the inventory -----------------------------------------------------------------------------

    def _optimizer_entries(self) -> Iterator[_Entry]:
        names = {id(p): name for name, p in named_parameters(self._model)}
        for index, part in enumerate(self._parts):
            labels = {id(main): names[id(p)] for p, main in masters(part) if id(p) in names}
            inner = part.optimizer
            for g, group in enumerate(inner.param_groups):
                for k, param in enumerate(group["params"]):
                    label = f"{index}.{labels.get(id(param), f'group{g}.{k}')}"
                    yield _tensor_entry(f"{label}/master", Kind.MASTER, functools.partial(_data, param))
                    for key, value in inner.state[param].items():
                        kind = Kind.STEP if key == "step" else Kind.MOMENT
                        if not torch.is_tensor(value) or (kind is Kind.MOMENT and key not in _MOMENTS):
                            raise UnsupportedError(
                                f"the optimizer {type(inner).__name__} keeps {key!r}, which --deadpool does not know: "
                                "use --optimizer adam or sgd"
                            )
                        yield _tensor_entry(f"{label}/{key}", kind, functools.partial(_moment, inner.state, param, key))

    def _module_entries(self) -> Iterator[_Entry]:
        updated = {id(p) for part in self._parts for p, _ in masters(part)}
        for name, param in named_parameters(self._model):
            # A parameter whose shard lies wholly on other ranks is theirs to bring.
            if not param.requires_grad and id(param) not in updated:
                yield _tensor_entry(f"{name}/frozen", Kind.FROZEN, functools.partial(_data, param))
        for c, chunk in enumerate(self._model):
            for name, buffer in chunk.named_buffers():
                if buffer is not None:
                    yield _tensor_entry(f"{c}.{name}/buffer", Kind.BUFFER, functools.partial(_buffer, chunk, name))

    def _rng_entries(self) -> Iterator[_Entry]:
        yield _rng_entry("cpu", torch.get_rng_state, torch.set_rng_state)
        yield _rng_entry("device", _get_cuda_rng_state, _set_cuda_rng_state)
        tracker = tensor_parallel.get_cuda_rng_tracker()
        for name, state in sorted(tracker.get_states().items()):
            if not torch.is_tensor(state):
                raise UnsupportedError(
                    "random number generators that CUDA graphs can use (--te-rng-tracker with CUDA graphs) are not "
                    "known to --deadpool: leave the option out"
                )

            def write(new: torch.Tensor, name: str = name) -> None:
                tracker.set_states({**tracker.get_states(), name: new.clone()})

            yield _rng_entry(f"tracker.{name}", functools.partial(_tracked, tracker, name), write)


def named_parameters(model: list[Any]) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """``(chunk.name, parameter)`` of all model chunks; names without DDP's own prefix."""
    for index, chunk in enumerate(model):
        for name, param in chunk.named_parameters():
            yield f"{index}.{name.removeprefix('module.')}", param


def masters(part: Any) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor]]:
    """``(model parameter, what the inner optimizer updates for it)`` on this rank."""
    if hasattr(part, "model_param_group_index_map"):
        groups = part.optimizer.param_groups
        for param, (g, k) in part.model_param_group_index_map.items():
            yield param, groups[g]["params"][k]
    elif hasattr(part, "float16_groups"):
        pairs = [
            (part.float16_groups, part.fp32_from_float16_groups),
            (part.fp32_from_fp32_groups, part.fp32_from_fp32_groups),
        ]
        for models, mains in pairs:
            for model_group, main_group in zip(models, mains, strict=True):
                yield from zip(model_group, main_group, strict=True)
    else:
        for group in part.optimizer.param_groups:
            yield from ((p, p) for p in group["params"])


def prime(inner: Any) -> None:
    """Creates the optimizer's state as its first step would, so that its layout is known before.

    torch's Adam and AdamW count ``step`` per parameter; TE's and Apex's FusedAdam keep it in the group, where the
    scalars are recorded. Zero moments and step 0 are what each of them starts from.

    Raises:
        UnsupportedError: an optimizer that nobody has described here.
    """
    for group in inner.param_groups:
        for param in group["params"]:
            state = inner.state[param]
            if state:
                continue
            if isinstance(inner, torch.optim.Adam):  # AdamW is a subclass
                on_device = group["capturable"] or group["fused"]
                state["step"] = torch.zeros((), dtype=torch.float32, device=param.device if on_device else None)
                _zero(state, param, "exp_avg", "exp_avg_sq")
                if group["amsgrad"]:
                    raise UnsupportedError("AMSGrad is not known to --deadpool")
            elif isinstance(inner, torch.optim.SGD):
                if group["momentum"]:
                    raise UnsupportedError(
                        "torch's SGD with momentum starts its buffer from the first gradient, which --deadpool cannot "
                        "prepare: use --sgd-momentum 0, or --optimizer adam"
                    )
            elif hasattr(inner, "initialize_state"):  # TransformerEngine's FusedAdam
                inner.initialize_state(param, False)
            elif type(inner).__name__ == "FusedAdam":  # Apex
                _zero(state, param, "exp_avg", "exp_avg_sq")
            else:
                raise UnsupportedError(
                    f"--deadpool does not know the optimizer {type(inner).__name__}: use --optimizer adam or sgd"
                )


def _zero(state: dict[str, Any], param: torch.Tensor, *keys: str) -> None:
    for key in keys:
        state[key] = torch.zeros_like(param, memory_format=torch.preserve_format)


def _tensor_entry(name: str, kind: Kind, read: Callable[[], torch.Tensor]) -> _Entry:
    live = read()
    spec = TensorSpec(name, kind, str(live.dtype).removeprefix("torch."), tuple(live.shape))
    return _Entry(spec, read, lambda new: read().copy_(new))


def _rng_entry(name: str, read: Callable[[], torch.Tensor], write: Callable[[torch.Tensor], Any]) -> _Entry:
    spec = TensorSpec(f"rng.{name}", Kind.RNG, "uint8", tuple(read().shape))
    return _Entry(spec, read, lambda new: write(new.clone()))


def _data(param: torch.Tensor) -> torch.Tensor:
    return param.data


def _moment(state: Any, param: torch.Tensor, key: str) -> torch.Tensor:
    # Looked up each time: loading an optimizer's state replaces the tensors.
    return state[param][key]


def _tracked(tracker: Any, name: str) -> torch.Tensor:
    return tracker.get_states()[name]


def _buffer(module: torch.nn.Module, name: str) -> torch.Tensor:
    # Looked up each time: Megatron replaces some buffers instead of writing to them.
    return module.get_buffer(name)


def _is_scalar(value: Any) -> bool:
    return isinstance(value, _GROUP_SCALARS) or torch.is_tensor(value)


def _pack(value: Any) -> Any:
    """A scalar or tensor as JSON that restores it bit for bit."""
    if torch.is_tensor(value):
        flat = value.detach().cpu()
        return {
            "dtype": str(flat.dtype).removeprefix("torch."),
            "shape": list(flat.shape),
            "bytes": bytes(flat.reshape(-1).contiguous().view(torch.uint8).numpy()).hex(),
            "device": value.device.type,
        }
    return value


def _unpack(value: Any) -> Any:
    if isinstance(value, dict) and "bytes" in value:
        raw = torch.frombuffer(bytearray.fromhex(value["bytes"]), dtype=torch.uint8)
        return raw.view(getattr(torch, value["dtype"])).view(value["shape"]).to(value["device"])
    return value


def _unpack_into(group: dict[str, Any], key: str, value: Any) -> None:
    new = _unpack(value)
    if torch.is_tensor(group.get(key)) and torch.is_tensor(new):
        group[key].copy_(new)
    else:
        group[key] = new


def _pack_all(value: Any) -> Any:
    return {k: _pack(v) for k, v in value.items()} if isinstance(value, dict) else _pack(value)


def _unpack_all(value: Any) -> Any:
    if isinstance(value, dict) and "bytes" not in value:
        return {k: _unpack(v) for k, v in value.items()}
    return _unpack(value)


def _as_lists(state: Any) -> Any:
    if isinstance(state, np.ndarray):
        return state.tolist()
    return [_as_lists(s) for s in state] if isinstance(state, tuple) else state
