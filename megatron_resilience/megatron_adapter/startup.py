"""What the start-up of a newcomer must do differently: it runs alone, and nobody may notice it.

A newcomer has the identity of one rank, and waits at the door of ``train()`` for a promotion. Until then it belongs to no live
group, loads no checkpoint (its state is routed in) and opens no writers (it may be the second process of that rank).
"""

from __future__ import annotations

from typing import Any

from megatron.training import global_vars, training

from megatron_resilience.megatron_adapter import once
from megatron_resilience.topology.alone import force_fake_backend

_WRITERS = ("_set_tensorboard_writer", "_set_wandb_writer", "_set_one_logger")


class Newcomer:
    """Prepares this process's start-up; :meth:`promoted` makes good what was put off."""

    def __init__(self) -> None:
        force_fake_backend()
        # Whatever the others have loaded comes with the state.
        training.load_checkpoint = lambda *args, **kwargs: (0, 0)
        self._put_off: list[tuple[Any, tuple[Any, ...]]] = []
        for name in _WRITERS:
            original = getattr(global_vars, name)
            setattr(global_vars, name, lambda *a, original=original: self._put_off.append((original, a)))
        build = training.build_train_valid_test_data_loaders

        def build_loaders(provider: Any) -> Any:
            loaders = build(provider)
            # Computed on tensor-parallel rank 0 and broadcast, which nobody does here.
            from megatron.training import get_args

            get_args().do_train = True
            return loaders

        training.build_train_valid_test_data_loaders = build_loaders

    def promoted(self, args: Any, generation: int) -> None:
        """Opens the writers that belong to this rank, now that it is the only one of its kind."""
        if args.tensorboard_dir and args.rank == args.world_size - 1:
            once.cut_back(args.tensorboard_dir, generation)
        while self._put_off:
            original, arguments = self._put_off.pop(0)
            original(*arguments)
