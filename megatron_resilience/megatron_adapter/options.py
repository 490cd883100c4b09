"""Which of Megatron 0.19's command-line options a protected job may use.

Every option of Megatron's parser is in exactly one class:

* ``neutral``: it holds no communicator, device pointer or state that outlives a step, or it acts only
  together with an option that is refused (``options_neutral.py``);
* ``known``: it decides what communicators, buffers or state there are, and training with it is tested
  (``KNOWN`` below);
* ``refused``: some of its values bring communicators, device pointers or state that nobody has shown to
  survive a recovery (``options_refused.py``).

Whatever is doubtful is refused: a job that stops at start costs less than one that trains wrongly.
"""

from __future__ import annotations

import argparse
from typing import Literal

from megatron_resilience.megatron_adapter.options_neutral import NEUTRAL
from megatron_resilience.megatron_adapter.options_refused import REFUSED

OptionClass = Literal["neutral", "known", "refused"]

KNOWN = frozenset(
    {
        "accumulate_allreduce_grads_in_fp32",
        "align_grad_reduce",
        "attention_dropout",
        "bf16",
        "ddp_bucket_size",
        "ddp_num_buckets",
        "exit_signal_handler",
        "expert_model_parallel_size",
        "expert_tensor_parallel_size",
        "fp16",
        "hidden_dropout",
        "load",
        "num_experts",
        "num_virtual_stages_per_pipeline_rank",
        "overlap_grad_reduce",
        "overlap_param_gather",
        "pipeline_model_parallel_size",
        "recompute_granularity",
        "sequence_parallel",
        "step_batch_size_schedule",
        "tensorboard_dir",
        "tensor_model_parallel_size",
        "untie_embeddings_and_output_weights",
        "use_distributed_optimizer",
    }
)
"""By argparse destination; each is used by a configuration of the end-to-end tests."""

OPTIONAL = frozenset({"kitchen_config_file", "kitchen_recipe_number"})
"""Destinations that a parser has only where an optional package is installed."""


def classify(dest: str) -> OptionClass | None:
    """The class of the option with that argparse destination; None if nobody has classified it."""
    if dest in REFUSED:
        return "refused"
    if dest in KNOWN:
        return "known"
    if dest in NEUTRAL:
        return "neutral"
    return None


def refusals(args: argparse.Namespace) -> list[str]:
    """Why a job with these arguments cannot be protected; empty if it can.

    Args:
        args: Megatron's, parsed, validated or not.

    Returns:
        one sentence per offending option: its name and value, the reason, the remedy.
    """
    found = []
    for dest, refusal in REFUSED.items():
        # Some options exist only where an optional package is installed.
        value = getattr(args, dest, None)
        if refusal.when.holds(value, args):
            shown = "" if value is True else f" {value}"
            found.append(f"{refusal.flag}{shown}: {refusal.reason}; {refusal.remedy}")
    return found
