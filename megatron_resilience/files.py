"""Folders of the repository that are installed with the package: ``configs`` and ``patches``."""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).parent


def folder(name: str) -> Path:
    """``configs`` or ``patches``: the repository's own, or the copy in an installed package (see setup.py)."""
    beside = _PACKAGE.parent / name
    # Some other `configs` may lie beside an installed package.
    return beside if (_PACKAGE.parent / "setup.py").is_file() and beside.is_dir() else _PACKAGE / name
