import megatron_resilience.autoload  # noqa: F401, I001

# Pretrains a GPT with Megatron's own training loop: dense, llama-like or mixture of experts. Megatron's
# command line decides everything; --trace-dir DIR is the only option added. Mock data, or .bin/.idx files
# by --data-path. Runs under plain torchrun:
#
#     torchrun --nproc-per-node 4 examples/train_gpt.py --tensor-model-parallel-size 2 ...

from functools import partial

import torch
from megatron.core import mpu
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.enums import ModelType
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.core.utils import get_attr_wrapped_model, get_batch_on_this_tp_rank
from megatron.training import get_args, pretrain
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args
from megatron.training.utils import get_blend_and_blend_per_split, is_first_or_last_pipeline_stage


def add_options(parser):
    """The script's own options."""
    group = parser.add_argument_group(title="train_gpt")
    group.add_argument(
        "--trace-dir",
        metavar="DIR",
        help="append loss, gradient norm and sample digests of every step to DIR/rank{r}.jsonl, exactly",
    )
    return parser


def get_batch(data_iterator, vp_stage):
    """This rank's microbatch; tensor-parallel rank 0 draws it, the others receive it."""
    args = get_args()
    if not is_first_or_last_pipeline_stage(vp_stage):
        return dict.fromkeys(("tokens", "labels", "loss_mask", "attention_mask", "position_ids"))
    batch = {}
    if mpu.get_tensor_model_parallel_rank() == 0:
        batch = {name: tensor.cuda(non_blocking=True) for name, tensor in next(data_iterator).items()}
    return get_batch_on_this_tp_rank(
        batch,
        has_cu_seqlens=False,
        is_hybrid_cp=False,
        create_attention_mask_in_dataloader=args.create_attention_mask_in_dataloader,
        broadcast_src_rank=mpu.get_tensor_model_parallel_src_rank(),
        broadcast_group=mpu.get_tensor_model_parallel_group(),
        cp_size=1,
        tp_rank=mpu.get_tensor_model_parallel_rank(),
        micro_batch_size=args.micro_batch_size,
        seq_length=args.seq_length,
        mtp_on_this_rank=False,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        is_pipeline_first_stage=mpu.is_pipeline_first_stage(ignore_virtual=vp_stage is None, vp_stage=vp_stage),
        is_pipeline_last_stage=mpu.is_pipeline_last_stage(ignore_virtual=vp_stage is None, vp_stage=vp_stage),
    )


def loss_func(loss_mask, output):
    """Sum of the token losses, the number of tokens, and both for Megatron to average over DP."""
    mask = loss_mask.view(-1).float()
    loss = torch.sum(output.view(-1).float() * mask)
    tokens = mask.sum().detach().to(torch.int)
    return loss, tokens, {"lm loss": torch.cat([loss.detach().view(1), tokens.view(1)])}


def forward_step(data_iterator, model):
    """One microbatch forward."""
    batch = get_batch(data_iterator, get_attr_wrapped_model(model, "vp_stage"))
    output = model(batch["tokens"], batch["position_ids"], batch["attention_mask"], labels=batch["labels"])
    return output, partial(loss_func, batch["loss_mask"])


def datasets(num_samples, vp_stage=None):
    """Training, validation and test sets of ``num_samples`` samples each."""
    args = get_args()
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=blend_per_split,
        split=args.split,
        path_to_cache=args.data_cache_path,
        mmap_bin_files=args.mmap_bin_files,
        tokenizer=build_tokenizer(args),
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=args.create_attention_mask_in_dataloader,
    )

    def is_built_on_rank():
        return is_first_or_last_pipeline_stage(vp_stage) and mpu.get_tensor_model_parallel_rank() == 0

    kind = MockGPTDataset if args.mock_data else GPTDataset
    return BlendedMegatronDatasetBuilder(kind, num_samples, is_built_on_rank, config).build()


datasets.is_distributed = True


def main():
    """Parses Megatron's command line and trains."""
    args = parse_and_validate_args(extra_args_provider=add_options)
    if args.trace_dir:
        from megatron_resilience.megatron_adapter import trace

        trace.install(args.trace_dir)
    config = pretrain_cfg_container_from_args(args, gpt_config_from_args(args))
    pretrain(config, datasets, ModelType.encoder_or_decoder, forward_step)


if __name__ == "__main__":
    main()
