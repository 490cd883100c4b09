"""What the launcher and the agents tell people, on standard error."""

from __future__ import annotations

import sys


def say(text: str) -> None:
    """Prints one line under the package's name."""
    print(f"[megatron-resilience] {text}", file=sys.stderr, flush=True)
