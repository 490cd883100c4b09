"""The options of Megatron 0.19 that a protected job refuses, with reason and remedy. See ``options``."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class When:
    """A predicate on an option's value.

    Attributes:
        holds: takes the value and all arguments.
        example: a value for which it holds.
    """

    holds: Callable[[Any, argparse.Namespace], bool]
    example: Any


@dataclass(frozen=True)
class Refusal:
    """Why and when an option is refused."""

    flag: str
    when: When
    reason: str
    remedy: str


ON = When(lambda value, args: bool(value), True)
GIVEN = When(lambda value, args: value is not None, 0)


def above(limit: float) -> When:
    """The value is a number greater than ``limit``."""
    return When(lambda value, args: value is not None and value > limit, limit + 1)


def one_of(*values: str) -> When:
    """The value is among ``values``; of a list, any element is."""
    return When(lambda value, args: not set(values).isdisjoint(_elements(value)), values[0])


def not_one_of(*values: str) -> When:
    """The value is given and not among ``values``."""
    return When(lambda value, args: value is not None and value not in values, "another")


def exceeds(dest: str) -> When:
    """The value is greater than that of another option, which defaults to the tensor-parallel size."""

    def holds(value: Any, args: argparse.Namespace) -> bool:
        other = getattr(args, dest, None) or getattr(args, "tensor_model_parallel_size", None) or 1
        return value is not None and value > other

    return When(holds, 1 << 20)


def _elements(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _leave_out(reason: str, *dests: str, when: When = ON) -> dict[str, Refusal]:
    """Refusals whose remedy is to leave the option out."""
    return {dest: Refusal(_flag(dest), when, reason, "leave it out") for dest in dests}


# Where the destination is not the option's name.
_FLAGS = {
    "cuda_graph_scope_deprecated": "--cuda-graph-scope",
    "fp4": "--fp4-format",
    "fp8": "--fp8-format",
    "nccl_ub": "--use-nccl-ub",
    "overlap_p2p_comm_warmup_flush": "--overlap-p2p-communication-warmup-flush",
}


def _use(remedy: str, reason: str, dest: str, when: When) -> dict[str, Refusal]:
    return {dest: Refusal(_flag(dest), when, reason, remedy)}


def _flag(dest: str) -> str:
    return _FLAGS.get(dest, "--" + dest.replace("_", "-"))


_GRAPHS = "a captured CUDA graph replays device pointers and communicators of the world it was captured in"
_USERBUFFERS = "it opens communicators and registered buffers of its own, beneath the process groups"
_FSDP = "parameters, gradients and optimizer state are laid out by FSDP, which the state inventory cannot read"
_OFFLOAD = "it keeps tensors in host buffers with copies in flight, which an interrupted step leaves behind"
_FP8 = "quantized training keeps scaling factors and their history outside the state inventory"
_ROAD = "it restarts training by itself, and two owners of recovery fight over the same processes"
_GTP = "weights sharded over the GTP axis have gathers in flight and groups that the rebuild does not know"
_CP = "context parallelism brings communicators in TransformerEngine that are not rebuilt"
_UNTESTED = "it keeps state between steps, and nobody has shown that a recovery restores it"
_HOOKS = "it switches hooks or a reduction mode on for one step, and an interrupted step leaves them on"
_PROFILER = "it holds a profiler open across steps, and entering train() again would start a second one"
_BATCHES = "the batch size then has a history of its own, and the data cursor is restored without it"

REFUSED: dict[str, Refusal] = {
    # Other owners of recovery
    **_leave_out(_ROAD, "inprocess_restart", "enable_ft_package", "adlr_autoresume"),
    **_use(
        "use 'global', or leave it to the replicas",
        "NVRx local checkpoints bring groups, processes and replicas of their own",
        "non_persistent_ckpt_type",
        one_of("local", "in_memory"),
    ),
    **_leave_out("it replicates NVRx local checkpoints over groups of its own", "replication"),
    **_leave_out(
        "it destroys the process groups in the middle of a step; --exit-signal-handler saves first, and works",
        "exit_signal_handler_for_training",
    ),
    **_leave_out(
        "a fault injector must be started once per job, and a resumed job starts it again",
        "fault_injector_ranks",
        "fault_injector_num_ranks",
        when=GIVEN,
    ),
    **_leave_out("injected errors start reruns", "error_injection_rate", when=above(0)),
    **_use(
        "use validate_results or disabled",
        "the rerun machine then holds a step back to repeat it",
        "rerun_mode",
        one_of("report_stats"),
    ),
    **_leave_out(
        "the rerun machine judges losses and gradients by the largest it has seen, which is not restored",
        "check_for_spiky_loss",
        "check_for_large_grads",
    ),
    # CUDA graphs
    **_use("use --cuda-graph-impl none", _GRAPHS, "cuda_graph_impl", not_one_of("none")),
    **_leave_out(_GRAPHS, "enable_cuda_graph", "external_cuda_graph", "optimizer_cuda_graph"),
    **_use("leave it out", _GRAPHS, "cuda_graph_scope_deprecated", not_one_of("none")),
    # Communicators beside or beneath the process groups
    **_leave_out(_USERBUFFERS, "tp_comm_overlap", "nccl_ub", "use_sharp", "symmetric_ar_type"),
    **_leave_out(_USERBUFFERS, "moe_enable_deepep"),
    **_use("use alltoall or allgather", _USERBUFFERS, "moe_token_dispatcher_type", one_of("flex")),
    **_use("use nccl", _USERBUFFERS, "pipeline_model_parallel_comm_backend", one_of("ucc")),
    **_leave_out(
        "groups are rebuilt without these settings",
        "nccl_communicator_config_path",
        "high_priority_stream_groups",
        "distributed_timeout_seconds_after_init",
    ),
    **_leave_out("it makes a process group that the rebuild does not know", "create_all_gather_group"),
    **_leave_out("its point-to-point calls do not go through a process group", "use_ring_exchange_p2p"),
    **_leave_out("it trains nothing: no process group communicates", "fake_process_group"),
    **_leave_out("process groups are then made by somebody else, later", "lazy_mpu_init"),
    **_leave_out("ranks are placed in an order that node placement does not know", "use_tp_pp_dp_mapping"),
    # Parallelism that is not mapped
    **_leave_out(_CP, "context_parallel_size", when=above(1)),
    **_leave_out(_CP, "hierarchical_context_parallel_sizes", "hybrid_context_parallel", "max_seqlen_per_dp_cp_rank"),
    **_leave_out(_GTP, "tensor_parallel_num_weight_shards", when=exceeds("tensor_model_parallel_size")),
    **_leave_out(_GTP, "expert_tensor_parallel_num_weight_shards", when=exceeds("expert_tensor_parallel_size")),
    **_leave_out(_FSDP, "use_megatron_fsdp", "use_torch_fsdp2", "init_model_with_meta_device"),
    **_leave_out(
        "optimizer state is then replicated over partial groups that the inventory does not know",
        "num_distributed_optimizer_instances",
        when=above(1),
    ),
    **_leave_out(
        "schedule plans hold streams, events and graphs of several microbatches at once",
        "overlap_moe_expert_parallel_comm",
        "delay_wgrad_compute",
        "overlap_dispatch_backward_with_experts_wgrad",
        "moe_shared_expert_overlap",
        "defer_embedding_wgrad_compute",
        "overlap_p2p_comm_warmup_flush",
    ),
    # Optimizers
    **_use(
        "use adam",
        "only Adam's moments are in the inventory; layer-wise optimizers also own parameters by layer",
        "optimizer",
        not_one_of("adam"),
    ),
    **_leave_out(_OFFLOAD, "optimizer_cpu_offload"),
    **_leave_out(
        "moments and masters are then stored scaled or split inside the optimizer",
        "use_precision_aware_optimizer",
    ),
    **_leave_out("parameter gathers are in flight across optimizers", "overlap_param_gather_with_optimizer_step"),
    **_leave_out(
        "gradients are then accumulated in buffers that a resumed step does not clear",
        "ddp_reduce_scatter_with_fp32_accumulation",
        "ddp_param_name_patterns_for_fp32_local_accumulation",
    ),
    **_leave_out("frozen layers have no masters to restore their parameters from", "freeze_all_layers"),
    **_leave_out("weights change after the optimizer step, from logits that are not saved", "qk_clip"),
    **_leave_out(_UNTESTED, "log_max_attention_logit"),
    # Precision
    **_leave_out(
        _FP8,
        "fp8",
        "fp4",
        "fp8_param_gather",
        "fp4_param_gather",
        "reuse_grad_buf_for_mxfp8_param_ag",
        "te_precision_config_file",
        "use_kitchen_attention",
    ),
    **_leave_out(_FP8, "kitchen_config_file", "kitchen_recipe_number", when=GIVEN),
    **_leave_out(
        "its random streams are generator objects, not states",
        "te_rng_tracker",
        "inference_rng_tracker",
    ),
    # Activations off the device
    **_leave_out(_OFFLOAD, "cpu_offloading_num_layers", when=above(0)),
    **_leave_out(_OFFLOAD, "fine_grained_activation_offloading", "moe_paged_stash"),
    # Models with state or parameters that are not mapped
    **_leave_out(_UNTESTED, "moe_router_enable_expert_bias", "moe_enable_routing_replay"),
    **_leave_out(_UNTESTED, "moe_router_quantile_balancing_ema", when=above(0)),
    **_use(
        "use aux_loss, seq_aux_loss, sinkhorn or none",
        _UNTESTED,
        "moe_router_load_balancing_type",
        one_of("global_aux_loss", "quantile_balancing"),
    ),
    **_leave_out(
        "the model then has parameters that nobody has mapped",
        "mtp_num_layers",
        "experimental_attention_variant",
        "is_hybrid_model",
        "hybrid_layer_pattern",
        "hybrid_override_pattern",
        "heterogeneous_layers_config_path",
        "heterogeneous_layers_config_encoded_json",
        "spec",
    ),
    **_use("use local or transformer_engine", _USERBUFFERS, "transformer_impl", one_of("inference_optimized")),
    **_leave_out("experts are then made of a loaded model, and a newcomer loads none", "moe_use_upcycling"),
    **_use("use classify", "its teacher has weights of its own", "vision_pretraining_type", one_of("dino")),
    **_leave_out("options in a file are not checked one by one", "yaml_cfg"),
    # Data
    **_use("use single", "its position cannot be set back", "dataloader_type", not_one_of("single")),
    **_leave_out("its iterators keep positions that cannot be set back", "full_validation"),
    **_leave_out("its iterators keep positions that cannot be set back", "multiple_validation_sets"),
    **_leave_out("its random numbers depend on how many samples the process has read so far", "fim_data"),
    **_leave_out("packed sequences change the batch from step to step", "sft"),
    **_leave_out("the data sets are then exchanged in the middle of a job", "phase_transition_iterations"),
    **_leave_out(_BATCHES, "decrease_batch_size_if_needed"),
    **_use(
        "use --step-batch-size-schedule",
        "Megatron 0.19 ignores it, and the batch would have its full size from the start",
        "rampup_batch_size",
        GIVEN,
    ),
    **_leave_out("it reads or writes logits by a loader of its own", "logits_save_dir", "logits_load_dir"),
    **_leave_out("rollouts, inference engines and their weights live outside the inventory", "perform_rl_step"),
    # Checkpoints
    **_leave_out(
        "a pending save lives in other processes and is waited for by collectives that a newcomer lacks",
        "async_save",
        "use_persistent_ckpt_worker",
    ),
    **_leave_out(
        "the cached save plan is missing on a newcomer, whose collectives would differ",
        "ckpt_assume_constant_structure",
    ),
    **_use("use torch_dist", "saving in it has not been tested", "ckpt_format", not_one_of("torch_dist")),
    **_leave_out("the job ends after converting", "ckpt_convert_format"),
    # Observation
    **_leave_out(
        _HOOKS,
        "save_activations_interval",
        "save_tokens_per_expert_interval",
        "save_wgrads_interval",
        "save_dgrads_interval",
        "moe_routing_trace_path",
    ),
    **_leave_out("its run belongs to the process that opened it, and a newcomer cannot go on with it", "wandb_project"),
    **_leave_out(_PROFILER, "profile", "use_pytorch_profiler", "record_memory_history", "log_energy"),
    **_leave_out(
        "it opens sockets and measures over groups of its own",
        "log_straggler",
        "run_workload_inspector_server",
        "gpu_sniff_test_interval",
    ),
}
"""Refusals by argparse destination."""
