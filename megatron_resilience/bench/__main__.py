"""Run one benchmark by name; its module is imported only then."""

from __future__ import annotations

import importlib
import pkgutil
import sys

import megatron_resilience.bench as room


def main(arguments: list[str]) -> int:
    """Dispatch ``NAME ...`` to ``megatron_resilience.bench.NAME.main``, which returns the exit status."""
    names = sorted(m.name for m in pkgutil.iter_modules(room.__path__) if not m.name.startswith("_"))
    if not arguments or arguments[0] not in names:
        print(f"usage: python -m megatron_resilience.bench {{{','.join(names)}}} ...", file=sys.stderr)
        return 2
    return int(importlib.import_module(f"{room.__name__}.{arguments[0]}").main(arguments[1:]) or 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
