"""What is to run, as far as protection depends on it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import yaml

from megatron_resilience.deadpool.config import DeadpoolConfig, flag_of
from megatron_resilience.errors import ConfigurationError
from megatron_resilience.files import folder
from megatron_resilience.hotswap.schedule import bare, parse_entry
from megatron_resilience.vps.catalogue import Catalogue
from megatron_resilience.vps.families import load_model
from megatron_resilience.vps.layout import Layout, parse_layout

GIB = 2**30


@dataclass(frozen=True)
class Hardware:
    """Of one node; None: not known, and not judged.

    Attributes:
        device_memory_gib: of each device.
        host_memory_gib: of the node, what a job may use.
        network_gbytes_s: of the node, one way, on the interface that carries copies (10^9 bytes a second).
        host_link_gbytes_s: of each device, to the host.
    """

    device_memory_gib: float | None = None
    host_memory_gib: float | None = None
    network_gbytes_s: float | None = None
    host_link_gbytes_s: float | None = None


@dataclass(frozen=True)
class Job:
    """See the module.

    Attributes:
        name: for people.
        catalogue: the model.
        layout: its layout.
        nodes: that train.
        spares: that wait.
        ranks_per_node: on each.
        hardware: of a node.
        deadpool: the settings of protection.
        heartbeat_s: ``launch --heartbeat-timeout``.
        distributed_timeout_s: Megatron's ``--distributed-timeout-minutes``, in seconds.
        sharded_optimizer: with ``--use-distributed-optimizer``.
        parameter_bytes: of a parameter on the device.
        gradient_bytes: of a gradient.
        step_seconds: of one step; None: not known.
        domains: failure domain of each node; empty: each its own.
        changes: layouts that it is to change to, in order.
        exclusive_memory: with ``--hotswap-exclusive-memory``.
        keep_worlds: of ``--hotswap-keep-worlds``.
    """

    name: str
    catalogue: Catalogue
    layout: Layout
    nodes: int
    spares: int
    ranks_per_node: int
    hardware: Hardware = Hardware()
    deadpool: DeadpoolConfig = field(default_factory=DeadpoolConfig)
    heartbeat_s: float = 10.0
    distributed_timeout_s: float = 600.0
    sharded_optimizer: bool = True
    parameter_bytes: int = 2
    gradient_bytes: int = 4
    step_seconds: float | None = None
    domains: tuple[str, ...] = ()
    changes: tuple[Layout, ...] = ()
    exclusive_memory: bool = False
    keep_worlds: int = 0

    @property
    def world_size(self) -> int:
        """Ranks that train."""
        return self.nodes * self.ranks_per_node


_TOP = {"model", "layout", "nodes", "spares", "ranks_per_node", "hardware", "deadpool", "heartbeat_timeout"}
_TOP |= {"distributed_timeout_minutes", "step_seconds", "parameter_bytes", "gradient_bytes", "distributed_optimizer"}
_TOP |= {"changes", "exclusive_memory", "keep_worlds"}
_NEEDED = ("model", "layout", "nodes", "ranks_per_node")


def known_jobs() -> list[str]:
    """Names of the ready settings."""
    return sorted(path.stem for path in (folder("configs") / "jobs").glob("*.yaml"))


def load_job(name_or_file: str) -> Job:
    """A job of ``configs/jobs`` or of a YAML file.

    Raises:
        ConfigurationError: names the file and the key at fault.
    """
    path = Path(name_or_file)
    if not path.is_file():
        path = folder("configs") / "jobs" / f"{name_or_file}.yaml"
    if not path.is_file():
        raise ConfigurationError(f"no settings {name_or_file!r}: give a YAML file, or one of {', '.join(known_jobs())}")
    try:
        data = yaml.safe_load(path.read_text()) or {}
    except yaml.YAMLError as error:
        raise ConfigurationError(f"{path}: {error}") from error
    _check_keys(path, "", data, _TOP)
    missing = [key for key in _NEEDED if key not in data]
    if missing:
        raise ConfigurationError(f"{path}: {', '.join(missing)} missing")
    try:
        layout = parse_layout(str(data["layout"]))
        return Job(
            name=path.stem,
            catalogue=load_model(str(data["model"])),
            layout=layout,
            nodes=int(data["nodes"]),
            spares=int(data.get("spares", 0)),
            ranks_per_node=int(data["ranks_per_node"]),
            hardware=hardware_from(path, data.get("hardware", {})),
            deadpool=_deadpool(path, data.get("deadpool", {})),
            heartbeat_s=float(data.get("heartbeat_timeout", 10.0)),
            distributed_timeout_s=60.0 * float(data.get("distributed_timeout_minutes", 10)),
            sharded_optimizer=bool(data.get("distributed_optimizer", True)),
            parameter_bytes=int(data.get("parameter_bytes", 2)),
            gradient_bytes=int(data.get("gradient_bytes", 4)),
            step_seconds=None if data.get("step_seconds") is None else float(data["step_seconds"]),
            changes=tuple(parse_entry(entry, bare(layout), f"{path}: changes") for entry in data.get("changes", ())),
            exclusive_memory=bool(data.get("exclusive_memory", False)),
            keep_worlds=int(data.get("keep_worlds", 0)),
        )
    except ValueError as error:
        raise ConfigurationError(f"{path}: {error}") from error


def load_hardware(path: Path) -> Hardware:
    """A node from a YAML file with :class:`Hardware`'s fields.

    Raises:
        ConfigurationError: names the file and the key at fault.
    """
    try:
        return hardware_from(path, yaml.safe_load(path.read_text()) or {})
    except (OSError, yaml.YAMLError) as error:
        raise ConfigurationError(f"--hardware {path}: {error}") from error


def hardware_from(path: Path, data: Mapping[str, Any]) -> Hardware:
    """A node from a mapping. Raises as :func:`load_hardware`."""
    _check_keys(path, "hardware.", data, {f.name for f in fields(Hardware)})
    return Hardware(**{key: float(value) for key, value in data.items()})


def _deadpool(path: Path, data: Mapping[str, Any]) -> DeadpoolConfig:
    known = {flag_of(n).removeprefix("--deadpool-").replace("-", "_"): n for n in DeadpoolConfig.names()}
    _check_keys(path, "deadpool.", data, set(known))
    return DeadpoolConfig(**{known[key]: value for key, value in data.items()})


def _check_keys(path: Path, prefix: str, data: Any, known: set[str]) -> None:
    if not isinstance(data, Mapping):
        raise ConfigurationError(f"{path}: {prefix or 'the file '}is {data!r}, expected a mapping")
    unknown = sorted(set(data) - known)
    if unknown:
        raise ConfigurationError(
            f"{path}: unknown {', '.join(prefix + k for k in unknown)}; known: {', '.join(sorted(known))}"
        )
