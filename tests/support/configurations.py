"""The tiny models that all end-to-end tests train. An iteration takes 50-250 ms on two cores."""

from __future__ import annotations

from dataclasses import dataclass

_BASE = """
--mock-data --tokenizer-type NullTokenizer --vocab-size 128 --make-vocab-size-divisible-by 1 --split 100,0,0
--transformer-impl local --attention-backend unfused --distributed-backend gloo --use-distributed-optimizer
--no-gradient-accumulation-fusion --no-persist-layer-norm --no-masked-softmax-fusion --num-workers 0
--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32
--micro-batch-size 2 --global-batch-size 8 --train-iters 5 --eval-iters 0 --eval-interval 1000
--lr 1e-3 --lr-decay-style constant --log-interval 1 --seed 1234
"""
_NO_DROPOUT = "--attention-dropout 0 --hidden-dropout 0"
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


def _configuration(world_size: int, *options: str) -> Configuration:
    return Configuration(world_size, tuple(" ".join((_BASE, *options)).split()))


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
    "dropout_tp2": _configuration(2, "--tensor-model-parallel-size 2 --attention-dropout 0.1 --hidden-dropout 0.1"),
}
