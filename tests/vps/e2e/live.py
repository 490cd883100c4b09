"""Build one rank's Megatron model and optimizer on torch's fake backend, rank after rank, and compare.

Run as a program: ``python live.py NAME``. The layout of a rank's buffers depends on group sizes and the rank, not
on other processes, so every rank of a configuration is checked in this one.
"""

import sys
from dataclasses import replace

from megatron_resilience.accelerator import select

select("cpu").install()

import torch  # noqa: E402
from megatron.core import parallel_state  # noqa: E402
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig  # noqa: E402
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import (  # noqa: E402
    get_gpt_decoder_block_spec,
    get_gpt_layer_local_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # noqa: E402
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed  # noqa: E402
from megatron.core.transformer import TransformerConfig  # noqa: E402
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402

from megatron_resilience.megatron_adapter import catalogue as adapter  # noqa: E402
from megatron_resilience.vps.families import build_catalogue  # noqa: E402
from megatron_resilience.vps.layout import ORDER_PP_BEFORE_DP, Layout  # noqa: E402
from megatron_resilience.vps.space import StateSpace  # noqa: E402

BUCKETS = {"overlap_grad_reduce": True, "bucket_size": 3000}
DENSE = [
    Layout(),
    Layout(dp=3, **BUCKETS),
    Layout(dp=4, overlap_grad_reduce=True),
    Layout(tp=2, dp=2, **BUCKETS),
    Layout(pp=2, dp=2, **BUCKETS),
    Layout(tp=2, pp=2, dp=2, vpp=2, **BUCKETS),
    Layout(pp=4, dp=2),
    Layout(pp=3, dp=2, first_stage_layers=1, last_stage_layers=1),
    Layout(tp=2, pp=2, dp=2, order=ORDER_PP_BEFORE_DP, **BUCKETS),
    Layout(dp=2, pad_for_busbw=True, **BUCKETS),
    Layout(tp=2, cp=2, dp=2, **BUCKETS),
    Layout(pp=2, cp=3, dp=2),
]
MOE = [
    Layout(tp=1, dp=2),
    Layout(dp=2, ep=2, **BUCKETS),
    Layout(dp=4, ep=4),
    Layout(dp=4, ep=2, pp=2, **BUCKETS),
    Layout(tp=2, dp=4, ep=2, **BUCKETS),
    Layout(tp=2, dp=2, ep=4, etp=1),
    Layout(tp=2, dp=4, ep=2, etp=1, pp=2, vpp=2, **BUCKETS),
    Layout(tp=2, dp=2, etp=1),
    Layout(tp=2, cp=2, dp=2, ep=4, etp=1, **BUCKETS),
]
MTP = [
    Layout(dp=2, **BUCKETS),
    Layout(tp=2, pp=2, dp=2, **BUCKETS),
    Layout(pp=2, dp=2, vpp=2, ep=2, **BUCKETS),
    Layout(pp=3, dp=2, first_stage_layers=2, last_stage_layers=1),
    Layout(tp=2, pp=4, dp=2, ep=2, etp=1),
]
BASE = {"transformer_impl": "local",
    "num_layers": 4, "hidden_size": 16, "num_attention_heads": 4, "use_cpu_initialization": True,
    "hidden_dropout": 0.0, "attention_dropout": 0.0, "bf16": True, "params_dtype": torch.bfloat16,
    "pipeline_dtype": torch.bfloat16,
}  # fmt: skip
LLAMA = {
    "gated_linear_unit": True, "num_query_groups": 2, "normalization": "RMSNorm", "add_bias_linear": False,
    "activation_func": torch.nn.functional.silu,
}  # fmt: skip
MIXED = LLAMA | {
    "num_moe_experts": 4, "moe_ffn_hidden_size": 24, "moe_layer_freq": [0, 1, 1, 1], "moe_router_topk": 2,
    "moe_shared_expert_intermediate_size": 12, "moe_router_load_balancing_type": "aux_loss",
    "moe_token_dispatcher_type": "alltoall",
}  # fmt: skip
FAMILIES = {
    "gpt": (DENSE, BASE, {"tied": True, "positions": "learned_absolute"}),
    "gpt-fp32": (
        DENSE[:5],
        BASE | {"bf16": False, "params_dtype": torch.float32, "pipeline_dtype": torch.float32},
        {"tied": True, "positions": "learned_absolute"},
    ),
    "llama": (DENSE, BASE | LLAMA, {"tied": False, "positions": "rope"}),
    "mtp": (MTP, BASE | MIXED | {"mtp_num_layers": 2}, {"tied": False, "positions": "rope"}),
    "moe": (MOE, BASE | MIXED, {"tied": False, "positions": "rope"}),
}
VOCABULARY = 61


def check(layout, rank, settings, model_settings):
    """Compare one rank; returns (parameters compared by place, by label)."""
    layout = replace(layout, vocabulary_multiple=4)
    torch.distributed.init_process_group("fake", rank=rank, world_size=layout.world, store=FakeStore())
    parallel_state.initialize_model_parallel(
        layout.tp, layout.pp, layout.vpp if layout.vpp > 1 else None,
        context_parallel_size=layout.cp, expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp, order=layout.order, create_gloo_process_groups=False,
    )  # fmt: skip
    model_parallel_cuda_manual_seed(1)
    config = TransformerConfig(
        **settings, tensor_model_parallel_size=layout.tp, pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
        expert_model_parallel_size=layout.ep, expert_tensor_parallel_size=layout.expert_tp,
        sequence_parallel=layout.tp > 1 and "num_moe_experts" in settings,
        num_layers_in_first_pipeline_stage=layout.first_stage_layers,
        num_layers_in_last_pipeline_stage=layout.last_stage_layers,
    )  # fmt: skip
    multiple = layout.vocabulary_multiple * layout.tp
    padded = -(-VOCABULARY // multiple) * multiple
    first, last = parallel_state.is_pipeline_first_stage, parallel_state.is_pipeline_last_stage
    models = []
    for chunk in range(layout.vpp):
        stage = chunk if layout.vpp > 1 else None
        if config.num_moe_experts:
            spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, vp_stage=stage)
        else:
            spec = get_gpt_layer_local_spec(normalization=config.normalization)
        mtp = None
        if config.mtp_num_layers:
            mtp = get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False, vp_stage=stage)
        where = {"ignore_virtual": False, "vp_stage": stage} if stage is not None else {}
        models.append(GPTModel(
            config, spec, padded, 8, pre_process=first(**where), post_process=last(**where),
            share_embeddings_and_output_weights=model_settings["tied"],
            position_embedding_type=model_settings["positions"], vp_stage=stage, mtp_block_spec=mtp,
        ).to(config.params_dtype))  # fmt: skip
    buckets = layout.bucket_size or max(40_000_000, 1_000_000 * layout.dp * layout.cp)
    ddp = DistributedDataParallelConfig(
        use_distributed_optimizer=True, overlap_grad_reduce=layout.overlap_grad_reduce,
        grad_reduce_in_fp32=True, bucket_size=buckets, pad_buckets_for_high_nccl_busbw=layout.pad_for_busbw,
    )  # fmt: skip
    chunks = [DistributedDataParallel(config, ddp, m, disable_bucketing=i > 0) for i, m in enumerate(models)]
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam", lr=1e-3, bf16=config.bf16, params_dtype=config.params_dtype,
            use_distributed_optimizer=True,
        ),
        chunks, use_gloo_process_groups=False,
    )  # fmt: skip
    positions = 8 if model_settings["positions"] == "learned_absolute" else 0
    shape = adapter.shape_of(config, "live", VOCABULARY, model_settings["tied"], positions)
    space = StateSpace(build_catalogue(shape), layout)
    if "--names" in sys.argv:
        print([[n for n, _ in adapter.logical_names(c, 0)] for c in chunks])
    by_place = adapter.compare_flat_layout(space, rank, chunks, optimizer)
    by_label = adapter.compare_sharding(space, rank, chunks)
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()
    return by_place, by_label


def main(name):
    """Check all layouts of a family on every rank, printing a line per layout."""
    layouts, settings, model_settings = FAMILIES[name]
    for layout in layouts:
        counts = [check(layout, rank, settings, model_settings) for rank in range(layout.world)]
        places, labels = (sum(column) for column in zip(*counts, strict=True))
        print(
            f"{name} {layout}: {layout.world} ranks, {places} parameters by place, {labels} by label",
            flush=True,
        )
        assert places and labels


if __name__ == "__main__":
    main(sys.argv[1])
