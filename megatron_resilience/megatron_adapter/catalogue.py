"""A live Megatron model against the Virtual Parameter Space: its description, its flat layout, its sharding.

The catalogue is written down from the model's configuration and then held, tensor by tensor, against what the live
modules and the live distributed optimizer say; a mismatch refuses to start instead of routing state wrongly.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from megatron_resilience.vps.families import ModelShape
from megatron_resilience.vps.local import local_labels
from megatron_resilience.vps.space import StateSpace


class LayoutMismatch(RuntimeError):
    """The predicted layout differs from the live one; the message names the tensor and both values."""


def shape_of(config: Any, name: str, vocabulary: int, tied: bool, learned_positions: int = 0) -> ModelShape:
    """Describe a GPT model by its ``TransformerConfig``.

    Args:
        config: megatron.core.transformer.TransformerConfig.
        vocabulary: size without padding.
        tied: share_embeddings_and_output_weights.
        learned_positions: rows of a learned position embedding, 0 for RoPE.

    Raises:
        ValueError: an architecture that the description does not cover, naming the option.
    """
    for option in ("multi_latent_attention", "mtp_num_layers", "hetereogenous_dist_checkpoint"):
        if getattr(config, option, None):
            raise ValueError(f"{option}: this architecture cannot change its layout yet; leave it out")
    frequency = config.moe_layer_freq if config.num_moe_experts else 1
    dense_first = 0
    if isinstance(frequency, list):
        dense_first = frequency.index(1)
        if frequency != [0] * dense_first + [1] * (len(frequency) - dense_first):
            raise ValueError(f"moe_layer_freq={frequency}: only dense layers first, then MoE layers")
    elif frequency != 1:
        raise ValueError(f"moe_layer_freq={frequency}: only dense layers first, then MoE layers")
    return ModelShape(
        name=name,
        layers=config.num_layers,
        hidden=config.hidden_size,
        ffn=config.ffn_hidden_size,
        heads=config.num_attention_heads,
        vocabulary=vocabulary,
        query_groups=config.num_query_groups,
        head_size=config.kv_channels,
        gated=config.gated_linear_unit,
        bias=config.add_bias_linear,
        norm_bias=config.normalization == "LayerNorm",
        tied=tied,
        learned_positions=learned_positions,
        query_key_norm=config.qk_layernorm,
        experts=config.num_moe_experts or 0,
        expert_ffn=config.moe_ffn_hidden_size or config.ffn_hidden_size,
        dense_first=dense_first,
        shared_expert_ffn=config.moe_shared_expert_intermediate_size or 0,
        router_bias=bool(config.num_moe_experts and config.moe_router_enable_expert_bias),
        dtype=str(config.params_dtype).removeprefix("torch."),
        impl="te" if getattr(config, "transformer_impl", "local") == "transformer_engine" else "local",
    )


def logical_names(chunk: Any, expert_offset: int) -> Iterator[tuple[str, Any]]:
    """(logical name, parameter) of a model chunk, in the order of ``named_parameters()``.

    Layers are numbered over the whole model (``layer_number``), experts over all EP ranks.
    """
    model = chunk
    while hasattr(model, "module"):
        model = model.module
    offset = int(model.decoder.layers[0].layer_number) - 1 if len(model.decoder.layers) else 0
    for name, parameter in model.named_parameters():
        name = re.sub(r"^decoder\.layers\.(\d+)", lambda m: f"decoder.layers.{int(m[1]) + offset}", name)
        name = re.sub(r"\.local_experts\.(\d+)", lambda m: f".local_experts.{int(m[1]) + expert_offset}", name)
        yield name, parameter


def compare_flat_layout(space: StateSpace, rank: int, chunks: Sequence[Any], optimizer: Any) -> int:
    """Hold the predicted flat layout against the live optimizer's maps, parameter by parameter.

    Compares offsets and bucket numbers (``param_index_map``), bucket bounds, and the range of every parameter that
    this rank owns (``gbuf_ranges``).

    Args:
        chunks: the DDP-wrapped model chunks.
        optimizer: a DistributedOptimizer or a ChainedOptimizer of them.

    Returns:
        Number of parameters compared.

    Raises:
        LayoutMismatch: naming the first tensor that differs.
    """
    predicted = _predicted(space, rank)
    identity = {}
    for number, chunk in enumerate(chunks):
        for name, parameter in logical_names(chunk, _expert_offset(space, rank)):
            identity[parameter] = (number, name)
    live = dict(_live(optimizer, identity))
    for key in predicted.keys() | live.keys():
        if predicted.get(key) != live.get(key):
            raise LayoutMismatch(
                f"rank {rank}, model chunk {key[0]}: {key[1]} lies at {live.get(key)} in Megatron's buffers, but "
                f"{predicted.get(key)} was predicted for {space.layout} (offset, end, bucket start, bucket end, "
                f"owned from, owned to); this Megatron lays out its buffers in a way that is not supported"
            )
    return len(live)


def compare_sharding(space: StateSpace, rank: int, chunks: Sequence[Any]) -> int:
    """Hold the predicted cut of every parameter against the modules' own ``sharded_state_dict``, label by label.

    Returns:
        Number of parameters compared.

    Raises:
        LayoutMismatch: naming the first tensor whose elements stand for others than predicted.
    """
    compared = 0
    for number, chunk in enumerate(chunks):
        truth = _labels_of_modules(chunk)
        for name, parameter in logical_names(chunk, _expert_offset(space, rank)):
            expected = local_labels(space, rank, _number(space, name, number))
            label, stated = truth.get(parameter.data_ptr(), (None, ()))
            if label is None:
                continue
            tensor = space.catalogue.tensors[_number(space, name, number)]
            rows = 1 if not tensor.shape else tensor.canonical_shape[1]
            if tensor.cut and tensor.cut.padded:
                # Padding stands for nothing; Megatron counts it as rows beyond the vocabulary.
                label = np.where(label // tensor.canonical_shape[2] < rows, label, -1)
            if expected.size != label.size or not np.array_equal(expected.ravel(), label.ravel()):
                raise LayoutMismatch(
                    f"rank {rank}: {name} holds other elements than predicted under {space.layout} "
                    f"(global shape {stated} by its module, {tensor.shape} in the catalogue)"
                )
            compared += 1
    return compared


def _number(space: StateSpace, name: str, chunk: int) -> int:
    numbers = space.catalogue.number_of
    if name == "output_layer.weight" and name not in numbers:
        name = "embedding.word_embeddings.weight"
    if name not in numbers:
        raise LayoutMismatch(f"model chunk {chunk} has a parameter {name} that the catalogue does not know")
    return numbers[name]


def _expert_offset(space: StateSpace, rank: int) -> int:
    ep = space.layout.coordinates(space.layout.expert, rank)[1]
    return ep * (space.catalogue.experts // space.layout.ep)


Place = tuple[int, int, int, int, int, int]


def _predicted(space: StateSpace, rank: int) -> dict[tuple[int, str], Place]:
    out: dict[tuple[int, str], Place] = {}
    inst = space.instances
    for expert, grid in ((False, space.layout.dense), (True, space.layout.expert)):
        _, ep, shard, pp = space.layout.coordinates(grid, rank)
        here = (inst.pp == pp) & (space.is_expert[inst.tensor] == expert) & space.flat[inst.tensor]
        rows = np.flatnonzero(here & (inst.ep == ep) if expert else here)
        low, high = space.owned_range(rows, np.full(len(rows), shard))
        for row, begin, end in zip(rows.tolist(), low.tolist(), high.tolist(), strict=True):
            name = space.catalogue.tensors[int(inst.tensor[row])].name
            if inst.copy[row]:
                name = "output_layer.weight"
            start, bucket = int(inst.start[row]), int(inst.bucket_start[row])
            owned = (begin, end) if begin < end else (0, 0)
            bucket_end = bucket + int(inst.shard[row]) * grid.shards
            out[(int(inst.chunk[row]), name)] = (
                start, start + int(inst.numel[row]), bucket, bucket_end, *owned,
            )  # fmt: skip
    return out


def _live(optimizer: Any, identity: dict[Any, tuple[int, str]]) -> Iterator[tuple[tuple[int, str], Place]]:
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        for buffer, by_dtype in zip(part.buffers, part.gbuf_ranges, strict=True):
            (buckets,) = by_dtype.values()
            for parameter, (start, end, bucket) in buffer.param_index_map.items():
                owned = buckets[bucket]["param_map"].get(parameter)
                span = (owned["param"].start, owned["param"].end) if owned else (0, 0)
                begin = buffer.buckets[bucket].offset
                bucket_end = begin + buffer.buckets[bucket].grad_data.numel()
                yield identity[parameter], (start, end, begin, bucket_end, *span)


def _labels_of_modules(chunk: Any) -> dict[int, tuple[np.ndarray, tuple[int, ...]]]:
    """Logical index of each element by the module's own metadata, keyed by the parameter's data pointer."""
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

    model = chunk
    while hasattr(model, "module"):
        model = model.module
    out = {}
    for entry in _leaves(model.sharded_state_dict()):
        data = getattr(entry, "data", None)
        if data is None or not hasattr(data, "data_ptr"):
            continue
        built = entry.build() if isinstance(entry, ShardedTensorFactory) else entry
        parts = [part for part in _leaves(built) if isinstance(part, ShardedTensor)]
        if not parts:
            continue
        axis = _concatenated_axis(parts, tuple(data.shape))
        labels = np.concatenate([_labels(part) for part in parts], axis=axis)
        skip = parts[0].prepend_axis_num
        out[data.data_ptr()] = (labels, tuple(parts[0].global_shape[skip:]))
    return out


def _concatenated_axis(parts: list[Any], shape: tuple[int, ...]) -> int:
    if len(parts) == 1:
        return 0
    return next(i for i, (a, b) in enumerate(zip(parts[0].local_shape, shape, strict=True)) if a != b)


def _labels(part: Any) -> np.ndarray:
    skip = part.prepend_axis_num
    shape, offset = part.global_shape[skip:], part.global_offset[skip:]
    axes = [np.arange(start, start + count) for start, count in zip(offset, part.local_shape, strict=True)]
    return np.ravel_multi_index(np.ix_(*axes), shape) if axes else np.zeros((), np.int64)


def _leaves(tree: Any) -> Iterator[Any]:
    if isinstance(tree, dict):
        for value in tree.values():
            yield from _leaves(value)
    elif isinstance(tree, list | tuple):
        for value in tree:
            yield from _leaves(value)
    else:
        yield tree
