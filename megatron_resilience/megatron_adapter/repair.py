"""What must be mended before ``train()`` can be entered a second time.

Each item was found by leaving it out: Megatron then crashes, or trains wrongly with exit code 0.
"""

from __future__ import annotations

from typing import Any

from megatron.core import parallel_state
from megatron.core.rerun_state_machine import RerunState, get_rerun_state_machine
from megatron.core.utils import get_attr_wrapped_model
from megatron.training import get_timers
from megatron.training.training import should_disable_forward_pre_hook

from megatron_resilience.megatron_adapter import buckets
from megatron_resilience.megatron_adapter.buckets import chained
from megatron_resilience.megatron_adapter.releases import clear_moe_metrics


def repair(model: list[Any], optimizer: Any, args: Any, rerun_mode: Any, configs: list[Any]) -> None:
    """Puts everything that an interrupted step may have left half-way where ``train()`` expects it.

    Args:
        model: DDP-wrapped chunks.
        rerun_mode: of the rerun state machine, as it was before training (evaluation changes it).
        configs: transformer configs that ``train()`` writes its functions to.
    """
    _timers()
    _rerun(rerun_mode)
    for config in [*configs, *(get_attr_wrapped_model(chunk, "config") for chunk in model)]:
        # train() asserts that nobody has set them, and sets them again.
        config.no_sync_func = config.grad_sync_func = config.param_sync_func = None
    buckets.reset(model, optimizer)
    for part in [optimizer, *chained(optimizer)]:
        # Filled by a reduction in the first step, which a newcomer is about to take: everyone asks again.
        part._has_grad_norm_group_cache = None
    for chunk in model:
        chunk.force_all_reduce = False
        chunk.zero_grad_buffer()
        for param in chunk.parameters():
            param.grad = None
        # train() begins by taking the hooks off, and insists that they are on.
        if should_disable_forward_pre_hook(args) and not chunk.remove_forward_pre_hook_handles:
            chunk.enable_forward_pre_hook()
    if parallel_state.get_virtual_pipeline_model_parallel_world_size() is not None:
        parallel_state.set_virtual_pipeline_model_parallel_rank(0)
    # An abandoned operation may still write to a communication buffer: the next step gets fresh ones.
    parallel_state.destroy_global_memory_buffer()
    parallel_state._set_global_memory_buffer()
    clear_moe_metrics()


def _timers() -> None:
    for timer in get_timers()._timers.values():
        timer.reset()
        timer._started = False


def _rerun(mode: Any) -> None:
    machine = get_rerun_state_machine()
    machine.state = RerunState.NOT_RUNNING_YET
    machine.set_mode(mode)
    machine.rerun_requested = machine.checkpoint_requested = False
    machine.restart_again_requested = machine.continue_requested = False
    machine.data_iterator_checkpoints = None
    machine.saved_state = None
    machine.saved_results.clear()
