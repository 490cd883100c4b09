"""Which of Megatron's command-line options a protected job may use.

Every option of Megatron 0.19's parser is in exactly one class (``options_older.py`` adds those that only older releases have):

* ``neutral``: it holds no communicator, device pointer or state that outlives a step, or it acts only
  together with an option that is refused (``options_neutral.py``);
* ``known``: it decides what communicators, buffers or state there are, and training with it is tested
  (``KNOWN`` below);
* ``refused``: some of its values bring communicators, device pointers or state that nobody has shown to
  survive a recovery (``options_refused.py``).

Whatever is doubtful is refused, and so is an option that nobody has classified (of a release newer than those that were
looked at), if it is used: a job that stops at start costs less than one that trains wrongly.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from typing import Literal

from megatron_resilience.megatron_adapter import options_older as older
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
    if dest in REFUSED or dest in older.REFUSED:
        return "refused"
    if dest in KNOWN:
        return "known"
    if dest in NEUTRAL or dest in older.NEUTRAL:
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
    for dest, refusal in (REFUSED | older.REFUSED).items():
        # Some options exist only where an optional package is installed.
        value = getattr(args, dest, None)
        if refusal.when.holds(value, args):
            shown = "" if value is True else f" {value}"
            found.append(f"{refusal.flag}{shown}: {refusal.reason}; {refusal.remedy}")
    return found


def unclassified(args: argparse.Namespace, actions: Iterable[argparse.Action], release: str) -> list[str]:
    """What was asked for by options that nobody has classified; empty if all is known.

    Args:
        args: parsed.
        actions: Megatron's own options, as its parser has them.
        release: of Megatron, for the message.
    """
    return [
        f"{(action.option_strings or [action.dest])[0]}: nobody has looked at what this option of megatron-core {release} does "
        "to a recovery; leave it out, or use a release that docs/compatibility.md lists"
        for action in actions
        if classify(action.dest) is None and getattr(args, action.dest, action.default) != action.default
    ]
