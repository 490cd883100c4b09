"""Where supported releases of Megatron differ in what this package calls. Everything else that it reaches is alike in them."""

from __future__ import annotations

from megatron.core.transformer.moe import moe_utils


def clear_moe_metrics() -> None:
    """Empties the accumulators of the router's losses; 0.17 keeps them in a dictionary, later releases in a tracker."""
    try:
        from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
    except ImportError:
        moe_utils.clear_aux_losses_tracker()
    else:
        get_moe_metrics_tracker().clear()
