"""The few places inside Megatron 0.19 that assume a GPU beyond what ``torch`` can answer for it."""

from __future__ import annotations

import copy
import functools
import importlib
import logging
from typing import Any

import torch

from megatron_resilience.accelerator.cpu import rng
from megatron_resilience.accelerator.cpu.patching import Patches


def install(patches: Patches) -> None:
    """Imports ``megatron.training`` and replaces what is listed in this file; the caller sweeps."""
    importlib.import_module("megatron.training.training")
    _rng(patches)
    _start_up(patches)
    _moe(patches)
    _norm()
    # Nobody has a fused Adam here, so this is part of being able to train at all.
    importlib.import_module("megatron_resilience.megatron_adapter.torch_adam").install()


def _rng(patches: Patches) -> None:
    random = importlib.import_module("megatron.core.tensor_parallel.random")
    # Megatron queues the setting of a CUDA generator until CUDA is initialised: never, here, and the
    # random numbers would silently be wrong.
    patches.replace(random, "_get_cuda_rng_state", _get_cuda_rng_state)
    patches.replace(random, "_set_cuda_rng_state", _set_cuda_rng_state)
    # With one generator for both, the tracker sees the "CPU" stream change under it, rightly.
    logging.getLogger(random.__name__).addFilter(
        lambda record: "CPU RNG state changed within GPU RNG context" not in record.getMessage()
    )


def _get_cuda_rng_state(device: Any = "cuda", clone: bool = False, graph_safe: bool = False) -> torch.Tensor:
    _refuse_graphs(graph_safe)
    return torch.default_generator.get_state()


def _set_cuda_rng_state(new_state: torch.Tensor, device: Any = -1, graph_safe: bool = False) -> None:
    _refuse_graphs(graph_safe)
    torch.default_generator.set_state(new_state)


def _refuse_graphs(graph_safe: bool) -> None:
    if graph_safe:
        raise RuntimeError("CUDA graphs were asked for on the CPU accelerator; pass --cuda-graph-impl none")


def _start_up(patches: Patches) -> None:
    initialize = importlib.import_module("megatron.training.initialize")
    training = importlib.import_module("megatron.training.training")
    utils = importlib.import_module("megatron.core.datasets.utils")

    initialize_megatron = initialize.initialize_megatron

    @functools.wraps(initialize_megatron)
    def without_cuda(*args: Any, **kwargs: Any) -> Any:
        # First positional parameter of initialize_megatron.
        if args:
            return initialize_megatron(True, *args[1:], **kwargs)
        kwargs["allow_no_cuda"] = True
        return initialize_megatron(**kwargs)

    patches.replace(initialize, "initialize_megatron", without_cuda)

    compile_helpers = utils.compile_helpers

    @functools.wraps(compile_helpers)
    def compile_helpers_where_missing() -> None:
        # The wheel carries the compiled helper and no Makefile; rank 0 would exit on `make`.
        try:
            importlib.import_module("megatron.core.datasets.helpers_cpp")
        except ImportError:
            compile_helpers()

    patches.replace(utils, "compile_helpers", compile_helpers_where_missing)

    # Data sets and loaders are built on some ranks only, see accelerator.cpu.rng.
    build = training.build_train_valid_test_data_iterators

    @functools.wraps(build)
    def build_under_data_rng(*args: Any, **kwargs: Any) -> Any:
        with rng.data_rng():
            return build(*args, **kwargs)

    patches.replace(training, "build_train_valid_test_data_iterators", build_under_data_rng)


def _moe(patches: Patches) -> None:
    moe_utils = importlib.import_module("megatron.core.transformer.moe.moe_utils")
    move = moe_utils.maybe_move_tensor_to_cpu

    @functools.wraps(move)
    def maybe_move_tensor_to_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        # Megatron takes "is on the CPU" for "was moved already" and returns a tensor where the
        # dispatcher needs a list of split sizes.
        if torch.is_tensor(tensor):
            copied = tensor.detach().clone()
            return copied.numpy() if as_numpy else copied
        return move(tensor, as_numpy, record_stream)

    patches.replace(moe_utils, "maybe_move_tensor_to_cpu", maybe_move_tensor_to_cpu)


def _norm() -> None:
    torch_norm = importlib.import_module("megatron.core.transformer.torch_norm")
    norm = torch_norm.WrappedTorchNorm
    build = norm.__new__

    def build_sequence_parallel(cls: Any, config: Any, *args: Any, **kwargs: Any) -> Any:
        if not config.sequence_parallel:
            return build(cls, config, *args, **kwargs)
        # All that sequence parallelism needs of a norm is the mark by which its gradients are reduced
        # over the tensor-parallel ranks; Megatron asserts because torch's norm does not set it.
        without = copy.copy(config)
        without.sequence_parallel = False
        module = build(cls, without, *args, **kwargs)
        for parameter in module.parameters():
            parameter.sequence_parallel = True
        return module

    norm.__new__ = staticmethod(build_sequence_parallel)
