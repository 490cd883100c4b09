"""The training script's arguments under another layout. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_resilience.vps.layout import Layout

_FLAGS = (
    "--tensor-model-parallel-size",
    "--pipeline-model-parallel-size",
    "--context-parallel-size",
    "--expert-model-parallel-size",
    "--expert-tensor-parallel-size",
    "--num-virtual-stages-per-pipeline-rank",
    "--num-layers-per-virtual-pipeline-stage",
    "--decoder-first-pipeline-num-layers",
    "--decoder-last-pipeline-num-layers",
)
"""Megatron's options that say what a `Layout` says; each takes one value."""


def under_layout(argv: Sequence[str], layout: Layout) -> list[str]:
    """``argv`` with its layout replaced; everything else stays, in its order.

    Args:
        argv: the training script's arguments, without the script.
        layout: sizes and stages; settings of buffers and the numbering of ranks are not changed.
    """
    result, skip = [], False
    for word in argv:
        if skip:
            skip = False
        elif word in _FLAGS:
            skip = True
        elif word.partition("=")[0] not in _FLAGS:
            result.append(word)
    values = {
        "--tensor-model-parallel-size": layout.tp,
        "--pipeline-model-parallel-size": layout.pp,
        "--context-parallel-size": layout.cp,
        "--expert-model-parallel-size": layout.ep,
        "--expert-tensor-parallel-size": layout.etp,
        "--num-virtual-stages-per-pipeline-rank": layout.vpp if layout.vpp > 1 else None,
        "--decoder-first-pipeline-num-layers": layout.first_stage_layers,
        "--decoder-last-pipeline-num-layers": layout.last_stage_layers,
    }
    for flag, value in values.items():
        if value is not None:
            result += [flag, str(value)]
    return result
