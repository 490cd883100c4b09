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

from megatron_resilience.files import folder
from megatron_resilience.vps.catalogue import Catalogue, catalogue_from_json
from megatron_resilience.vps.tensors import Cut, Kind, LogicalTensor, Place

CONFIGS = folder("configs") / "models"


@dataclass(frozen=True)
class ModelShape:
    """A GPT-like model in the words of Megatron's arguments.

    Attributes:
        query_groups: groups of grouped-query attention; ``heads`` when None.
        head_size: kv_channels; hidden // heads when None.
        learned_positions: rows of a learned position embedding, 0 for RoPE.
        dense_first: layers before the first MoE layer.
        moe_pattern: per layer 1 for MoE and 0 for dense, instead of ``dense_first``.
        mtp: multi-token prediction layers; they are of the kind of the last layer.
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
    moe_pattern: tuple[int, ...] | None = None
    mtp: int = 0
    shared_expert_ffn: int = 0
    router_bias: bool = False
    dtype: str = "bfloat16"
    impl: str = "local"

    def is_moe(self, layer: int) -> bool:
        """Whether a layer has experts."""
        if self.moe_pattern is not None:
            return self.experts > 0 and bool(self.moe_pattern[layer])
        return self.experts > 0 and layer >= self.dense_first


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
    if data.get("moe_pattern") is not None:
        data["moe_pattern"] = tuple(data["moe_pattern"])
    return build_catalogue(ModelShape(**data))


def build_catalogue(shape: ModelShape) -> Catalogue:
    """Write down all logical tensors of ``shape``.

    Raises:
        ValueError: heads are not divisible by query groups, or a combination that has no place for a tensor.
    """
    groups = shape.query_groups or shape.heads
    if shape.heads % groups:
        raise ValueError(f"{shape.name}: {shape.heads} heads are not divisible by {groups} query groups")
    if shape.moe_pattern is not None and len(shape.moe_pattern) != shape.layers:
        raise ValueError(f"{shape.name}: moe_pattern has {len(shape.moe_pattern)} entries for {shape.layers} layers")
    if shape.mtp and (shape.tied or shape.learned_positions):
        raise ValueError(
            f"{shape.name}: multi-token prediction with tied embeddings or learned positions keeps copies on the last "
            f"stage that nobody synchronises; use untied embeddings and RoPE"
        )
    tensors = list(_embedding(shape))
    for layer in range(shape.layers):
        tensors += _layer(shape, f"decoder.layers.{layer}", layer, groups, shape.is_moe(layer))
    tensors += _norm(shape, "decoder.final_layernorm", Place.LAST, -1)
    for depth in range(shape.mtp):
        tensors += _mtp(shape, f"mtp.layers.{depth}", groups)
    if not shape.tied:
        tensors.append(_vocabulary(shape, "output_layer.weight", Place.LAST))
    return Catalogue(shape.name, shape.layers, shape.experts, tuple(tensors))


def _vocabulary(shape: ModelShape, name: str, place: Place) -> LogicalTensor:
    cut = Cut(0, (shape.vocabulary,), padded=True, dimension="vocabulary rows")
    return LogicalTensor(name, (shape.vocabulary, shape.hidden), shape.dtype, place=place, cut=cut)


def _embedding(shape: ModelShape) -> Iterator[LogicalTensor]:
    place = Place.TIED if shape.tied else Place.MTP_EMBEDDING if shape.mtp else Place.FIRST
    yield _vocabulary(shape, "embedding.word_embeddings.weight", place)
    if shape.learned_positions:
        size = (shape.learned_positions, shape.hidden)
        yield LogicalTensor("embedding.position_embeddings.weight", size, shape.dtype, place=Place.FIRST)


def _norm(shape: ModelShape, name: str, place: Place, layer: int, joint: str = ".") -> list[LogicalTensor]:
    parts = ("weight", "bias") if shape.norm_bias else ("weight",)
    return [
        LogicalTensor(f"{name}{joint}{part}", (shape.hidden,), shape.dtype, place=place, layer=layer) for part in parts
    ]


def _place(layer: int) -> Place:
    """Multi-token prediction layers have no number in the decoder and lie on the last stage."""
    return Place.LAYER if layer >= 0 else Place.LAST


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
    common: dict[str, Any] = {"dtype": shape.dtype, "place": _place(layer), "layer": layer, "expert": expert}
    out = [LogicalTensor(f"{name}.weight", size, cut=cut, **common)]
    if bias and shape.bias:
        out.append(LogicalTensor(f"{name}.bias", size[:1], cut=cut if cut.axis == 0 else None, **common))
    return out


def _mtp(shape: ModelShape, prefix: str, groups: int) -> list[LogicalTensor]:
    """MultiTokenPredictionLayer (transformer/multi_token_prediction.py): two norms, a projection, a layer, a norm."""
    hidden = shape.hidden
    cut = Cut(0, (hidden,), dimension="hidden size")
    out = [*_norm(shape, f"{prefix}.enorm", Place.LAST, -1), *_norm(shape, f"{prefix}.hnorm", Place.LAST, -1)]
    out += _linear(shape, f"{prefix}.eh_proj", (hidden, 2 * hidden), cut, -1, bias=False)
    out += _layer(shape, f"{prefix}.mtp_model_layer", -1, groups, shape.is_moe(shape.layers - 1))
    return out + _norm(shape, f"{prefix}.final_layernorm", Place.LAST, -1)


def _layer(shape: ModelShape, prefix: str, layer: int, groups: int, moe: bool) -> list[LogicalTensor]:
    head = shape.head_size or shape.hidden // shape.heads
    per_group = (shape.heads // groups + 2) * head
    qkv = Cut(0, (groups * per_group,), unit=per_group, dimension="query groups")
    proj = Cut(1, (shape.heads * head,), unit=head, dimension="attention heads")
    local = shape.impl == "local"
    attention = f"{prefix}.self_attention"
    out: list[LogicalTensor] = []
    if local:
        out += _norm(shape, f"{prefix}.input_layernorm", _place(layer), layer)
    out += _linear(shape, f"{attention}.linear_proj", (shape.hidden, shape.heads * head), proj, layer)
    if not local:
        out += _norm(shape, f"{attention}.linear_qkv", _place(layer), layer, ".layer_norm_")
    out += _linear(shape, f"{attention}.linear_qkv", (groups * per_group, shape.hidden), qkv, layer)
    if shape.query_key_norm:
        for part in ("q", "k"):
            name = f"{attention}.{part}_layernorm.weight"
            out.append(LogicalTensor(name, (head,), shape.dtype, place=_place(layer), layer=layer))
    if local or moe:
        out += _norm(shape, f"{prefix}.pre_mlp_layernorm", _place(layer), layer)
    if not moe:
        if not local:
            out += _norm(shape, f"{prefix}.mlp.linear_fc1", _place(layer), layer, ".layer_norm_")
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
    at: dict[str, Any] = {"place": _place(layer), "layer": layer}
    out = [LogicalTensor(f"{name}.router.weight", (shape.experts, shape.hidden), shape.dtype, **at)]
    if shape.router_bias:
        out.append(LogicalTensor(f"{name}.router.expert_bias", (shape.experts,), "float32", Kind.BUFFER, **at))
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
