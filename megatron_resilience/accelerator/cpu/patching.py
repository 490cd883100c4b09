"""Replacing functions of torch and Megatron, wherever they are already imported."""

from __future__ import annotations

import sys
from typing import Any


class Patches:
    """Remembers what was replaced by what, so that earlier ``from x import y`` can be followed up."""

    def __init__(self) -> None:
        # By identity: many of the originals are builtins or classes. The original is kept alive, so that
        # its id stays its own.
        self._replacements: dict[int, tuple[Any, Any]] = {}

    def replace(self, owner: Any, name: str, replacement: Any) -> Any:
        """Sets ``owner.name`` and returns the original.

        Raises:
            AttributeError: ``owner`` has no such attribute; this release of it is not known.
        """
        original = getattr(owner, name)
        setattr(owner, name, replacement)
        if callable(original):
            self._replacements[id(original)] = (original, replacement)
        return original

    def replace_where_present(self, owner: Any, name: str, replacement: Any) -> None:
        """As ``replace``, for names that only some releases have."""
        if hasattr(owner, name):
            self.replace(owner, name, replacement)

    def sweep(self, prefix: str) -> None:
        """Replaces the originals that already imported modules named ``prefix...`` hold as globals."""
        for module_name, module in list(sys.modules.items()):
            if module is None or not module_name.startswith(prefix):
                continue
            for name, value in list(vars(module).items()):
                original, replacement = self._replacements.get(id(value), (None, None))
                if original is not None and value is original:
                    setattr(module, name, replacement)
