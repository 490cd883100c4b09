"""Impossible layouts are refused with the dimension at fault and the nearest layouts that work."""

import json

import pytest

from megatron_resilience import exits
from megatron_resilience.routing import command
from megatron_resilience.vps.catalogue import Catalogue, catalogue_from_json
from megatron_resilience.vps.families import ModelShape, build_catalogue, load_model
from megatron_resilience.vps.layout import Layout, parse_layout
from megatron_resilience.vps.nearest import ImpossibleLayout, space_of
from megatron_resilience.vps.space import StateSpace
from megatron_resilience.vps.tensors import Coordinate, Cut, Kind, LogicalTensor, Place
from tests.vps.models import DENSE, MOE


@pytest.mark.parametrize(
    ("shape", "layout", "message"),
    [
        (
            DENSE,
            Layout(tp=4, dp=3),
            r"TP=4 does not divide the .* (query groups|attention heads); nearest TP that do: [23]",
        ),
        (DENSE, Layout(pp=6, dp=2), r"PP=6 has more stages than the model has layers \(4\)"),
        (DENSE, Layout(pp=3, dp=4), r"PP=3 does not divide the 4 layers; nearest PP that do: 2 or 4"),
        (DENSE, Layout(pp=2, vpp=4), r"VPP=4 does not divide the 2 layers of a stage; nearest VPP that do: 2"),
        (
            DENSE,
            Layout(pp=3, first_stage_layers=3, last_stage_layers=2),
            r"change the layers of the first or last stage",
        ),
        (MOE, Layout(dp=12, ep=3), r"EP=3 does not divide the 4 experts .*; nearest EP that do: 2 or 4"),
        (MOE, Layout(tp=2, dp=10, ep=2, etp=5), r"ETP=5 does not divide the 12 FFN rows; nearest ETP that do: 4 or 6"),
    ],
    ids=["heads", "more stages than layers", "layers", "chunks", "uneven", "experts", "expert tensors"],
)
def test_the_dimension_and_the_nearest_layouts_are_named(shape, layout, message):
    catalogue = build_catalogue(shape)
    with pytest.raises(ImpossibleLayout, match=message) as caught:
        space_of(catalogue, layout)
    assert caught.value.nearest
    for near in caught.value.nearest:
        assert near.world == layout.world
        assert str(near) in str(caught.value)
        StateSpace(catalogue, near).check()


def test_a_batch_that_does_not_divide():
    with pytest.raises(ImpossibleLayout, match="DP=3 does not divide the 8 microbatches") as caught:
        space_of(build_catalogue(DENSE), Layout(tp=2, dp=3), batch=8)
    assert all(8 % near.dp == 0 for near in caught.value.nearest)


def test_nothing_near_is_said_so():
    with pytest.raises(ImpossibleLayout, match="none found; change the number of ranks"):
        space_of(build_catalogue(DENSE), Layout(tp=5), batch=1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("TP8·XP2", "'XP2' in layout 'TP8·XP2': write dimensions as"),
        ("TP8·TP2", "TP is named twice"),
        ("TP0", "TP=0: a dimension has at least size 1"),
        ("TP2·DP3·EP4", "EP=4 x ETP=2 x PP=1 does not divide 6 ranks; EP that do: "),
    ],
)
def test_layouts_that_are_none(text, message):
    with pytest.raises(ValueError, match=message):
        parse_layout(text)


def test_unknown_kinds_of_tensors_are_named():
    data = Catalogue("one", 1, 0, (LogicalTensor("w", (4,), layer=0),)).to_json()
    data["tensors"][0]["kind"] = "wish"
    with pytest.raises(ValueError, match="w: unknown kind 'wish'; known: parameter, frozen, buffer, step, rng, scalar"):
        catalogue_from_json(data)
    with pytest.raises(ValueError, match="w: unknown dtype 'float3'; known: float32"):
        LogicalTensor("w", (4,), "float3", layer=0)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"layer": -1}, "place 'layer' does not go with layer -1"),
        ({"layer": 0, "cut": Cut(0, (3,))}, "do not sum to the extent of axis 0"),
        ({"layer": 0, "kind": Kind.STEP}, "says of which parameter"),
        ({"layer": 0, "coordinate": Coordinate(pp=1)}, "needs a coordinate"),
        ({"place": Place.RANKS}, "needs a coordinate"),
    ],
)
def test_tensors_that_contradict_themselves(fields, message):
    with pytest.raises(ValueError, match=message):
        LogicalTensor("w", (4,), **fields)


def test_steps_belong_to_parameters_of_their_place():
    weight = LogicalTensor("w", (4,), layer=0)
    with pytest.raises(ValueError, match="which is no parameter"):
        Catalogue("one", 1, 0, (weight, LogicalTensor("s", (), kind=Kind.STEP, layer=0, of="v")))
    with pytest.raises(ValueError, match="not in the place of its parameter w"):
        Catalogue("one", 2, 0, (weight, LogicalTensor("s", (), kind=Kind.STEP, layer=1, of="w")))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"query_groups": 5}, "12 heads are not divisible by 5 query groups"),
        ({"mtp": 1, "tied": True}, "use untied embeddings"),
        ({"moe_pattern": (1,)}, "moe_pattern has 1 entries for 4 layers"),
    ],
)
def test_shapes_that_cannot_be(changes, message):
    with pytest.raises(ValueError, match=message):
        build_catalogue(ModelShape(**(vars(DENSE) | changes)))


def test_unknown_models_and_fields(tmp_path):
    with pytest.raises(ValueError, match=r"no model 'gpt-9': give a file, or one of gpt-1\.3b, llama-65b"):
        load_model("gpt-9")
    (tmp_path / "m.yaml").write_text("name: m\nlayer: 3\n")
    with pytest.raises(ValueError, match=r"m.yaml: unknown fields \['layer'\]"):
        load_model(str(tmp_path / "m.yaml"))


def test_the_command_refuses_before_anything_moves(capsys):
    arguments = ["--model", "llama2-70b", "--from", "TP8·PP8·DP8", "--json"]
    assert command.main([*arguments, "--to", "TP16·PP8·DP4"]) == exits.IMPOSSIBLE
    refused = json.loads(capsys.readouterr().out)["refused"]
    assert "TP=16 does not divide the 8 query groups" in refused
    assert "nearest layouts of 512 ranks that can: TP8·PP16·DP4, TP8·PP8·DP8, " in refused
    assert command.main([*arguments, "--to", "TP8·PP8·DP7", "--global-batch", "512"]) == exits.IMPOSSIBLE
    assert "DP=7 does not divide the 512 microbatches" in json.loads(capsys.readouterr().out)["refused"]
    assert command.main([*arguments, "--to", "TP8·PP8·DP4", "--memory", "2"]) == exits.IMPOSSIBLE
    assert "cannot hold the new state" in json.loads(capsys.readouterr().out)["refused"]
    assert command.main([*arguments, "--to", "TP8·PP8·DP4", "--lost", "0,8"]) == exits.IMPOSSIBLE
    assert "nobody holds" in json.loads(capsys.readouterr().out)["refused"]
