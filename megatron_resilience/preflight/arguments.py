"""A job from the arguments of ``launch`` and of the training script, read without Megatron."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import yaml

from megatron_resilience import arguments as deadpool_arguments
from megatron_resilience.control.options import LaunchOptions
from megatron_resilience.errors import ConfigurationError
from megatron_resilience.hotswap.schedule import read_schedule
from megatron_resilience.preflight.job import Hardware, Job
from megatron_resilience.vps.families import ModelShape, build_catalogue
from megatron_resilience.vps.layout import Layout

_NUMBERS = [
    "num-layers",
    "hidden-size",
    "ffn-hidden-size",
    "num-attention-heads",
    "num-query-groups",
    "kv-channels",
    "vocab-size",
    "padded-vocab-size",
    "max-position-embeddings",
    "num-experts",
    "moe-ffn-hidden-size",
    "moe-shared-expert-intermediate-size",
    "mtp-num-layers",
    "make-vocab-size-divisible-by",
    "tensor-model-parallel-size",
    "pipeline-model-parallel-size",
    "context-parallel-size",
    "expert-model-parallel-size",
    "expert-tensor-parallel-size",
]
_SWITCHES = [
    "swiglu",
    "disable-bias-linear",
    "untie-embeddings-and-output-weights",
    "qk-layernorm",
    "group-query-attention",
    "bf16",
    "fp16",
    "use-distributed-optimizer",
    "overlap-grad-reduce",
    "use-tp-pp-dp-mapping",
]


def job_from(options: LaunchOptions, hardware: Hardware, step_seconds: float | None) -> Job:
    """The job that ``launch`` would start.

    Raises:
        ConfigurationError: an argument that sizes depend on is missing, or cannot work.
    """
    args = _parse(options.script_args)
    for name in ("num_layers", "hidden_size", "num_attention_heads"):
        if getattr(args, name) is None:
            raise ConfigurationError(f"--{name.replace('_', '-')} is missing in the arguments of {options.script}")
    vocabulary = args.padded_vocab_size or args.vocab_size
    if vocabulary is None:
        raise ConfigurationError(
            "the tokenizer decides on the size of the vocabulary: add --vocab-size N for the preflight"
        )
    config = deadpool_arguments.config_from(args)
    if config is None:
        raise ConfigurationError("--deadpool is missing in the script's arguments: nothing would be protected")
    layout = _layout(args, options.world_size)
    try:
        catalogue = build_catalogue(_shape(args, vocabulary))
    except ValueError as error:
        raise ConfigurationError(str(error)) from error
    mixed = args.bf16 or args.fp16
    return Job(
        name=Path(options.script).name,
        catalogue=catalogue,
        layout=layout,
        nodes=options.slots,
        spares=options.spares,
        ranks_per_node=options.nproc_per_node,
        hardware=hardware,
        deadpool=config,
        heartbeat_s=options.heartbeat_timeout_s,
        distributed_timeout_s=60.0 * args.distributed_timeout_minutes,
        sharded_optimizer=args.use_distributed_optimizer,
        parameter_bytes=2 if mixed else 4,
        step_seconds=step_seconds,
        domains=_domains(options),
        changes=tuple(change for _, change in read_schedule(args.hotswap_schedule, layout))
        if args.hotswap_schedule
        else (),
        exclusive_memory=args.hotswap_exclusive_memory,
        keep_worlds=args.hotswap_keep_worlds,
    )


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name in _NUMBERS:
        parser.add_argument(f"--{name}", type=int)
    for name in _SWITCHES:
        parser.add_argument(f"--{name}", action="store_true")
    parser.add_argument("--normalization", default="LayerNorm")
    parser.add_argument("--position-embedding-type", default="learned_absolute")
    parser.add_argument("--distributed-timeout-minutes", type=float, default=10)
    deadpool_arguments.add_arguments(parser)
    return parser.parse_known_args(list(argv))[0]


def _layout(args: argparse.Namespace, world: int) -> Layout:
    tp, pp = args.tensor_model_parallel_size or 1, args.pipeline_model_parallel_size or 1
    cp = args.context_parallel_size or 1
    if world % (tp * pp * cp):
        raise ConfigurationError(
            f"{world} ranks (--nnodes without spares, times --nproc-per-node) are not a multiple of TP {tp} x PP {pp} x CP {cp}"
        )
    try:
        return Layout(
            tp=tp,
            pp=pp,
            cp=cp,
            dp=world // (tp * pp * cp),
            ep=args.expert_model_parallel_size or 1,
            etp=args.expert_tensor_parallel_size,
            order="tp-cp-ep-pp-dp" if args.use_tp_pp_dp_mapping else "tp-cp-ep-dp-pp",
            overlap_grad_reduce=args.overlap_grad_reduce,
            vocabulary_multiple=args.make_vocab_size_divisible_by or 128,
        )
    except ValueError as error:
        raise ConfigurationError(str(error)) from error


def _shape(args: argparse.Namespace, vocabulary: int) -> ModelShape:
    # Megatron's validate_args: 4h, or for SwiGLU two thirds of it, rounded to a multiple of 64.
    ffn = int(4 * args.hidden_size * 2 / 3 / 64) * 64 if args.swiglu else 4 * args.hidden_size
    learned = args.position_embedding_type == "learned_absolute"
    return ModelShape(
        name="the model of the arguments",
        layers=args.num_layers,
        hidden=args.hidden_size,
        ffn=args.ffn_hidden_size or ffn,
        heads=args.num_attention_heads,
        vocabulary=vocabulary,
        query_groups=args.num_query_groups if args.group_query_attention else None,
        head_size=args.kv_channels,
        gated=args.swiglu,
        bias=not args.disable_bias_linear,
        norm_bias=args.normalization == "LayerNorm",
        tied=not args.untie_embeddings_and_output_weights,
        learned_positions=(args.max_position_embeddings or 0) if learned else 0,
        query_key_norm=args.qk_layernorm,
        experts=args.num_experts or 0,
        expert_ffn=args.moe_ffn_hidden_size or args.ffn_hidden_size or ffn,
        mtp=args.mtp_num_layers or 0,
        shared_expert_ffn=args.moe_shared_expert_intermediate_size or 0,
    )


def _domains(options: LaunchOptions) -> tuple[str, ...]:
    """Racks of the first hosts of ``--failure-domains``, as many as train."""
    if options.failure_domains is None:
        return ()
    try:
        racks = yaml.safe_load(options.failure_domains.read_text())
        listed = [str(rack) for rack, hosts in racks.items() for _ in hosts]
    except (OSError, yaml.YAMLError, AttributeError, TypeError) as error:
        raise ConfigurationError(f"--failure-domains {options.failure_domains}: {error}") from error
    if len(listed) < options.slots:
        raise ConfigurationError(
            f"--failure-domains {options.failure_domains} lists {len(listed)} hosts, {options.slots} train"
        )
    return tuple(listed[: options.slots])
