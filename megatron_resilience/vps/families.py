"""Catalogues of model families, written down from a short description instead of an instantiated model.

Names and order are those of Megatron's local transformer spec (``--transformer-impl local``) or of its
TransformerEngine spec, where norms live inside the linear layers and experts are grouped.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import yaml

from megatron_resilience.vps.catalogue import Catalogue, catalogue_from_json
from megatron_resilience.vps.tensors import Cut, Kind, LogicalTensor, Place

CONFIGS = Path(__file__).parents[2] / "configs" / "models"


@dataclass(frozen=True)
class ModelShape:
    """A GPT-like model in the words of Megatron's arguments.

    Attributes:
        query_groups: groups of grouped-query attention; ``heads`` when None.
        head_size: kv_channels; hidden // heads when None.
        learned_positions: rows of a learned position embedding, 0 for RoPE.
        dense_first: layers before the first MoE layer.
        shared_expert_ffn: size of the shared expert, 0 without.
        router_bias: whether routers keep an expert-bias buffer (fp32, not a parameter).
        impl: "local" or "te".
    """

    name: str
    layers: int
    hidden: int
    ffn: int
    heads: int
    vocabulary: int
    query_groups: int | None = None
    head_size: int | None = None
    gated: bool = False
    bias: bool = True
    norm_bias: bool = True
    tied: bool = True
    learned_positions: int = 0
    query_key_norm: bool = False
    experts: int = 0
    expert_ffn: int = 0
    dense_first: int = 0
    shared_expert_ffn: int = 0
    router_bias: bool = False
    dtype: str = "bfloat16"
    impl: str = "local"


def load_model(name_or_file: str) -> Catalogue:
    """The catalogue of a family under ``configs/models`` or of a YAML/JSON file.

    A file holds either the fields of `ModelShape` or a whole catalogue (``tensors``).

    Raises:
        ValueError: no such model or an unknown field, naming those that exist.
    """
    path = Path(name_or_file)
    if not path.is_file():
        path = CONFIGS / f"{name_or_file}.yaml"
    if not path.is_file():
        known = ", ".join(sorted(p.stem for p in CONFIGS.glob("*.yaml")))
        raise ValueError(f"no model {name_or_file!r}: give a file, or one of {known}")
    data: dict[str, Any] = yaml.safe_load(path.read_text())
    if "tensors" in data:
        return catalogue_from_json(data)
    unknown = set(data) - {f.name for f in fields(ModelShape)}
    if unknown:
        raise ValueError(f"{path}: unknown fields {sorted(unknown)}")
    return build_catalogue(ModelShape(**data))


def build_catalogue(shape: ModelShape) -> Catalogue:
    """Write down all logical tensors of ``shape``.

    Raises:
        ValueError: heads are not divisible by query groups.
    """
    groups = shape.query_groups or shape.heads
    if shape.heads % groups:
        raise ValueError(f"{shape.name}: {shape.heads} heads are not divisible by {groups} query groups")
    tensors = list(_embedding(shape))
    for layer in range(shape.layers):
        tensors += _layer(shape, layer, groups)
    tensors += _norm(shape, "decoder.final_layernorm", Place.LAST, -1)
    if not shape.tied:
        tensors.append(_vocabulary(shape, "output_layer.weight", Place.LAST))
    return Catalogue(shape.name, shape.layers, shape.experts, tuple(tensors))


def _vocabulary(shape: ModelShape, name: str, place: Place) -> LogicalTensor:
    cut = Cut(0, (shape.vocabulary,), padded=True, dimension="vocabulary rows")
    return LogicalTensor(name, (shape.vocabulary, shape.hidden), shape.dtype, place=place, cut=cut)


def _embedding(shape: ModelShape) -> Iterator[LogicalTensor]:
    place = Place.TIED if shape.tied else Place.FIRST
    yield _vocabulary(shape, "embedding.word_embeddings.weight", place)
    if shape.learned_positions:
        size = (shape.learned_positions, shape.hidden)
        yield LogicalTensor("embedding.position_embeddings.weight", size, shape.dtype, place=Place.FIRST)


def _norm(shape: ModelShape, name: str, place: Place, layer: int, joint: str = ".") -> list[LogicalTensor]:
    parts = ("weight", "bias") if shape.norm_bias else ("weight",)
    return [
        LogicalTensor(f"{name}{joint}{part}", (shape.hidden,), shape.dtype, place=place, layer=layer) for part in parts
    ]


def _linear(
    shape: ModelShape,
    name: str,
    size: tuple[int, int],
    cut: Cut,
    layer: int,
    expert: int = -1,
    bias: bool = True,
) -> list[LogicalTensor]:
    """Weight and bias of a linear layer; a row-parallel bias (weight cut along axis 1) is replicated."""
    common: dict[str, Any] = {"dtype": shape.dtype, "layer": layer, "expert": expert}
    out = [LogicalTensor(f"{name}.weight", size, cut=cut, **common)]
    if bias and shape.bias:
        out.append(LogicalTensor(f"{name}.bias", size[:1], cut=cut if cut.axis == 0 else None, **common))
    return out


def _layer(shape: ModelShape, layer: int, groups: int) -> list[LogicalTensor]:
    prefix = f"decoder.layers.{layer}"
    head = shape.head_size or shape.hidden // shape.heads
    per_group = (shape.heads // groups + 2) * head
    qkv = Cut(0, (groups * per_group,), unit=per_group, dimension="query groups")
    proj = Cut(1, (shape.heads * head,), unit=head, dimension="attention heads")
    local = shape.impl == "local"
    attention = f"{prefix}.self_attention"
    out: list[LogicalTensor] = []
    if local:
        out += _norm(shape, f"{prefix}.input_layernorm", Place.LAYER, layer)
    out += _linear(shape, f"{attention}.linear_proj", (shape.hidden, shape.heads * head), proj, layer)
    if not local:
        out += _norm(shape, f"{attention}.linear_qkv", Place.LAYER, layer, ".layer_norm_")
    out += _linear(shape, f"{attention}.linear_qkv", (groups * per_group, shape.hidden), qkv, layer)
    if shape.query_key_norm:
        for part in ("q", "k"):
            name = f"{attention}.{part}_layernorm.weight"
            out.append(LogicalTensor(name, (head,), shape.dtype, layer=layer))
    moe = shape.experts > 0 and layer >= shape.dense_first
    if local or moe:
        out += _norm(shape, f"{prefix}.pre_mlp_layernorm", Place.LAYER, layer)
    if not moe:
        if not local:
            out += _norm(shape, f"{prefix}.mlp.linear_fc1", Place.LAYER, layer, ".layer_norm_")
        return out + _mlp(shape, f"{prefix}.mlp", shape.ffn, layer)
    return out + _moe(shape, f"{prefix}.mlp", layer)


def _mlp(shape: ModelShape, name: str, ffn: int, layer: int, expert: int = -1) -> list[LogicalTensor]:
    wide = (ffn, ffn) if shape.gated else (ffn,)
    fc1 = Cut(0, wide, dimension="FFN rows")
    fc2 = Cut(1, (ffn,), dimension="FFN columns")
    return [
        *_linear(shape, f"{name}.linear_fc1", (sum(wide), shape.hidden), fc1, layer, expert),
        *_linear(shape, f"{name}.linear_fc2", (shape.hidden, ffn), fc2, layer, expert),
    ]


def _moe(shape: ModelShape, name: str, layer: int) -> list[LogicalTensor]:
    out = [
        LogicalTensor(f"{name}.router.weight", (shape.experts, shape.hidden), shape.dtype, layer=layer),
    ]
    if shape.router_bias:
        bias = f"{name}.router.expert_bias"
        out.append(LogicalTensor(bias, (shape.experts,), "float32", Kind.BUFFER, layer=layer))
    experts = [
        _mlp(shape, f"{name}.experts.local_experts.{expert}", shape.expert_ffn, layer, expert)
        for expert in range(shape.experts)
    ]
    if shape.impl == "te":
        # Grouped: all first linears, then all second ones.
        out += [tensor for column in zip(*experts, strict=True) for tensor in column]
    else:
        out += [tensor for row in experts for tensor in row]
    if shape.shared_expert_ffn:
        out += _mlp(shape, f"{name}.shared_experts", shape.shared_expert_ffn, layer)
    return out
