"""What is tried: pairs of releases, and the tests that each must pass."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Pair:
    """Releases to be tried together.

    Attributes:
        name: for people.
        torch: its release.
        megatron: of megatron-core.
        python: ``major.minor``.
    """

    name: str
    torch: str
    megatron: str
    python: str = "3.12"


PAIRS = (
    Pair("newest", "2.14.1", "0.19.2"),
    Pair("middle", "2.12.1", "0.19.2"),
    Pair("oldest-torch", "2.9.1", "0.19.2"),
    Pair("megatron-0.18", "2.14.1", "0.18.2"),
    Pair("megatron-0.17", "2.9.1", "0.17.1"),
    Pair("python-3.13", "2.14.1", "0.19.2", "3.13"),
)

SUITES: dict[str, tuple[str, ...]] = {
    "options of the parser": ("tests/megatron_adapter", "-m", "not e2e and not full"),
    "parts without Megatron": (
        *("tests/control", "tests/deadpool", "tests/hotswap", "tests/observe", "tests/state", "tests/transport"),
        *("-m", "not e2e and not full"),
    ),
    "a node is killed": ("tests/e2e/test_hot_swap.py", "-k", "test_any_node_may_die and bf16_overlap-0"),
    "the layout changes": (
        "tests/e2e/test_layouts.py",
        "-k",
        "test_training_goes_on_as_stock_megatron_would and not full",
    ),
}
"""By what is shown, arguments of pytest. Both jobs are compared to stock Megatron of the same pair, to the bit."""
