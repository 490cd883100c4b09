"""The door of ``train()``: where a rank joins an epoch, is interrupted, and resumes.

An iteration is atomic: its step *and* its tail (logging, evaluation, checkpoint, exit decision). A generation is what stands
on entry to the next step; a rank that is interrupted anywhere leaves ``train()`` by an exception, everyone goes back to
the newest complete generation, and the interrupted iteration is done again as a whole.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.training import get_args, get_tensorboard_writer, get_wandb_writer, training
from megatron.training.global_vars import get_one_logger

from megatron_resilience import accelerator, api
from megatron_resilience.control.link import AgentLink
from megatron_resilience.control.node import ADDRESS, NEWCOMER, NODE
from megatron_resilience.deadpool.config import DeadpoolConfig
from megatron_resilience.deadpool.session import Place, Relayout, Session
from megatron_resilience.errors import ConfigurationError, SetAside
from megatron_resilience.hotswap.asker import Asker
from megatron_resilience.hotswap.fallback import fallbacks
from megatron_resilience.hotswap.schedule import bare, parse_entry, read_schedule
from megatron_resilience.megatron_adapter import once
from megatron_resilience.megatron_adapter.data import DataCursors
from megatron_resilience.megatron_adapter.relayout import LayoutState
from megatron_resilience.megatron_adapter.repair import repair
from megatron_resilience.megatron_adapter.startup import Newcomer
from megatron_resilience.megatron_adapter.state import MegatronState
from megatron_resilience.vps.layout import Layout
from megatron_resilience.vps.nearest import ImpossibleLayout


def install(config: DeadpoolConfig, link: AgentLink, args: Any) -> None:
    """Wraps Megatron's training module. Called once per process, before ``pretrain()``; ``args`` just parsed."""
    seen = once.Once()
    seen.install()
    cursors = DataCursors()
    cursors.install()
    newcomer = Newcomer() if NEWCOMER in os.environ else None
    guard = Guard(config, link, cursors, seen, newcomer)
    guard.install()


def saves_when_told(args: Any) -> bool:
    """Whether Megatron saves a checkpoint and leaves training at ``--exit-signal``."""
    return bool(args.exit_signal_handler and args.save)


