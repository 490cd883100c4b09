"""Transfers between endpoints in threads, over real gloo, of labelled elements."""

import threading
from datetime import timedelta
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from megatron_resilience.errors import StateError
from megatron_resilience.hotswap.engine import IN_FLIGHT, Transfer, chunk_of
from megatron_resilience.routing.cost import Cluster
from megatron_resilience.routing.problem import Problem
from megatron_resilience.vps.tensors import DTYPE_BYTES, Kind
from tests.routing.exchange import storage_of
from tests.vps.strategies import models

FIELDS = ("master", "exp_avg", "exp_avg_sq")
_TORCH = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "int64": torch.int64}


def storage(space, rank, empty=False):
    """What ``rank`` stores: each field's elements are their logical index, and the number of the field, as bits."""
    out = {}
    for (number, copy), labels in storage_of(space, rank).items():
        tensor = space.catalogue.tensors[number]
        fields = FIELDS if tensor.kind is Kind.PARAMETER else ("value",)
        width = 4 if tensor.kind is Kind.PARAMETER else DTYPE_BYTES[tensor.dtype]
        kind = {1: np.uint8, 2: np.int16, 4: np.int32, 8: np.int64}[width]
        out[number, copy] = {
            field: torch.from_numpy((labels * 0 - 5 if empty else labels * 3 + i).astype(kind))
            for i, field in enumerate(fields)
        }
    return out


def run(problem, chunk, damage=None):
    """All endpoints' transfers; returns storage by target rank, and the transfers by endpoint."""
    peers = sorted([*problem.target_at.tolist(), *problem.couriers])
    store = dist.HashStore()
    got = {r: storage(problem.target, r, empty=True) for r in range(problem.target.layout.world)}
    becomes = {int(endpoint): got[rank] for rank, endpoint in enumerate(problem.target_at)}
    transfers = {e: Transfer(problem, e, peers, becomes.get(e), chunk) for e in peers}
    errors = []

    def work(endpoint):
        options = dist.ProcessGroupGloo._Options()
        options._timeout = timedelta(seconds=20)
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        backend = dist.ProcessGroupGloo(store, peers.index(endpoint), len(peers), options)
        try:
            transfers[endpoint].run(lambda source: storage(problem.source, source), backend)
            if damage is not None and endpoint == 0:
                damage(got)
            transfers[endpoint].verify()
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(e,)) for e in peers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return got, transfers


@st.composite
def switches(draw):
    """From one layout to another, on nodes of a few ranks; the new one may leave nodes out."""
    source, target = draw(models(2, 6))
    per_node = draw(st.sampled_from([1, 2, 4]))
    last = -(-max(source.layout.world, target.layout.world) // per_node)
    owning = {r // per_node for r in range(target.layout.world)}
    return Problem(
        source,
        target,
        np.arange(source.layout.world),
        np.arange(target.layout.world),
        Cluster(ranks_per_node=per_node),
        shelves=True,
        couriers=tuple(n * per_node for n in range(last) if n not in owning),
    )


@given(switches(), st.sampled_from([64, 1000, 1 << 20]))
@settings(
    max_examples=15,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
)
def test_every_element_arrives_whatever_the_chunks(problem, chunk):
    got, transfers = run(problem, chunk)
    for rank, memory in got.items():
        expected = storage(problem.target, rank)
        for key, labels in storage_of(problem.target, rank).items():
            if problem.source.instances.first[key[0]] < 0:
                continue
            for field, tensor in memory[key].items():
                real = torch.from_numpy(labels >= 0)
                assert torch.equal(tensor[real], expected[key][field][real])
    sent = sum(t.tally.sent for t in transfers.values())
    assert sent == sum(t.tally.received for t in transfers.values())
    assert sent == sum(t.plan.sends.total_bytes for t in transfers.values()), "what the plan says, and no more"


@given(st.integers(1, 1 << 45), st.integers(1, 4096), st.integers(1, 4096))
def test_the_staging_buffer_is_small_beside_the_state(state, before, after):
    source, target = (SimpleNamespace(layout=SimpleNamespace(world=world)) for world in (before, after))
    source.catalogue = SimpleNamespace(state_bytes=state)
    buffer = 2 * IN_FLIGHT * chunk_of(SimpleNamespace(source=source, target=target))
    assert buffer <= max(2 << 20, 0.05 * state / min(before, after)) and buffer <= 64 << 20


def test_what_lies_wrong_after_the_move_is_found():
    from megatron_resilience.vps.families import build_catalogue
    from tests.vps.models import DENSE, spaces

    layouts = spaces(build_catalogue(DENSE))
    source = next(s for s in layouts if s.layout.world == 4)
    target = next(s for s in layouts if s.layout.world == 4 and s.layout != source.layout)
    problem = Problem(source, target, np.arange(4), np.arange(4), Cluster(ranks_per_node=2), shelves=True)

    def swap_two(got):
        for key, fields in got[0].items():
            if target.catalogue.tensors[key[0]].kind is Kind.PARAMETER and fields["exp_avg"].numel() > 1:
                fields["exp_avg"][:2] = fields["exp_avg"][:2].flip(0).clone()
                return

    run(problem, 1 << 20)
    with pytest.raises(StateError, match="differs from its source"):
        run(problem, 1 << 20, swap_two)
