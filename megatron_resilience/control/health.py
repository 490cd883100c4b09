"""What a node's devices say of themselves, and whether it is time to leave the node. Pure; :mod:`nvml` reads them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

FATAL_XIDS = {
    48: "uncorrectable memory error",
    62: "the internal micro-controller halted",
    64: "a row could not be remapped",
    74: "NVLink error",
    79: "the device has fallen off the bus",
    95: "uncontained memory error",
    119: "the GSP does not answer",
    120: "the GSP failed",
    140: "unrecovered memory error",
}
"""Those of NVIDIA's catalogue whose remedy is to reset or to replace the device. Others (13, 31, 43) a program can cause."""


@dataclass(frozen=True)
class Reading:
    """One look at one device. None: it does not say.

    Attributes:
        name: index and identity, for people.
        lost: the driver cannot reach it any more.
        xids: errors that the driver has reported since the last look.
        uncorrected: memory errors since the driver was loaded that could not be corrected.
        remap_failed: a bad row of memory could not be replaced.
        links: NVLinks that are up.
        temperature_c, shutdown_c: in degrees Celsius; at the second it switches itself off.
    """

    name: str
    lost: bool = False
    xids: tuple[int, ...] = ()
    uncorrected: int | None = None
    remap_failed: bool | None = None
    links: int | None = None
    temperature_c: int | None = None
    shutdown_c: int | None = None


@dataclass(frozen=True)
class Ailment:
    """Something wrong with a device. ``grave``: it will not mend by itself, the node is to be left."""

    grave: bool
    text: str


def judge(before: Sequence[Reading], now: Sequence[Reading]) -> list[Ailment]:
    """What has gone wrong between two looks; after the first look ``before`` is empty.

    What is only bad compared with another look (errors counted, links) is not news at the first.
    """
    earlier = {reading.name: reading for reading in before}
    found = [Ailment(True, f"{name}: lost") for name in earlier.keys() - {reading.name for reading in now}]
    for reading in now:
        old = earlier.get(reading.name)
        if reading.lost and not (old and old.lost):
            found.append(Ailment(True, f"{reading.name}: lost, the driver cannot reach it"))
        for xid in reading.xids:
            what = FATAL_XIDS.get(xid)
            found.append(Ailment(what is not None, f"{reading.name}: XID {xid}" + (f", {what}" if what else "")))
        if reading.remap_failed and not (old and old.remap_failed):
            found.append(Ailment(True, f"{reading.name}: a bad row of its memory cannot be replaced"))
        if old is not None:
            found += _compared(old, reading)
    return found


def _compared(old: Reading, now: Reading) -> list[Ailment]:
    found = []
    if old.uncorrected is not None and now.uncorrected is not None and now.uncorrected > old.uncorrected:
        more = now.uncorrected - old.uncorrected
        found.append(Ailment(True, f"{now.name}: {more} memory errors that could not be corrected"))
    if old.links is not None and now.links is not None and now.links < old.links:
        found.append(Ailment(True, f"{now.name}: {now.links} of {old.links} NVLinks are up"))
    if _hot(now) and not _hot(old):
        found.append(
            Ailment(False, f"{now.name}: {now.temperature_c} degrees, it switches itself off at {now.shutdown_c}")
        )
    return found


def _hot(reading: Reading) -> bool:
    return (
        reading.temperature_c is not None
        and reading.shutdown_c is not None
        and reading.temperature_c >= reading.shutdown_c - 5
    )
