"""Taking the old backends out of a living ProcessGroup, so that an epoch that is over leaves nothing behind.

torch lets a backend be added to a group, never taken out: each exchange would keep the threads and sockets of all groups
alive. ``c10d::ProcessGroup::release_resources`` empties the group; it is exported by libtorch and bound to no Python name, so it
is called by its symbol. Before that, the object at hand is recognised by the symbol of its virtual table; where
that is not what is expected (another torch, another interpreter), nothing is called and groups grow with each epoch.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sysconfig
from typing import Any

import torch
import torch.distributed as dist

_RELEASE = "_ZN4c10d12ProcessGroup17release_resourcesEv"
_VIRTUAL_TABLE = b"_ZTVN4c10d12ProcessGroupE"
_OBJECT_HEAD = 2 * ctypes.sizeof(ctypes.c_void_p)
"""Bytes before an instance's value pointer (pybind11's ``instance``, after CPython's object head)."""


class _SymbolInfo(ctypes.Structure):
    _fields_ = (
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    )


def release(group: Any) -> bool:
    """Takes every backend out of a group; the caller registers new ones at once.

    Returns:
        False where this torch does not allow it; the group is then untouched.
    """
    function, pointer = _function(), _pointer(group)
    if function is None or pointer is None:
        return False
    function(pointer)
    return True


@functools.cache
def _function() -> Any:
    library = os.path.join(os.path.dirname(torch.__file__), "lib", "libtorch_cpu.so")
    if sysconfig.get_config_var("Py_GIL_DISABLED") or not os.path.exists(library):
        return None
    try:
        function = ctypes.CDLL(library)[_RELEASE]
    except (OSError, AttributeError):
        return None
    function.argtypes, function.restype = [ctypes.c_void_p], None
    return function


def _pointer(group: Any) -> int | None:
    """Address of the C++ object, if it certainly is a plain ``c10d::ProcessGroup``."""
    if type(group) is not dist.ProcessGroup:
        return None
    address = ctypes.c_void_p.from_address(id(group) + _OBJECT_HEAD).value
    if not address:
        return None
    table = ctypes.c_void_p.from_address(address).value
    info = _SymbolInfo()
    look_up = ctypes.CDLL(None).dladdr
    look_up.argtypes = [ctypes.c_void_p, ctypes.POINTER(_SymbolInfo)]
    return address if look_up(table, ctypes.byref(info)) and info.name == _VIRTUAL_TABLE else None
