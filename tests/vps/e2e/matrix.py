"""Run as ranks of a configuration of the tests' matrix: at the door of ``train()``, prediction against the live state.

Values too: parameters are filled with their logical indices, digit by digit (bf16 holds integers up to 256 exactly),
Megatron copies them to its masters, and every element of every master must be the one predicted for its position.
"""

import runpy
import sys

import numpy as np
import torch
from megatron.training import get_args, training

from megatron_resilience.hotswap.fragments import fragments
from megatron_resilience.megatron_adapter.buckets import chained
from megatron_resilience.megatron_adapter.catalogue import (
    LayoutMismatch,
    compare_flat_layout,
    live_space,
    logical_names,
)
from megatron_resilience.megatron_adapter.storage import MOMENTS, live_storage
from megatron_resilience.vps.local import local_labels
from megatron_resilience.vps.space import StateSpace
from tests.support.template import TRAIN_GPT

VOCABULARY = 128
DIGITS = 3


def compare_values(space, chunks, optimizer, rank):
    """Elements of masters that were compared. Asserts that each is the logical element predicted for its place."""
    layout, numbers = space.layout, space.catalogue.number_of
    offset = layout.coordinates(layout.expert, rank)[1] * (space.catalogue.experts // layout.ep)
    labels = {}
    for chunk in chunks:
        for name, parameter in logical_names(chunk, offset):
            number = numbers.get(name, numbers.get("embedding.word_embeddings.weight"))
            labels[parameter] = local_labels(space, rank, number).ravel() + 1
    boxes = space.boxes_of(rank)
    compared = 0
    for digit in range(DIGITS):
        for parameter, label in labels.items():
            values = torch.from_numpy(label // 256**digit % 256).to(parameter.dtype)
            parameter.data.copy_(values.view_as(parameter))
        for part in chained(optimizer):
            part.reload_model_params()
        storage = live_storage(space, rank, chunks, optimizer)
        # Every box of the rank, read as the router would, holds its logical elements in their order.
        for i, fields in enumerate(fragments(space, rank, boxes, storage)):
            tensor = space.catalogue.tensors[boxes.tensor[i]]
            box = tuple(slice(getattr(boxes, d + "0")[i], getattr(boxes, d + "1")[i]) for d in "oci")
            logical = np.arange(1, tensor.numel + 1).reshape(tensor.canonical_shape)[box]
            if "master" in fields:
                master = fields["master"].numpy()
                assert np.array_equal(master, logical // 256**digit % 256), f"rank {rank}: {tensor.name} is elsewhere"
                assert all(fields[moment].shape == logical.shape for moment in MOMENTS)
                compared += master.size
        assert set(storage) >= {(int(t), int(c)) for t, c in zip(boxes.tensor, boxes.copy, strict=True)}
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