class Guard:
    """Holds what the wrappers of one process share."""

    def __init__(
        self,
        config: DeadpoolConfig,
        link: AgentLink,
        cursors: DataCursors,
        seen: once.Once,
        newcomer: Newcomer | None,
    ) -> None:
        self._config = config
        self._link = link
        self._cursors = cursors
        self._newcomer = newcomer
        self._session: Session | None = None
        self._state: MegatronState | None = None
        self._resumed = False
        self._once = seen
        self._asker: Asker | None = None

    def install(self) -> None:
        """Wraps the functions of ``megatron.training.training`` that ``train()`` calls through its module."""
        self._train = training.train
        self._train_step = training.train_step
        self._training_log = training.training_log
        self._evaluate = training.evaluate_and_print_results
        self._checkpoint_and_decide_exit = training.checkpoint_and_decide_exit
        training.train = self.train
        training.train_step = self.train_step
        training.training_log = self.training_log
        training.evaluate_and_print_results = self.evaluate_and_print_results
        training.checkpoint_and_decide_exit = self.checkpoint_and_decide_exit

    def train(
        self,
        forward_step_func: Any,
        model: Any,
        optimizer: Any,
        opt_param_scheduler: Any,
        train_data_iterator: Any,
        valid_data_iterator: Any,
        process_non_loss_data_func: Any,
        config: Any,
        *rest: Any,
        **kwargs: Any,
    ) -> Any:
        """``train()`` that survives the deaths of others."""
        args = get_args()
        state = MegatronState(model, optimizer, opt_param_scheduler, args)
        state.loop = {"start": args.iteration, "report_memory": True, "totals": {}}
        state.out = self._once.out
        if self._newcomer is not None:
            state.position = None
        device = accelerator.select()
        session = Session(
            self._link,
            Place(os.environ[NODE], os.environ[ADDRESS]),
            self._config,
            state,
            self._device_fabric(device, args),
            device,
            args.distributed_timeout_minutes * 60.0,
            self._relayout(state, model, optimizer),
            saves_when_told(args),
        )
        if saves_when_told(args):
            # Megatron's own handler takes note of it, and all ranks agree on the iteration that is the last.
            self._link.on_leave = functools.partial(os.kill, os.getpid(), args.exit_signal)
        self._state, self._session = state, session
        rerun_mode = get_rerun_state_machine().get_mode()
        self._wrap_optimizer(optimizer)
        generation = session.join()
        if self._newcomer is not None:
            self._newcomer.promoted(args, generation)
        again = self._newcomer is not None
        while True:
            if again:
                repair(model, optimizer, args, rerun_mode, [config])
                self._cursors.rewind(args.consumed_train_samples, args.consumed_valid_samples, args.dataloader_type)
                session.reload_volatile(generation)
                self._resumed = True
                self._once.resumes(state.out)
            try:
                result = self._train(
                    forward_step_func,
                    model,
                    optimizer,
                    opt_param_scheduler,
                    train_data_iterator,
                    valid_data_iterator,
                    process_non_loss_data_func,
                    config,
                    *rest,
                    **kwargs,
                )
                session.finish()
                self._once.ends()
                return result
            except SystemExit:
                # Megatron's own early end (--exit-interval, a signal): everybody takes it together.
                session.finish()
                raise
            except Exception as error:
                if not session.interrupted(error):
                    raise
                # A cached exception would keep the dead step's tensors alive.
                error.__traceback__ = None
                if isinstance(error, SetAside):
                    self._cursors.close()
            generation = session.join()
            again = True

    def train_step(self, *args: Any, **kwargs: Any) -> Any:
        """Protects the generation that stands, then takes the step."""
        assert self._session is not None and self._state is not None
        iteration = kwargs["iteration"]
        self._state.iteration = iteration
        self._state.position = (iteration, get_args().consumed_train_samples)
        self._once.generation_ends(iteration)
        if self._asker is not None:
            self._asker.enter(iteration)
        self._session.protect(iteration)
        result = self._train_step(*args, **kwargs)
        self._session.after_step(iteration + 1)
        return result

    def training_log(self, loss_dict: Any, total_loss_dict: Any, *args: Any, **kwargs: Any) -> Any:
        """Averages over a logging interval as if nobody had left ``train()``.

        Its accumulators and its idea of the first iteration are locals of ``train()``: after a re-entry they
        are filled from the generation's record.
        """
        assert self._state is not None
        loop, arguments = self._state.loop, list(args)
        iteration, report_memory = 1, 3  # places in Megatron's signature after the first two
        if self._resumed:
            self._resumed = False
            total_loss_dict.update(loop["totals"])
            arguments[report_memory] = loop["report_memory"]
        number = arguments[iteration]
        kwargs["is_first_iteration"] = number == loop["start"] + 1
        with self._once.showing(once.LOGGED, number):
            loop["report_memory"] = self._training_log(loss_dict, total_loss_dict, *arguments, **kwargs)
        self._once.is_out(once.LOGGED, number)
        loop["totals"] = dict(total_loss_dict)
        return loop["report_memory"]

    def evaluate_and_print_results(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluates; prints what has not been printed yet."""
        iteration = args[4]  # its place in Megatron's signature
        with self._once.showing(once.EVALUATED, iteration):
            return self._evaluate(*args, **kwargs)

    def checkpoint_and_decide_exit(
        self,
        model: Any,
        optimizer: Any,
        scheduler: Any,
        iteration: int,
        operations: float,
        *rest: Any,
        **kwargs: Any,
    ) -> Any:
        """Learns the count of floating-point operations, which is a local of ``train()``."""
        assert self._state is not None
        # Behind a barrier: the last rank has printed its results.
        self._once.is_out(once.EVALUATED, iteration)
        self._state.floating_point_operations = operations
        return self._checkpoint_and_decide_exit(model, optimizer, scheduler, iteration, operations, *rest, **kwargs)

    def _wrap_optimizer(self, optimizer: Any) -> None:
        step = optimizer.step

        @functools.wraps(step)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            assert self._session is not None
            self._session.before_optimizer()
            return step(*args, **kwargs)

        optimizer.step = guarded

    def _relayout(self, state: MegatronState, model: Any, optimizer: Any) -> Relayout | None:
        """What a change of layout needs, with --hotswap-parallelism; its schedule is checked before anything is joined."""
        args = get_args()
        if not args.hotswap_parallelism:
            return None
        live = LayoutState(state, model, optimizer)
        schedule = read_schedule(args.hotswap_schedule, live.layout) if args.hotswap_schedule else ()
        self._asker = api._asker = Asker(
            self._link, live, schedule, self._fallbacks(live), int(os.environ["LOCAL_WORLD_SIZE"])
        )
        live.remember_streams()
        return Relayout(live, args.hotswap_exclusive_memory, self._keeps_worlds, self._asker.follow_schedule)

    def _keeps_worlds(self) -> int:
        """How many worlds may be kept, this process's among them; 0: it could not take part again as a new one would. That takes
        the streams of start-up, which a checkpoint has overwritten, and no writer, whose file another one continues."""
        args = get_args()
        restored = self._newcomer is None and args.load and not args.no_load_rng
        writes = any(get() is not None for get in (get_tensorboard_writer, get_wandb_writer, get_one_logger))
        return 0 if restored or writes else args.hotswap_keep_worlds

    def _fallbacks(self, live: LayoutState) -> Callable[[], dict[int, Layout]] | None:
        """What tells, by number of nodes, what to go on in when no spare is left."""
        if self._config.on_no_spare != "shrink" or live.state.rank != 0:
            return None
        catalogue = live.catalogue()

        @functools.cache
        def carries(layout: Layout) -> bool:
            try:
                live.space(layout, catalogue)
            except ImpossibleLayout:
                return False
            return True

        def possible(layout: Layout) -> bool:
            try:
                live.check_batches(layout, 0)
            except ConfigurationError:
                return False
            return carries(layout)

        text, where = get_args().hotswap_fallbacks or "", "--hotswap-fallbacks"
        wanted = [parse_entry(part, bare(live.layout), where) for part in text.split(",") if part.strip()]
        nodes, per_node = int(os.environ["GROUP_WORLD_SIZE"]), int(os.environ["LOCAL_WORLD_SIZE"])
        found = functools.partial(fallbacks, live.layout, nodes, per_node, self._config.replicas + 1, possible, wanted)
        # What the model allows is found out now: later it would be while the job trains.
        found()
        return found

    def _device_fabric(self, device: accelerator.Accelerator, args: Any) -> Any:
        if device.distributed_backend == "gloo":
            return None
        from megatron_resilience.transport.nccl import NcclFabric

        return lambda store, rank: NcclFabric(store, rank, args.distributed_timeout_minutes * 60.0)
