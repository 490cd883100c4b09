"""The flags, as a group of their own in the training script's ``--help``, validated together."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import yaml

from megatron_resilience.deadpool.config import DeadpoolConfig, flag_of
from megatron_resilience.errors import ConfigurationError

_HELP = {
    "replicas": "copies of each rank's state in other failure domains: so many nodes may die at once",
    "max_stall_s": "seconds that a step may wait for the protection of the one before",
    "unblock_timeout_s": "seconds after which a rank that does not leave a dead world is killed and started again",
    "hang_timeout_s": "seconds in one step, or without a sign of life, after which the rank that the others wait for is "
    "killed (0: off; at most half of --distributed-timeout-minutes)",
    "on_no_spare": "when a node is lost and no spare is left: stop, or with --hotswap-parallelism shrink to a smaller layout",
    "verify": "compare parameters across replicas by hash before training goes on (true or false)",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the group to Megatron's parser."""
    group = parser.add_argument_group("megatron-resilience")
    group.add_argument(
        "--deadpool",
        action="store_true",
        help="keep training when nodes die (start with megatron-resilience launch)",
    )
    group.add_argument(
        "--deadpool-config",
        type=Path,
        metavar="FILE",
        help="YAML with the settings below, by name without the prefix; a flag overrides it",
    )
    group.add_argument(
        "--hotswap-parallelism",
        action="store_true",
        help="let the parallel layout and the number of ranks change while the job trains (with --deadpool)",
    )
    group.add_argument(
        "--hotswap-exclusive-memory",
        action="store_true",
        help="where both layouts' tensors do not fit on the device together: the old ones leave it before the new layout's "
        "processes start, and come back if the change fails; training stands still meanwhile",
    )
    group.add_argument(
        "--hotswap-fallbacks",
        metavar="LAYOUTS",
        help="with --deadpool-on-no-spare shrink: layouts to try in this order, as `TP2 PP2 DP2, TP2 DP2` (default: TP is kept "
        "first, then PP, then EP)",
    )
    group.add_argument(
        "--hotswap-keep-worlds",
        type=int,
        default=0,
        metavar="N",
        help="keep the processes of the N layouts that were left last, without their device memory: a return to one of them "
        "starts no processes (default: 0)",
    )
    group.add_argument(
        "--hotswap-schedule",
        type=Path,
        metavar="FILE",
        help="YAML, iteration to layout: `100: TP2 PP2 DP2` changes to that layout after iteration 100",
    )
    for setting in fields(DeadpoolConfig):
        kinds: dict[str, Callable[[str], Any]] = {"int": int, "float": float, "bool": _boolean, "str": str}
        group.add_argument(
            flag_of(setting.name),
            dest=_dest(setting.name),
            type=kinds[str(setting.type)],
            metavar="SECONDS" if setting.name.endswith("_s") else "VALUE",
            help=f"{_HELP[setting.name]} (default: {str(setting.default).lower()})",
        )


def config_from(args: argparse.Namespace) -> DeadpoolConfig | None:
    """The settings of a parsed command line; None without ``--deadpool``.

    Raises:
        ConfigurationError: names the flag or file at fault.
    """
    if args.hotswap_keep_worlds < 0:
        raise ConfigurationError(
            f"--hotswap-keep-worlds is {args.hotswap_keep_worlds}: it takes a number of layouts, 0 for none"
        )
    for flag in ("schedule", "fallbacks", "exclusive_memory", "keep_worlds"):
        if getattr(args, f"hotswap_{flag}") not in (None, False, 0) and not args.hotswap_parallelism:
            raise ConfigurationError(
                f"--hotswap-{flag.replace('_', '-')} does nothing without --hotswap-parallelism: add it, or leave both out"
            )
    if args.hotswap_parallelism and not args.deadpool:
        raise ConfigurationError(
            "--hotswap-parallelism moves the copies of the state that --deadpool keeps: add --deadpool (on a single node with "
            "--deadpool-replicas 0)"
        )
    given = {name: getattr(args, _dest(name), None) for name in DeadpoolConfig.names()}
    given = {name: value for name, value in given.items() if value is not None}
    if not args.deadpool:
        if given or args.deadpool_config is not None:
            flags = ", ".join(map(flag_of, given)) or "--deadpool-config"
            raise ConfigurationError(f"{flags} does nothing without --deadpool: add it, or leave them out")
        return None
    config = DeadpoolConfig(**{**_from_file(args.deadpool_config), **given})
    if config.on_no_spare == "shrink" and not args.hotswap_parallelism:
        raise ConfigurationError("--deadpool-on-no-spare shrink changes the layout: add --hotswap-parallelism")
    return config


def _from_file(path: Path | None) -> dict[str, Any]:
    if path is None:
        return {}
    try:
        data = yaml.safe_load(path.read_text()) or {}
    except (OSError, yaml.YAMLError) as error:
        raise ConfigurationError(f"--deadpool-config {path}: {error}") from error
    known = {flag_of(n).removeprefix("--deadpool-").replace("-", "_"): n for n in DeadpoolConfig.names()}
    unknown = sorted(set(data) - set(known)) if isinstance(data, dict) else [str(data)]
    if unknown:
        raise ConfigurationError(
            f"--deadpool-config {path}: unknown setting {', '.join(unknown)}; known are {', '.join(known)}"
        )
    types = {f.name: str(f.type) for f in fields(DeadpoolConfig)}
    for key, value in data.items():
        accepted: dict[str, tuple[type, ...]] = {
            "int": (int,),
            "float": (int, float),
            "bool": (bool,),
            "str": (str,),
        }
        wanted = accepted[types[known[key]]]
        if not isinstance(value, wanted) or (isinstance(value, bool) and types[known[key]] != "bool"):
            raise ConfigurationError(f"--deadpool-config {path}: {key} is {value!r}, expected {types[known[key]]}")
    return {known[key]: value for key, value in data.items()}


def _dest(name: str) -> str:
    return "deadpool_" + name


def _boolean(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise argparse.ArgumentTypeError("expected true or false")
    return text.lower() == "true"
