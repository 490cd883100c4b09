"""A live Megatron model against the Virtual Parameter Space: its description, its flat layout, its sharding.

The catalogue is written down from the model's configuration and then held, tensor by tensor, against what the live
modules and the live distributed optimizer say; a mismatch refuses to start instead of routing state wrongly.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from megatron_resilience.vps.families import ModelShape, build_catalogue
from megatron_resilience.vps.layout import ORDER, ORDER_PP_BEFORE_DP, Layout
from megatron_resilience.vps.local import local_labels
from megatron_resilience.vps.space import StateSpace
from megatron_resilience.vps.tensors import Place


class LayoutMismatch(RuntimeError):
    """The predicted layout differs from the live one; the message names the tensor and both values."""


def layout_of(args: Any) -> Layout:
    """The layout that Megatron's validated arguments ask for.

    Raises:
        ValueError: a way of placing layers or parameters that a `Layout` cannot say, naming the option.
    """
    for option in ("pipeline_model_parallel_layout", "use_custom_fsdp", "use_megatron_fsdp", "use_torch_fsdp2"):
        if getattr(args, option, None):
            raise ValueError(f"--{option.replace('_', '-')}: such a layout cannot be changed yet; leave it out")
    tp, pp, cp = args.tensor_model_parallel_size, args.pipeline_model_parallel_size, args.context_parallel_size
    etp = args.expert_tensor_parallel_size
    return Layout(
        tp=tp,
        pp=pp,
        dp=args.world_size // (tp * pp * cp),
        cp=cp,
        ep=args.expert_model_parallel_size,
        etp=None if etp == tp else etp,
        vpp=args.virtual_pipeline_model_parallel_size or 1,
        order=ORDER_PP_BEFORE_DP if args.use_tp_pp_dp_mapping else ORDER,
        first_stage_layers=args.decoder_first_pipeline_num_layers,
        last_stage_layers=args.decoder_last_pipeline_num_layers,
        count_embedding=args.account_for_embedding_in_pipeline_split,
        count_loss=args.account_for_loss_in_pipeline_split,
        overlap_grad_reduce=args.overlap_grad_reduce,
        bucket_size=args.ddp_bucket_size,
        num_buckets=args.ddp_num_buckets,
        pad_for_busbw=args.ddp_pad_buckets_for_high_nccl_busbw,
        vocabulary_multiple=args.make_vocab_size_divisible_by,
    )


def live_space(args: Any, chunks: Sequence[Any], optimizer: Any, vocabulary: int) -> StateSpace:
    """The space of the model that trains here, once every tensor on this rank has been found where it predicts.

    Call it at the door of ``train()``, on every rank; no collectives.

    Args:
        args: Megatron's, validated.
        chunks: the DDP-wrapped model chunks.
        optimizer: Megatron's.
        vocabulary: the tokenizer's, without padding.

    Raises:
        ValueError: an architecture or layout that is not described; names the option.
        LayoutMismatch: Megatron keeps a tensor elsewhere than predicted; names the tensor.
    """
    space = StateSpace(
        build_catalogue(live_shape(args, chunks, vocabulary)),
        layout_of(args),
        sharded_optimizer=args.use_distributed_optimizer,
    ).check()
    if args.use_distributed_optimizer:
        compare_flat_layout(space, args.rank, chunks, optimizer)
    compare_sharding(space, args.rank, chunks)
    return space


def live_shape(args: Any, chunks: Sequence[Any], vocabulary: int) -> ModelShape:
    """The description of the model that trains here; arguments and errors as :func:`live_space`'s."""
    model = chunks[0]
    while hasattr(model, "module"):
        model = model.module
    positions = args.max_position_embeddings if args.position_embedding_type == "learned_absolute" else 0
    tied = not args.untie_embeddings_and_output_weights
    return shape_of(model.config, "live", vocabulary, tied, positions)


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
    for option in ("multi_latent_attention", "mtp_use_repeated_layer", "hetereogenous_dist_checkpoint"):
        if getattr(config, option, None):
            raise ValueError(f"{option}: this architecture cannot change its layout yet; leave it out")
    pattern = None
    if config.num_moe_experts:
        frequency = config.moe_layer_freq
        if isinstance(frequency, int):
            # Megatron's get_gpt_decoder_layer_specs: every frequency-th layer, from the first on.
            frequency = [int(layer % frequency == 0) for layer in range(config.num_layers)]
        pattern = tuple(frequency)
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
        moe_pattern=pattern,
        mtp=config.mtp_num_layers or 0,
        shared_expert_ffn=config.moe_shared_expert_intermediate_size or 0,
        router_bias=bool(config.num_moe_experts and config.moe_router_enable_expert_bias),
        dtype=str(config.params_dtype).removeprefix("torch."),
        impl="te" if getattr(config, "transformer_impl", "local") == "transformer_engine" else "local",
    )


def logical_names(chunk: Any, expert_offset: int, buffers: bool = False) -> Iterator[tuple[str, Any]]:
    """(logical name, parameter) of a model chunk, in the order of ``named_parameters()``; with ``buffers`` its
    persistent buffers instead.

    Layers are numbered over the whole model (``layer_number``), experts over all EP ranks.
    """
    model = chunk
    while hasattr(model, "module"):
        model = model.module
    offset = int(model.decoder.layers[0].layer_number) - 1 if len(model.decoder.layers) else 0
    for name, parameter in _persistent_buffers(model) if buffers else model.named_parameters():
        name = re.sub(r"^decoder\.layers\.(\d+)", lambda m: f"decoder.layers.{int(m[1]) + offset}", name)
        name = re.sub(r"\.local_experts\.(\d+)", lambda m: f".local_experts.{int(m[1]) + expert_offset}", name)
        yield name, parameter


def _persistent_buffers(model: Any) -> Iterator[tuple[str, Any]]:
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                yield f"{prefix}.{name}" if prefix else name, buffer


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


Position = tuple[int, int, int, int, int, int]


def _predicted(space: StateSpace, rank: int) -> dict[tuple[int, str], Position]:
    out: dict[tuple[int, str], Position] = {}
    inst = space.instances
    for expert, grid in ((False, space.layout.dense), (True, space.layout.expert)):
        _, ep, shard, pp = space.layout.coordinates(grid, rank)
        here = (inst.pp == pp) & (space.is_expert[inst.tensor] == expert) & space.flat[inst.tensor]
        rows = np.flatnonzero(here & (inst.ep == ep) if expert else here)
        low, high = space.owned_range(rows, np.full(len(rows), shard))
        for row, begin, end in zip(rows.tolist(), low.tolist(), high.tolist(), strict=True):
            name = space.catalogue.tensors[int(inst.tensor[row])].name
            if inst.copy[row] and space.catalogue.tensors[int(inst.tensor[row])].place is Place.TIED:
                name = "output_layer.weight"
            start, bucket = int(inst.start[row]), int(inst.bucket_start[row])
            owned = (begin, end) if begin < end else (0, 0)
            bucket_end = bucket + int(inst.shard[row]) * grid.shards
            out[(int(inst.chunk[row]), name)] = (
                start, start + int(inst.numel[row]), bucket, bucket_end, *owned,
            )  # fmt: skip
    return out


def _live(optimizer: Any, identity: dict[Any, tuple[int, str]]) -> Iterator[tuple[tuple[int, str], Position]]:
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
