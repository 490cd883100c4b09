"""Data iterators that can be set back: the same objects, over a new loader that starts at another sample.

``pretrain()`` keeps its iterators for the final evaluation, so they are never replaced; what is beneath them is.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from megatron.core.rerun_state_machine import RerunDataIterator
from megatron.training import training


@dataclass
class _Loader:
    dataset: Any
    iterator: RerunDataIterator | None = None


@dataclass
class DataCursors:
    """Remembers which dataset each of Megatron's iterators reads.

    Installed before ``pretrain()`` builds them (:meth:`install`); :meth:`rewind` sets back what training and validation read. The
    test set is read once, after training: its iterator is only made anew after :meth:`close`.
    """

    train: list[_Loader] = field(default_factory=list)
    valid: list[_Loader] = field(default_factory=list)
    test: list[_Loader] = field(default_factory=list)
    _closed: bool = False
    _building: list[Any] | None = None
    _build_loader: Any = None

    def install(self) -> None:
        """Wraps Megatron's builders of loaders and iterators."""
        self._build_loader = training.build_pretraining_data_loader
        build_iterators = training.build_train_valid_test_data_iterators

        def build_loader(dataset: Any, consumed: int) -> Any:
            if self._building is not None:
                self._building.append(dataset)
            return self._build_loader(dataset, consumed)

        def build(provider: Any) -> Any:
            self._building = []
            try:
                train, valid, test = build_iterators(provider)
                datasets = self._building
            finally:
                self._building = None
            # Megatron builds train, validation and test loaders in this order, on ranks that read data at all.
            if datasets:
                self.train.append(_Loader(datasets[0], train))
                self.valid.append(_Loader(datasets[1], valid))
                self.test.append(_Loader(datasets[2], test))
            return train, valid, test

        training.build_pretraining_data_loader = build_loader
        training.build_train_valid_test_data_iterators = build

    def rewind(self, consumed_train: int, consumed_valid: int, dataloader_type: str) -> None:
        """Sets every iterator to the sample after those consumed.

        Args:
            consumed_train: training samples consumed by the whole job.
            consumed_valid: validation samples consumed.
            dataloader_type: ``single`` or ``cyclic``.
        """
        test, self._closed = self.test if self._closed else [], False
        for loaders, consumed in ((self.train, consumed_train), (self.valid, consumed_valid), (test, 0)):
            for loader in loaders:
                if loader.iterator is None or loader.dataset is None:
                    continue
                fresh = self._build_loader(loader.dataset, consumed)
                over = fresh if dataloader_type == "single" else training.cyclic_iter(fresh)
                loader.iterator.iterable = iter(over)
                loader.iterator.advance()

    def close(self) -> None:
        """Ends the loaders' worker processes: forked from this one, they keep alive what memory it shares with others."""
        self._closed = True
        for loader in (*self.train, *self.valid, *self.test):
            if loader.iterator is not None:
                loader.iterator.iterable = iter(())
