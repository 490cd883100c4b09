"""The model that the benches train: TP2 x DP2 on 2 nodes x 2 ranks, and a tiny one for their tests."""

from __future__ import annotations

import shlex
from dataclasses import dataclass

NODES, SPARES, RANKS_PER_NODE = 2, 1, 2
WORLD_SIZE = NODES * RANKS_PER_NODE

_COMMON = """
--mock-data --tokenizer-type NullTokenizer --make-vocab-size-divisible-by 1 --split 100,0,0 --num-workers 0
--transformer-impl local --attention-backend unfused --distributed-backend gloo
--no-gradient-accumulation-fusion --no-persist-layer-norm --no-masked-softmax-fusion
--tensor-model-parallel-size 2 --use-distributed-optimizer --attention-dropout 0 --hidden-dropout 0
--eval-iters 0 --eval-interval 1000000 --lr 1e-4 --lr-decay-style constant --log-interval 1 --seed 1234
--train-iters 100000
"""


@dataclass(frozen=True)
class Model:
    """Megatron's options for a size.

    Attributes:
        parameters: how many it has, both tensor-parallel halves together.
        options: of the architecture.
        recovery_batch: sequences per iteration in the bench of recovery.
        overhead_batch: the same in the bench of overhead; more, so that an iteration takes 1 to 4 s on 2 cores.
    """

    hidden: int
    layers: int
    sequence: int
    vocabulary: int
    recovery_batch: int
    overhead_batch: int

    @property
    def parameters(self) -> int:
        """Elements of all weights, biases and norms (GPT-2's architecture, tied embeddings)."""
        layer = 12 * self.hidden**2 + 13 * self.hidden
        return self.layers * layer + (self.vocabulary + self.sequence + 2) * self.hidden

    def argv(self, batch: int) -> list[str]:
        """Megatron's command line."""
        return shlex.split(
            f"{_COMMON} --num-layers {self.layers} --hidden-size {self.hidden} --num-attention-heads 8 "
            f"--seq-length {self.sequence} --max-position-embeddings {self.sequence} --vocab-size {self.vocabulary} "
            f"--micro-batch-size 4 --global-batch-size {batch}"
        )


MODELS = {
    "standard": Model(hidden=384, layers=4, sequence=128, vocabulary=4096, recovery_batch=8, overhead_batch=32),
    "tiny": Model(hidden=64, layers=2, sequence=32, vocabulary=128, recovery_batch=8, overhead_batch=8),
}
"""``standard`` is what figures are quoted of; ``tiny`` shows in a test that a bench works."""
