"""Who holds what: the newest generation that is covered completely, by which copies, and what is missing by name."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_resilience.routing.holders import (
    NOWHERE,
    Holder,
    Source,
    Uncovered,
    choose_copies,
    missing_regions,
    newest_covered,
)
from megatron_resilience.routing.problem import Problem
from megatron_resilience.vps.families import ModelShape, build_catalogue
from megatron_resilience.vps.layout import Layout
from megatron_resilience.vps.space import StateSpace
from tests.routing.exchange import exchange
from tests.vps.models import DENSE
from tests.vps.reference import held_by
from tests.vps.strategies import few, many, models


def space_of(layout, **changes):
    """DENSE under a layout."""
    return StateSpace(build_catalogue(ModelShape(**(vars(DENSE) | changes))), layout)


def everywhere(space, generation, source=Source.DEVICE):
    """Every rank holds its own."""
    return [Holder(rank, rank, generation, source) for rank in range(space.layout.world)]


def test_the_newest_complete_generation_wins():
    space = space_of(Layout(dp=4))
    older, newer = everywhere(space, 7, Source.SNAPSHOT), everywhere(space, 8)
    assert newest_covered(space, older + newer).generation == 8
    # Rank 2 died with its generation 8; its replica on endpoint 0 is of generation 7.
    holders = [h for h in older + newer if h.endpoint != 2] + [Holder(2, 0, 7, Source.REPLICA)]
    coverage = newest_covered(space, holders)
    assert coverage.generation == 7
    assert coverage.at.tolist() == [0, 1, 0, 3]
    assert [h.source for h in coverage.chosen] == [Source.SNAPSHOT, Source.SNAPSHOT, Source.REPLICA, Source.SNAPSHOT]


def test_the_nearest_kind_of_copy_is_used_and_the_load_is_spread():
    disk, replica, snapshot = (
        Holder(0, e, 3, s) for e, s in ((5, Source.DISK), (4, Source.REPLICA), (0, Source.SNAPSHOT))
    )
    assert choose_copies(1, [disk, replica, snapshot], 3) == (snapshot,)
    assert choose_copies(1, [disk, replica], 3) == (replica,)
    assert choose_copies(1, [disk, replica], 2) == (None,)
    # Shard 0 is on endpoint 6 only, so 1 and 2 go elsewhere.
    spread = [Holder(0, 6, 3, Source.REPLICA)] + [Holder(s, e, 3, Source.REPLICA) for s in (1, 2) for e in (6, 7, 8)]
    assert [h.endpoint for h in choose_copies(3, spread, 3)] == [6, 7, 8]


def test_nothing_is_covered_names_what_is_missing():
    space = space_of(Layout(pp=2, dp=2))
    holders = [Holder(rank, rank, 5) for rank in (0, 1, 3)] + [Holder(0, 0, 4)]
    with pytest.raises(
        Uncovered, match=r"no generation is held completely; the newest, 5, lacks decoder.*of rank 2"
    ) as caught:
        newest_covered(space, holders)
    assert caught.value.generation == 5
    lacking = {name.split("[")[0] for name in caught.value.missing}
    assert "decoder.layers.3.mlp.linear_fc1.weight" in lacking
    assert not any(name.startswith(("decoder.layers.0", "decoder.layers.1")) for name in lacking)
    with pytest.raises(Uncovered, match="None, lacks everything"):
        newest_covered(space, [])


def test_a_holder_of_no_rank_is_an_error():
    space = space_of(Layout(dp=2))
    with pytest.raises(ValueError, match="endpoint 3 holds rank 2 of a layout of 2 ranks"):
        newest_covered(space, [*everywhere(space, 1), Holder(2, 3, 1)])


def test_what_others_have_too_is_not_missing():
    # Without a distributed optimizer every data-parallel rank has everything of its stage.
    space = StateSpace(build_catalogue(DENSE), Layout(tp=2, dp=2), sharded_optimizer=False)
    assert missing_regions(space, np.array([0, 1, NOWHERE, NOWHERE])) == []
    assert missing_regions(space, np.array([0, NOWHERE, NOWHERE, NOWHERE])) != []
    # The tied embedding of a lost last stage is on the first.
    space = space_of(Layout(pp=2), tied=True)
    names = {name.split("[")[0] for name in missing_regions(space, np.array([0, NOWHERE]))}
    assert "embedding.word_embeddings.weight" not in names
    assert "decoder.final_layernorm.weight" in names


def check_missing(space, alive):
    """What `missing_regions` names is what no living rank has by the slow reference, tensor by tensor."""
    held, whole = {}, {}
    for rank in range(space.layout.world):
        for (name, _), mask in held_by(space, rank).items():
            whole[name] = whole.get(name, False) | mask
            if rank in alive:
                held[name] = held.get(name, False) | mask
    expected = {name for name, mask in whole.items() if (mask & ~held.get(name, np.zeros_like(mask))).any()}
    at = np.array([r if r in alive else NOWHERE for r in range(space.layout.world)])
    assert {name.split("[")[0] for name in missing_regions(space, at)} == expected
    if not expected:
        exchange(Problem(space, space, at, np.arange(space.layout.world)))


SURVIVORS = st.sets(st.integers(0, 11))


@few(25)
@given(models(), SURVIVORS)
def test_missing_is_what_no_survivor_has(spaces, alive):
    check_missing(spaces[0], alive)


@pytest.mark.full
@many()
@given(models(), SURVIVORS)
def test_missing_is_what_no_survivor_has_in_thousands_of_cases(spaces, alive):
    check_missing(spaces[0], alive)
