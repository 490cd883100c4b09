"""Reads the node's NVIDIA devices through nvidia-ml-py. Where there is no driver there is nothing to read."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from typing import Any

from megatron_resilience.control.health import Reading


class Devices:
    """The devices that this job may use: those of ``CUDA_VISIBLE_DEVICES``, or all that the driver shows.

    Not thread-safe; the event set belongs to whoever calls :meth:`read`.
    """

    def __init__(self, nvml: Any, environment: Mapping[str, str]) -> None:
        self._nvml = nvml
        self._handles: dict[str, Any] = {}
        for index in range(nvml.nvmlDeviceGetCount()):
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            uuid = nvml.nvmlDeviceGetUUID(handle)
            if _visible(index, uuid, environment.get("CUDA_VISIBLE_DEVICES")):
                self._handles[f"device {index} ({uuid})"] = handle
        self._by_uuid = {nvml.nvmlDeviceGetUUID(handle): name for name, handle in self._handles.items()}
        self._events = nvml.nvmlEventSetCreate()
        for handle in self._handles.values():
            self._quietly(nvml.nvmlDeviceRegisterEvents, handle, nvml.nvmlEventTypeXidCriticalError, self._events)

    @classmethod
    def open(cls) -> Devices | None:
        """The devices of this machine; None without a driver, or without nvidia-ml-py."""
        try:
            import pynvml

            pynvml.nvmlInit()
        except ImportError:
            return None
        except pynvml.NVMLError:
            return None
        try:
            found = cls(pynvml, os.environ)
        except pynvml.NVMLError:
            return None
        return found if found._handles else None

    def read(self) -> list[Reading]:
        """One look at every device. Returns at once."""
        xids = self._xids()
        return [self._read(name, handle, tuple(xids.get(name, ()))) for name, handle in self._handles.items()]

    def _read(self, name: str, handle: Any, xids: tuple[int, ...]) -> Reading:
        nvml = self._nvml
        try:
            # What every device has: only one that is lost refuses it.
            temperature = nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)
        except (nvml.NVMLError_GpuIsLost, nvml.NVMLError_Unknown):
            return Reading(name, lost=True, xids=xids)
        except nvml.NVMLError:
            temperature = None
        uncorrected = (nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC)
        rows = self._quietly(nvml.nvmlDeviceGetRemappedRows, handle)
        limit = nvml.NVML_TEMPERATURE_THRESHOLD_SHUTDOWN
        return Reading(
            name,
            xids=xids,
            uncorrected=self._quietly(nvml.nvmlDeviceGetTotalEccErrors, handle, *uncorrected),
            remap_failed=None if rows is None else bool(rows[3]),
            links=self._links(handle),
            temperature_c=temperature,
            shutdown_c=self._quietly(nvml.nvmlDeviceGetTemperatureThreshold, handle, limit),
        )

    def _links(self, handle: Any) -> int | None:
        states = [
            self._quietly(self._nvml.nvmlDeviceGetNvLinkState, handle, link)
            for link in range(self._nvml.NVML_NVLINK_MAX_LINKS)
        ]
        known = [state for state in states if state is not None]
        return sum(known) if known else None

    def _xids(self) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        # It raises when nothing has happened.
        with contextlib.suppress(self._nvml.NVMLError):
            while True:
                event = self._nvml.nvmlEventSetWait_v2(self._events, 0)
                name = self._by_uuid.get(self._quietly(self._nvml.nvmlDeviceGetUUID, event.device))
                if name is not None:
                    found.setdefault(name, []).append(int(event.eventData))
        return found

    def _quietly(self, function: Callable[..., Any], *args: Any) -> Any:
        """The function's value, or None where the device does not support it."""
        try:
            return function(*args)
        except self._nvml.NVMLError:
            return None


def _visible(index: int, uuid: str, chosen: str | None) -> bool:
    if chosen is None:
        return True
    return any(
        part in (str(index), uuid) or (part.startswith("GPU-") and uuid.startswith(part)) for part in chosen.split(",")
    )
