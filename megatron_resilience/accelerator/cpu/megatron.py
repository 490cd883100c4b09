"""What has to change inside Megatron itself; the code is ``megatron_adapter.cpu``'s.

Imported when installing, not before: selecting an accelerator must not import Megatron.
"""

from __future__ import annotations

from megatron_resilience.accelerator.cpu.patching import Patches


def check_version() -> None:
    """Raises ``UnsupportedMegatron`` unless the installed Megatron is a release that is known."""
    from megatron_resilience.megatron_adapter.versions import check

    check()


def install(patches: Patches) -> None:
    """Imports Megatron and applies the patches that cannot be made in torch."""
    from megatron_resilience.megatron_adapter import cpu

    cpu.install(patches)
