"""Adds the flags to Megatron's parser, and switches on when they are used."""

from __future__ import annotations

import argparse
import functools
import os
from collections.abc import Sequence
from typing import Any

import torch
from megatron.training import arguments as megatron_arguments

from megatron_resilience.arguments import add_arguments, config_from
from megatron_resilience.control.link import AgentLink
from megatron_resilience.errors import ConfigurationError
from megatron_resilience.megatron_adapter import versions
from megatron_resilience.megatron_adapter.options import refusals, unclassified

TRACE = "MEGATRON_RESILIENCE_TRACE"
"""Environment variable with the folder for a trace of every step (``observe.trace``), for comparing two runs bit by bit."""
_active = False
_traced = False


def install() -> None:
    """Wraps Megatron's ``add_megatron_arguments``; idempotent. Nothing else is touched until a flag is used."""
    original = megatron_arguments.add_megatron_arguments
    if hasattr(original, "resilience"):
        return

    @functools.wraps(original)
    def add_megatron_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        others = {action.dest for action in parser._actions}
        parser = original(parser)
        own = [action for action in parser._actions if action.dest not in others]
        add_arguments(parser)
        _mend_help(parser)
        _after_parsing(parser, own)
        return parser

    add_megatron_arguments.resilience = True  # type: ignore[attr-defined]
    megatron_arguments.add_megatron_arguments = add_megatron_arguments


def _mend_help(parser: argparse.ArgumentParser) -> None:
    """Escapes per cent signs that argparse cannot format: one of Megatron 0.19's own makes ``--help`` crash."""
    for action in parser._actions:
        try:
            _ = (action.help or "") % {**vars(action), "prog": parser.prog}
        except (ValueError, TypeError, KeyError):
            action.help = (action.help or "").replace("%", "%%")


def _after_parsing(parser: argparse.ArgumentParser, megatrons: Sequence[argparse.Action]) -> None:
    # parse_args() of argparse ends in parse_known_args(): one place serves both of Megatron's ways.
    parse = parser.parse_known_args

    def parse_known_args(*args: Any, **kwargs: Any) -> Any:
        namespace, rest = parse(*args, **kwargs)
        activate(namespace, megatrons)
        _trace_if_asked()
        return namespace, rest

    parser.parse_known_args = parse_known_args  # type: ignore[method-assign]


def _trace_if_asked() -> None:
    """For scripts that have no option of their own for it: the environment says where the trace goes."""
    global _traced
    directory = os.environ.get(TRACE)
    if directory and not _traced:
        from megatron_resilience.megatron_adapter import trace

        trace.install(directory)
        _traced = True


def activate(args: argparse.Namespace, megatrons: Sequence[argparse.Action]) -> None:
    """Switches on what the command line asks for.

    Args:
        args: parsed.
        megatrons: the options of Megatron's own parser.

    Raises:
        ConfigurationError: it cannot work; nothing was touched.
    """
    global _active
    config = config_from(args)
    # Megatron may parse more than once in a process.
    if config is None or _active:
        return
    release = versions.check()
    versions.check_torch(torch.__version__)
    problems = refusals(args) + unclassified(args, megatrons, release)
    if problems:
        raise ConfigurationError("--deadpool cannot protect this run:\n  - " + "\n  - ".join(problems))
    link = AgentLink.from_environment()
    if link is None:
        raise ConfigurationError(
            "--deadpool needs node agents: start the script with `megatron-resilience launch ...` instead of torchrun"
        )
    from megatron_resilience.megatron_adapter import loop, torch_adam

    torch_adam.install()
    loop.install(config, link, args)
    _active = True
