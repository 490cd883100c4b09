"""The tiny models that all end-to-end tests train. An iteration takes 50-250 ms on two cores."""

from __future__ import annotations

import shlex
from dataclasses import dataclass

_BASE = """
--mock-data --tokenizer-type NullTokenizer --vocab-size 128 --make-vocab-size-divisible-by 1 --split 100,0,0
--transformer-impl local --attention-backend unfused --distributed-backend gloo
--no-gradient-accumulation-fusion --no-persist-layer-norm --no-masked-softmax-fusion --num-workers 0
--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32
--micro-batch-size 2 --train-iters 5 --eval-iters 0 --eval-interval 1000
--lr 1e-3 --lr-decay-style constant --log-interval 1 --seed 1234
"""
_NO_DROPOUT = "--attention-dropout 0 --hidden-dropout 0"
_DROPOUT = "--attention-dropout 0.1 --hidden-dropout 0.1"
_LLAMA = """
--swiglu --position-embedding-type rope --no-rope-fusion --group-query-attention --num-query-groups 2
--normalization RMSNorm --disable-bias-linear --untie-embeddings-and-output-weights
"""
# Several buckets in a model this small.
_OVERLAP = "--overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 5000"
_MOE = """
--num-experts 4 --moe-router-topk 2 --moe-token-dispatcher-type alltoall --moe-aux-loss-coeff 1e-2
--swiglu --disable-bias-linear
"""


@dataclass(frozen=True)
class Configuration:
    """Megatron's command line for examples/train_gpt.py, and the number of ranks it is for."""

    world_size: int
    argv: tuple[str, ...]


def _configuration(
    world_size: int,
    *options: str,
    optimizer: str = "--use-distributed-optimizer",
    batch: str = "--global-batch-size 8",
) -> Configuration:
    return Configuration(world_size, tuple(shlex.split(" ".join((_BASE, optimizer, batch, *options)))))


CONFIGURATIONS: dict[str, Configuration] = {
    "tp2_dp2_fp32": _configuration(4, "--tensor-model-parallel-size 2", _NO_DROPOUT),
    "tp2_dp2_bf16_overlap": _configuration(4, "--tensor-model-parallel-size 2 --bf16", _OVERLAP, _NO_DROPOUT),
    # Embedding and output weight are tied by default, across the first and the last stage.
    "pp2_dp2_tied": _configuration(4, "--pipeline-model-parallel-size 2", _NO_DROPOUT),
    "llama_tp2_sp": _configuration(2, "--tensor-model-parallel-size 2 --sequence-parallel", _LLAMA, _NO_DROPOUT),
    "moe_ep2": _configuration(2, "--expert-model-parallel-size 2", _MOE, _NO_DROPOUT),
    "moe_tp2_ep2_sp": _configuration(
        4,
        "--tensor-model-parallel-size 2 --sequence-parallel --expert-model-parallel-size 2",
        "--expert-tensor-parallel-size 2",
        _MOE,
        _NO_DROPOUT,
    ),
    "pp2_vpp2_dp2_bf16": _configuration(
        4,
        "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 --num-layers 4 --bf16",
        "--accumulate-allreduce-grads-in-fp32 --overlap-grad-reduce --overlap-param-gather",
        "--ddp-num-buckets 3 --no-align-grad-reduce --recompute-granularity selective",
        _NO_DROPOUT,
    ),
    "dropout_tp2": _configuration(2, "--tensor-model-parallel-size 2", _DROPOUT),
    "dp4": _configuration(4, _NO_DROPOUT),
    # Without sequence parallelism the dropout of TP-replicated activations draws from a stream that all of TP share.
    "tp2_dp2_dropout": _configuration(4, "--tensor-model-parallel-size 2", _DROPOUT),
    "pp2_vpp2_dp2_aligned": _configuration(
        4,
        "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 --num-layers 4 --bf16",
        "--accumulate-allreduce-grads-in-fp32 --overlap-grad-reduce --overlap-param-gather --ddp-num-buckets 3",
        _NO_DROPOUT,
    ),
    "tp2_pp2_dp1": _configuration(4, "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2", _NO_DROPOUT),
    "moe_ep2_dp4": _configuration(4, "--expert-model-parallel-size 2", _MOE, _NO_DROPOUT),
    "llama_tp2_sp_recompute": _configuration(
        4,
        "--tensor-model-parallel-size 2 --sequence-parallel --bf16 --recompute-granularity full",
        "--recompute-method uniform --recompute-num-layers 1",
        _LLAMA,
        _DROPOUT,
    ),
    "no_distributed_optimizer": _configuration(4, "--tensor-model-parallel-size 2 --bf16", _NO_DROPOUT, optimizer=""),
    # The first scales overflow: steps are skipped until the scale has come down, and again when it has grown.
    "fp16": _configuration(
        4, "--tensor-model-parallel-size 2 --fp16 --initial-loss-scale 6e5 --loss-scale-window 2", _NO_DROPOUT
    ),
    "batch_rampup": _configuration(
        4,
        # From 1, 3 and 5 times 128 tokens on: samples have 32.
        "--tensor-model-parallel-size 2",
        _NO_DROPOUT,
        batch="--step-batch-size-schedule '0:4 384:8 640:12'",
    ),
}
