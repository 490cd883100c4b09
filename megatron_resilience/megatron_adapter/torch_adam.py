"""Makes checkpoints of Megatron 0.19's distributed optimizer load where torch's Adam plays FusedAdam.

Without TransformerEngine and Apex, ``DistributedOptimizer`` (distrib_optimizer.py) has three defects:

* ``state_dict()`` before the first step asserts, so ``--load`` dies (:838);
* after a load all parameters share one ``step`` tensor, so Adam counts once per parameter: silently wrong (:1028);
* ``fully_reshardable`` loading looks for a ``step`` that the checkpoint does not have, and ``dp_reshardable`` copies a stale
  one (:1222).
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from megatron.core.optimizer import distrib_optimizer

from megatron_resilience.megatron_adapter.state import prime


def install() -> None:
    """Mends the three; idempotent, and without effect where a fused Adam is there."""
    cls = distrib_optimizer.DistributedOptimizer
    if distrib_optimizer.HAVE_APEX_OR_TE or hasattr(cls.state_dict, "mended"):
        return
    state_dict, load_state_dict = cls.state_dict, cls.load_state_dict
    set_states = cls._set_main_param_and_optimizer_states

    @functools.wraps(state_dict)
    def mended_state_dict(self: Any) -> Any:
        if not self.optimizer.state:
            prime(self.optimizer)
        return state_dict(self)

    @functools.wraps(load_state_dict)
    def mended_load_state_dict(self: Any, loaded: Any) -> None:
        load_state_dict(self, loaded)
        # The original has made sure that all groups have one.
        step = float(loaded["optimizer"]["param_groups"][0]["step"])
        for state in self.optimizer.state.values():
            state["step"] = torch.tensor(step, dtype=torch.float32, device=state["step"].device)

    @functools.wraps(set_states)
    def mended_set_states(self: Any, model_param: Any, tensors: Any) -> None:
        # What is no tensor is left alone.
        set_states(self, model_param, {**tensors, "step": None})

    mended_state_dict.mended = True  # type: ignore[attr-defined]
    cls.state_dict = mended_state_dict
    cls.load_state_dict = mended_load_state_dict
    cls._set_main_param_and_optimizer_states = mended_set_states
