"""Which pipeline stage and model chunk builds which layer.

Mirrors ``get_num_layers_to_build`` (megatron/core/transformer/transformer_block.py) and
``get_transformer_layer_offset`` (transformer_layer.py) of megatron-core 0.19.
"""

from __future__ import annotations

from megatron_resilience.vps.layout import Layout
from megatron_resilience.vps.tensors import nearest_divisors


def stage_of_layers(layers: int, layout: Layout) -> list[tuple[int, int]]:
    """(pipeline rank, model chunk) of each layer, in the order of layers.

    Raises:
        ValueError: the layers do not fit the stages; names PP or VPP and the nearest sizes that fit.
    """
    per_rank = _layers_per_rank(layers, layout)
    chunks = [[count // layout.vpp] * layout.vpp for count in per_rank]
    if layout.count_embedding:
        chunks[0][0] -= 1
    if layout.count_loss:
        chunks[-1][-1] -= 1
    if min(map(min, chunks)) < 0:
        raise ValueError(f"PP={layout.pp} VPP={layout.vpp}: a stage would have fewer than 0 of {layers} layers")
    return [(pp, chunk) for chunk in range(layout.vpp) for pp in range(layout.pp) for _ in range(chunks[pp][chunk])]


def _layers_per_rank(layers: int, layout: Layout) -> list[int]:
    first, last = layout.first_stage_layers, layout.last_stage_layers
    if first is not None or last is not None:
        if layout.count_embedding or layout.count_loss:
            raise ValueError("uneven first or last stage: the embedding and loss cannot be counted as layers")
        middle = layout.pp - (first is not None) - (last is not None)
        rest = layers - (first or 0) - (last or 0)
        if middle < 0 or rest < 0 or (rest % middle if middle else rest):
            raise ValueError(
                f"PP={layout.pp}: {rest} layers are left for {middle} middle stages of {layers} layers; "
                f"change the layers of the first or last stage"
            )
        counts = [rest // middle if middle else 0] * layout.pp
        if first is not None:
            counts[0] = first
        if last is not None:
            counts[-1] = last
    else:
        total = layers + layout.count_embedding + layout.count_loss
        if total % layout.pp:
            if total < layout.pp:
                raise ValueError(f"PP={layout.pp} has more stages than the model has layers ({total})")
            raise ValueError(
                f"PP={layout.pp} does not divide the {total} layers; nearest PP that do: "
                f"{nearest_divisors(total, layout.pp)}, or give the layers of the first and last stage"
            )
        counts = [total // layout.pp] * layout.pp
    for count in counts:
        if count % layout.vpp:
            raise ValueError(
                f"VPP={layout.vpp} does not divide the {count} layers of a stage; nearest VPP that do: "
                f"{nearest_divisors(count, layout.vpp)}"
            )
    return counts
