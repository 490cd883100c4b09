"""Run as ranks of a configuration of the tests' matrix: at the door of ``train()``, prediction against the live state.

Values too: parameters are filled with their logical indices, digit by digit (bf16 holds integers up to 256 exactly),
Megatron copies them to its masters, and every element of every master must be the one predicted for its position.
"""

import runpy
import sys

import numpy as np
import torch
from megatron.training import get_args, training

from megatron_resilience.megatron_adapter.buckets import chained
from megatron_resilience.megatron_adapter.catalogue import (
    LayoutMismatch,
    compare_flat_layout,
    live_space,
    logical_names,
)
from megatron_resilience.megatron_adapter.state import masters
from megatron_resilience.vps.local import local_labels
from megatron_resilience.vps.space import StateSpace
from tests.support.template import TRAIN_GPT

VOCABULARY = 128
DIGITS = 3


def instances(space, chunks, rank):
    """(parameter, tensor number, instance row) of everything on this rank."""
    layout = space.layout
    ep = layout.coordinates(layout.expert, rank)[1]
    numbers = space.catalogue.number_of
    for chunk in chunks:
        for name, parameter in logical_names(chunk, ep * (space.catalogue.experts // layout.ep)):
            second = name not in numbers
            number = numbers["embedding.word_embeddings.weight" if second else name]
            inst = space.instances
            yield parameter, number, int((inst.second if second else inst.first)[number])


def compare_values(space, chunks, optimizer, rank):
    """Elements of masters that were compared. Asserts that each is the logical element predicted for its place."""
    found = list(instances(space, chunks, rank))
    labels = {p: local_labels(space, rank, number).ravel() + 1 for p, number, _ in found}
    compared = 0
    for digit in range(DIGITS):
        for parameter, label in labels.items():
            values = torch.from_numpy(label // 256**digit % 256).to(parameter.dtype)
            parameter.data.copy_(values.view_as(parameter))
        for part in chained(optimizer):
            part.reload_model_params()
            live = dict(masters(part))
            for parameter, number, row in found:
                if parameter not in live:
                    continue
                grid = space.layout.expert if space.is_expert[number] else space.layout.dense
                shard = space.layout.coordinates(grid, rank)[2]
                low, high = (int(x[0]) for x in space.owned_range(np.array([row]), np.array([shard])))
                expected = labels[parameter][low:high] // 256**digit % 256
                master = live[parameter].detach().float().ravel().numpy()
                name = space.catalogue.tensors[number].name
                assert master.size == high - low, f"rank {rank}: {name} has {master.size} elements, not {high - low}"
                assert np.array_equal(master, expected), f"rank {rank}: {name} holds other elements than predicted"
                compared += master.size
    return compared


def expect_a_mismatch(space, chunks, optimizer, args):
    """The check can fail, and names a tensor: one of the catalogue a row too large is not where Megatron has it."""
    from dataclasses import replace

    tensors = list(space.catalogue.tensors)
    number = next(i for i, t in enumerate(tensors) if t.cut is None and t.place.value == "layer")
    tensors[number] = replace(tensors[number], shape=(tensors[number].shape[0] + 64, *tensors[number].shape[1:]))
    wrong = StateSpace(replace(space.catalogue, tensors=tuple(tensors)), space.layout)
    try:
        compare_flat_layout(wrong, args.rank, chunks, optimizer)
    except LayoutMismatch as error:
        assert any(f" {tensor.name} lies at" in str(error) for tensor in tensors), error
        return
    if space.instances.pp[space.instances.first[number]] == space.layout.coordinates(space.layout.dense, args.rank)[3]:
        raise AssertionError("a wrong catalogue was accepted")


def door(forward_step, model, optimizer, *rest, **kwargs):
    """Takes the place of ``train()``."""
    args = get_args()
    space = live_space(args, model, optimizer, VOCABULARY)
    if args.use_distributed_optimizer:
        expect_a_mismatch(space, model, optimizer, args)
    compared = compare_values(space, model, optimizer, args.rank)
    assert compared
    print(f"{space.layout}: {compared} elements of masters compared by value", flush=True)
    torch.distributed.barrier()
    sys.exit(0)


def main():
    """A rank of examples/train_gpt.py that ends at the door."""
    training.train = door
    runpy.run_path(TRAIN_GPT, run_name="__main__")
