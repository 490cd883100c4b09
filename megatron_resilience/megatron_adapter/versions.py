"""Which releases of Megatron the adapters know."""

from __future__ import annotations

import re

from megatron_resilience.errors import UnsupportedError

SUPPORTED = ("0.19",)
"""Supported ``major.minor`` releases of megatron-core: those with a pair that works in docs/compatibility.md."""


TORCH = ((2, 9), (2, 15))
"""Supported torch releases: from, up to but not including."""


class UnsupportedMegatron(UnsupportedError):
    """Megatron is missing, or a release whose internals nobody has checked."""


def check_torch(found: str) -> None:
    """Refuses a torch whose process groups the switch does not know; vendor builds (``2.9.0a0+..nv25.10``) parse.

    Raises:
        UnsupportedError: with what was found and what is supported.
    """
    match = re.match(r"(\d+)\.(\d+)", found)
    if match is None or not TORCH[0] <= (int(match.group(1)), int(match.group(2))) < TORCH[1]:
        raise UnsupportedError(
            f"found torch {found}; --deadpool exchanges transports beneath process groups, which is known to work "
            f"with torch {'.'.join(map(str, TORCH[0]))} up to but not including {'.'.join(map(str, TORCH[1]))}"
        )


def check(found: str | None = None) -> str:
    """Returns the version of Megatron in use (``found``, or the importable one).

    Reads ``megatron.core.package_info``, so that a checkout on PYTHONPATH counts, not an installed wheel
    that it shadows.

    Raises:
        UnsupportedMegatron: no Megatron, or none of ``SUPPORTED``.
    """
    if found is None:
        found = _importable()
    match = re.match(r"(\d+)\.(\d+)", found)
    release = f"{match.group(1)}.{match.group(2)}" if match else found
    if release not in SUPPORTED:
        raise UnsupportedMegatron(
            f"found megatron-core {found}; megatron-resilience supports {' and '.join(f'{r}.x' for r in SUPPORTED)}, because it "
            "reaches into internals that change between releases. Install a supported release "
            f"(pip install 'megatron-core=={SUPPORTED[-1]}.*') or put one first on PYTHONPATH"
        )
    return found


def _importable() -> str:
    # The cheap way to the number: megatron.core's own __init__ takes seconds.
    from importlib.util import find_spec, module_from_spec

    namespace = find_spec("megatron")
    for folder in (namespace.submodule_search_locations or []) if namespace else []:
        from importlib.machinery import PathFinder

        spec = PathFinder.find_spec("megatron.core", [folder])
        if spec is None or not spec.submodule_search_locations:
            continue
        info = PathFinder.find_spec("package_info", list(spec.submodule_search_locations))
        if info is None or info.loader is None:
            continue
        module = module_from_spec(info)
        info.loader.exec_module(module)
        return str(module.__version__)
    raise UnsupportedMegatron(
        f"no megatron.core can be imported; install megatron-core {SUPPORTED[-1]}.x "
        f"(pip install 'megatron-core=={SUPPORTED[-1]}.*') or put a Megatron-LM checkout on PYTHONPATH"
    )
