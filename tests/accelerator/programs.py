"""What tests run inside forked ranks: a failed assertion is exit status 1."""

from __future__ import annotations

import contextlib
import os
import runpy

import torch
import torch.distributed as dist

from megatron_resilience import accelerator
from megatron_resilience.accelerator.cpu import rng
from tests.support.template import TRAIN_GPT


def unequal_shapes() -> None:
    """all_gather and reduce_scatter of lists of unequal shapes, against what they mean."""
    dist.init_process_group("gloo", device_id=torch.device("cuda:0"))
    rank, size = dist.get_rank(), dist.get_world_size()
    outputs = [torch.full((source + 1, 2), -1.0) for source in range(size)]
    dist.all_gather(outputs, torch.full((rank + 1, 2), float(rank)))
    for source, output in enumerate(outputs):
        assert torch.equal(output, torch.full((source + 1, 2), float(source))), (source, output)
    inputs = [torch.full((target + 1,), float(10 * target + rank)) for target in range(size)]
    kept = [tensor.clone() for tensor in inputs]
    output = torch.empty(rank + 1)
    dist.reduce_scatter(output, inputs)
    expected = sum(10 * rank + source for source in range(size))
    assert torch.equal(output, torch.full((rank + 1,), float(expected))), output
    assert all(map(torch.equal, inputs, kept)), "reduce_scatter changed its inputs"
    dist.destroy_process_group()


def nccl_is_refused() -> None:
    """The message names the option to pass."""
    try:
        dist.init_process_group("nccl")
    except ValueError as error:
        assert "--distributed-backend gloo" in str(error), error
    else:
        raise AssertionError("nccl was accepted on a CPU")


def tensors_land_on_the_cpu() -> None:
    """Factories, moves, type strings, streams and memory questions."""
    cpu = torch.device("cpu")
    device = torch.cuda.current_device()
    for target in ("cuda", "cuda:0", torch.device("cuda"), 0, device):
        assert torch.empty(2, device=target).device == cpu
        assert torch.tensor([1.0], device=target).device == cpu
        assert torch.zeros(2).to(target).device == cpu
        assert torch.zeros(2).to(device=target, dtype=torch.bfloat16).dtype == torch.bfloat16
        assert torch.nn.Linear(2, 2, device=target).to(target).weight.device == cpu
    assert torch.zeros(1).to(torch.float64).dtype == torch.float64
    assert torch.zeros(1, dtype=torch.bfloat16).type() == "torch.cuda.BFloat16Tensor"
    assert torch.zeros(1).type("torch.cuda.HalfTensor").dtype == torch.float16
    with torch.cuda.stream(torch.cuda.Stream()) as nothing:
        assert nothing is None
        torch.zeros(1).cuda().record_stream(torch.cuda.current_stream())
    assert torch.cuda.memory_stats()["allocated_bytes.all.peak"] == 0
    # torch._dynamo refuses functions that carry two names; it builds this table at the first compilation.
    torch._dynamo.trace_rules.get_torch_obj_rule_map()


def loaders_leave_the_device_stream_alone() -> None:
    """A DataLoader's draws come from the host's stream, and both streams can be set back."""
    chosen = accelerator.select("cpu")
    torch.manual_seed(7)
    before = chosen.rng_streams()
    data = list(torch.utils.data.DataLoader(torch.arange(64), shuffle=True))
    after = chosen.rng_streams()
    assert torch.equal(before["device"], after["device"])
    assert not torch.equal(before["host"], after["host"]), "the loader drew from nowhere"
    device = torch.rand(3)
    chosen.set_rng_streams(before)
    assert data == list(torch.utils.data.DataLoader(torch.arange(64), shuffle=True))
    assert torch.equal(device, torch.rand(3))
    torch.cuda.manual_seed(8)
    assert torch.equal(chosen.rng_streams()["host"], after["host"]), "seeding the device seeded the host"
    with chosen.data_rng():
        torch.rand(1)
        try:
            chosen.rng_streams()
        except RuntimeError as error:
            assert "data_rng" in str(error)
        else:
            raise AssertionError("streams were given out while they were exchanged")


def installing_twice_changes_nothing() -> None:
    """The second install does not wrap the wrappers."""
    function = torch.empty
    accelerator.install_from_environment()
    assert torch.empty is function


def train_and_compare_replicas() -> None:
    """Trains, then asserts that tensor-parallel ranks agree in what is replicated over them.

    With BREAK_DATA_RNG set, loaders draw from the device's stream, as they would without the accelerator's
    care; this is the trap that the assertion must catch.
    """
    if os.environ.get("BREAK_DATA_RNG"):
        rng.data_rng = contextlib.nullcontext
    from megatron.core import mpu
    from megatron.training import training

    train = training.train
    models: list[torch.nn.Module] = []

    def kept_train(forward_step, model, *args, **kwargs):
        models.extend(model)
        return train(forward_step, model, *args, **kwargs)

    training.train = kept_train
    runpy.run_path(TRAIN_GPT, run_name="__main__")
    replicated = [
        (name, parameter.detach())
        for name, parameter in models[0].named_parameters()
        if not getattr(parameter, "tensor_model_parallel", False)
    ]
    assert any("layernorm" in name for name, _ in replicated), [name for name, _ in replicated]
    group = mpu.get_tensor_model_parallel_group()
    for name, parameter in replicated:
        everywhere = [torch.empty_like(parameter) for _ in range(group.size())]
        dist.all_gather(everywhere, parameter, group=group)
        assert all(torch.equal(one, everywhere[0]) for one in everywhere), f"{name} drifted apart"


def print_refusals() -> None:
    """What the command line's options are refused for, after Megatron's own validation."""
    from megatron.training.arguments import parse_args, validate_args

    from megatron_resilience.megatron_adapter.options import refusals

    args = parse_args()
    validate_args(args)
    print("refusals:", refusals(args), flush=True)
