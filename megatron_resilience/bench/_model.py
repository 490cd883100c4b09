"""The models that the benches train on 2 nodes x 2 ranks, and tiny ones for their tests."""

from __future__ import annotations

import shlex
from dataclasses import dataclass

from megatron_resilience.hotswap.flags import under_layout
from megatron_resilience.vps.layout import parse_layout

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

    def argv(self, batch: int, micro_batch: int = 4) -> list[str]:
        """Megatron's command line."""
        return shlex.split(
            f"{_COMMON} --num-layers {self.layers} --hidden-size {self.hidden} --num-attention-heads 8 "
            f"--seq-length {self.sequence} --max-position-embeddings {self.sequence} --vocab-size {self.vocabulary} "
            f"--micro-batch-size {micro_batch} --global-batch-size {batch}"
        )


MODELS = {
    "standard": Model(hidden=384, layers=4, sequence=128, vocabulary=4096, recovery_batch=8, overhead_batch=32),
    "tiny": Model(hidden=64, layers=2, sequence=32, vocabulary=128, recovery_batch=8, overhead_batch=8),
}
"""``standard`` is what figures are quoted of; ``tiny`` shows in a test that a bench works."""


@dataclass(frozen=True)
class Change:
    """A change of layout, and the model that lives through it; 4 ranks before and after.

    Attributes:
        model: sizes; ``parameters`` does not count experts.
        experts: per layer, top 2; 0: dense.
        before, after: layouts.
        batch: sequences per iteration.
        micro_batch: sequences of a microbatch.
        steady: iterations that show how long one takes, before anything is asked for.
    """

    model: Model
    experts: int
    before: str
    after: str
    batch: int
    micro_batch: int
    steady: int

    def argv(self, layout: str) -> list[str]:
        """Megatron's command line under a layout."""
        argv = self.model.argv(self.batch, self.micro_batch)
        if self.experts:
            argv += shlex.split(
                f"--num-experts {self.experts} --moe-router-topk 2 --moe-token-dispatcher-type alltoall "
                "--moe-aux-loss-coeff 1e-2 --disable-bias-linear"
            )
        return under_layout(argv, parse_layout(layout))


_DENSE, _MOE = ("TP2 DP2", "PP2 DP2"), ("EP2 DP4", "PP2 EP2 DP2")
_LARGE = Model(hidden=768, layers=12, sequence=64, vocabulary=8192, recovery_batch=0, overhead_batch=0)
_LARGE_MOE = Model(hidden=512, layers=6, sequence=64, vocabulary=4096, recovery_batch=0, overhead_batch=0)
_SMALL_MOE = Model(hidden=256, layers=4, sequence=128, vocabulary=4096, recovery_batch=0, overhead_batch=0)
CHANGES = {
    "standard": {
        "dense": Change(MODELS["standard"], 0, *_DENSE, batch=8, micro_batch=2, steady=8),
        "moe": Change(_SMALL_MOE, 4, *_MOE, batch=8, micro_batch=2, steady=8),
        "dense_large": Change(_LARGE, 0, *_DENSE, batch=4, micro_batch=1, steady=4),
        "moe_large": Change(_LARGE_MOE, 8, *_MOE, batch=4, micro_batch=1, steady=4),
    },
    "tiny": {
        "dense": Change(MODELS["tiny"], 0, *_DENSE, batch=8, micro_batch=2, steady=3),
        "moe": Change(MODELS["tiny"], 4, *_MOE, batch=8, micro_batch=2, steady=3),
    },
}
"""The bench of changes of layout, by ``--model`` and kind. The large ones train at least 1 GiB of state (12 bytes a parameter:
fp32 masters and two moments), and few tokens, so that an iteration is short."""
