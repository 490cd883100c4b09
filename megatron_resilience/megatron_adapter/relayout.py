"""A rank's training state in the terms of another layout: its logical tensors, its streams and its scalars."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

from megatron.core import num_microbatches_calculator
from megatron.core.num_microbatches_calculator import (
    get_current_global_batch_size,
    get_num_microbatches,
    update_num_microbatches,
)
from megatron.training import get_args, get_tokenizer

from megatron_resilience.errors import ConfigurationError, StateError
from megatron_resilience.hotswap.batches import Steps, batch_at, check_batches
from megatron_resilience.hotswap.fragments import Storage
from megatron_resilience.hotswap.shelf import Table
from megatron_resilience.megatron_adapter.buckets import chained
from megatron_resilience.megatron_adapter.catalogue import live_shape, live_space
from megatron_resilience.megatron_adapter.state import MegatronState, masters
from megatron_resilience.megatron_adapter.storage import live_storage
from megatron_resilience.megatron_adapter.tenancy import Tenancy
from megatron_resilience.state.inventory import Kind
from megatron_resilience.vps.catalogue import Catalogue
from megatron_resilience.vps.families import build_catalogue
from megatron_resilience.vps.layout import Layout
from megatron_resilience.vps.nearest import space_of
from megatron_resilience.vps.space import StateSpace
from megatron_resilience.vps.state import steps

_MUST_MOVE = (Kind.MASTER, Kind.MOMENT, Kind.STEP, Kind.FROZEN)
_SAME_GROUP = ("wd_mult", "lr_mult", "is_decoupled_lr", "default_config", "max_lr", "min_lr")
_EXPERTS = "is_expert_parallel"
_HOST_STREAMS = ("python_rng", "numpy_rng")
"""Python's and NumPy's generators, in a record."""


class LayoutState:
    """See the module.

    Args:
        state: of this rank.
        model: DDP-wrapped chunks.
        optimizer: Megatron's.

    Raises:
        ConfigurationError: this model or layout cannot be described; names the option.
        LayoutMismatch: Megatron keeps a tensor elsewhere than predicted.
    """

    def __init__(self, state: MegatronState, model: list[Any], optimizer: Any) -> None:
        self.state = state
        self._model, self._optimizer = model, optimizer
        self._tenancy = Tenancy(model, optimizer)
        args = self._args = get_args()
        # Megatron has read the schedule; with a constant batch there is none.
        calculator = num_microbatches_calculator._GLOBAL_NUM_MICROBATCHES_CALCULATOR
        self._batches: Steps = tuple(getattr(calculator, "schedule", ()))
        # MegatronState has primed them.
        self._steps = any(
            "step" in part.optimizer.state[main] for part in chained(optimizer) for _, main in masters(part)
        )
        try:
            self._shape = live_shape(args, model, get_tokenizer().vocab_size)
            self.layout: Layout = live_space(args, model, optimizer, self._shape.vocabulary).layout
        except ValueError as error:
            raise ConfigurationError(f"--hotswap-parallelism: {error}") from error

    # -- logical tensors ---------------------------------------------------------------------------

    def catalogue(self, other: Layout | None = None) -> Catalogue:
        """All logical tensors. Between two layouts the rows of the vocabulary's padding that both have are state too: they
        take part in the loss. Rows that only the new one has begin as :meth:`clear` leaves them."""
        layouts = [self.layout, other or self.layout]
        padded = min(_padded(self._shape.vocabulary, layout) for layout in layouts)
        catalogue = build_catalogue(replace(self._shape, vocabulary=padded))
        return catalogue.with_tensors(steps(catalogue)) if self._steps else catalogue

    def space(self, layout: Layout, catalogue: Catalogue) -> StateSpace:
        """The state under a layout.

        Raises:
            ImpossibleLayout: it cannot carry the model, or does not divide the batch; says which ones can.
        """
        args = self._args
        batch = None if self._batches else args.global_batch_size // args.micro_batch_size
        return space_of(catalogue, layout, args.use_distributed_optimizer, batch)

    def check_batches(self, layout: Layout, at: int) -> None:
        """Whether a layout divides every batch from generation ``at`` on (0: from now on), where they are not all alike.

        Before a newcomer knows where the job stands it takes the word of those that do.

        Raises:
            ConfigurationError: names the first that it does not.
        """
        # Not args.iteration, which stands still while train() runs.
        if self._batches and self.state.position is not None:
            unit = self._args.micro_batch_size * layout.dp
            check_batches(self._batches, unit, *self.state.position, at)

    def batch(self) -> int:
        """Samples of the present global batch; 0 where it is always the same."""
        return batch_at(self._batches, self.state.position[1]) if self._batches and self.state.position else 0

    def clear(self) -> None:
        """Zeroes what another world's state will overwrite: masters and moments.

        What is not overwritten are rows of the vocabulary's padding that the other layout did not have. Stock Megatron zeroes
        them too when it loads a checkpoint of another padding (``allow_shape_mismatch`` in
        ``megatron.core.dist_checkpointing.strategies.torch``).
        """
        specs = self.state.inventory.specs
        for index, tensor in self.state.stable():
            if specs[index].kind in (Kind.MASTER, Kind.MOMENT):
                tensor.zero_()

    def remember_streams(self) -> None:
        """Keeps the random streams as start-up leaves them, for :meth:`begin_anew`."""
        specs = self.state.inventory.specs
        record = self.state.record()
        self._first_generators = {name: record[name] for name in _HOST_STREAMS}
        self._first_streams = {
            specs[index].name: bytes(tensor.contiguous().numpy())
            for index, tensor in self.state.volatile()
            if specs[index].kind is Kind.RNG
        }

    def begin_anew(self) -> None:
        """Random streams as in a process that has just started: those that no rank of the other layout hands on stay so."""
        self.state.load_record(self.state.record() | self._first_generators)
        self.state.load_streams(self._first_streams)

    def vacate(self) -> None:
        """Frees the device memory of parameters, gradients, masters and moments; what is in it is lost."""
        self._tenancy.vacate()

    def reoccupy(self) -> None:
        """Takes that memory again, zeroed; see :meth:`tenancy.Tenancy.reoccupy`."""
        self._tenancy.reoccupy()

    def storage(self, space: StateSpace) -> Storage:
        """Live tensors by logical tensor, one-dimensional."""
        return live_storage(space, self.state.rank, self._model, self._optimizer)

    def table(self) -> Table:
        """Where the logical tensors lie in this rank's segment.

        Raises:
            StateError: a tensor of the inventory has no place in the catalogue: it would not be moved.
        """
        inventory = self.state.inventory
        live = {(t.data_ptr(), t.numel()): i for i, t in [*self.state.stable(), *self.state.volatile()] if t.numel()}
        tensors, known = [], set()
        space = self.space(self.layout, self.catalogue())
        for (number, which), fields in sorted(self.storage(space).items()):
            for name, tensor in sorted(fields.items()):
                place = live.get((tensor.data_ptr(), tensor.numel()), -1)
                if tensor.numel() and place < 0:
                    raise StateError(
                        f"{space.catalogue.tensors[number].name}/{name} is not among the tensors that are protected"
                    )
                known.add(place)
                dtype = str(tensor.dtype).removeprefix("torch.")
                offset = inventory.offsets[place] if tensor.numel() else 0
                tensors.append((number, which, name, offset, dtype, tensor.numel()))
        for index, spec in enumerate(inventory.specs):
            if spec.kind in _MUST_MOVE and spec.nbytes and index not in known:
                raise StateError(f"{spec.name} is protected, but has no place among the model's logical tensors")
        streams = tuple(
            (spec.name, inventory.offsets[i], spec.nbytes)
            for i, spec in enumerate(inventory.specs)
            if spec.kind is Kind.RNG
        )
        return Table(self.layout, inventory.payload_bytes, inventory.digest, tuple(tensors), streams)

    # -- scalars -----------------------------------------------------------------------------------

    def adopt(self, record: dict[str, Any], loop: dict[str, Any], with_host_streams: bool) -> None:
        """Makes the live scalars what a rank of another layout recorded.

        Args:
            record: of old rank 0; the same on all old ranks but for what is listed here.
            loop: of an old rank of the last stage, where losses are.
            with_host_streams: Python's and NumPy's generators go on too.

        Raises:
            StateError: the old optimizer had no parameter group like one of this rank's, or this layout does not divide the
                batch, which Megatron's count of microbatches would pass over.
        """
        mine = self.state.record()
        new = copy.deepcopy(record)
        new["loop"] = loop
        update_num_microbatches(record["args"]["consumed_train_samples"], consistency_check=False)
        unit, batch = self._args.micro_batch_size * self.layout.dp, get_current_global_batch_size()
        if batch % unit:
            raise StateError(
                f"{self.layout} cannot train the present batch of {batch} samples, which --micro-batch-size times DP ({unit}) "
                "does not divide"
            )
        new["microbatches"] = get_num_microbatches()
        groups = [group for part in record["groups"] for group in part]
        new["groups"] = [[_like(group, groups) for group in part] for part in mine["groups"]]
        scaler = next((s for s in record["scalers"] if s is not None), None)
        new["scalers"] = [None if s is None else scaler for s in mine["scalers"]]
        if not with_host_streams:
            new |= {name: mine[name] for name in _HOST_STREAMS}
        self.state.load_record(new)
        self.state.out[:] = record["out"]


def _padded(vocabulary: int, layout: Layout) -> int:
    unit = layout.vocabulary_multiple * layout.tp
    return -(-vocabulary // unit) * unit


def _like(mine: dict[str, Any], groups: list[dict[str, Any]]) -> dict[str, Any]:
    """The old group with the same rules; experts may have been no group of their own."""

    def rules(group: dict[str, Any]) -> list[Any]:
        return [group.get(name) for name in _SAME_GROUP]

    alike = [group for group in groups if rules(group) == rules(mine)]
    exact = [group for group in alike if group.get(_EXPERTS) == mine.get(_EXPERTS)]
    if not alike:
        raise StateError(
            f"the old layout's optimizer has no parameter group with {dict(zip(_SAME_GROUP, rules(mine), strict=True))}"
        )
    found = dict((exact or alike)[0])
    if _EXPERTS in mine:
        found[_EXPERTS] = mine[_EXPERTS]
    return found
