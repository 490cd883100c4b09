"""``megatron-resilience COMMAND``."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable

from megatron_resilience import exits, patch
from megatron_resilience.control import commands as people
from megatron_resilience.control import options as launch_options
from megatron_resilience.errors import ControlError, ResilienceError
from megatron_resilience.preflight import command as preflight
from megatron_resilience.routing import command as plan
from megatron_resilience.version import __version__

Run = Callable[[argparse.Namespace], int]


def build_parser() -> tuple[argparse.ArgumentParser, dict[str, Run]]:
    """The parser of all commands, and what runs each but ``launch``."""
    parser = argparse.ArgumentParser(prog="megatron-resilience", description=__doc__)
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    launch = commands.add_parser(
        "launch",
        help="run a training script on nodes that may die",
        description="Runs a Megatron training script; one launcher per node.",
    )
    launch_options.add_arguments(launch)
    planner = commands.add_parser("plan", help="what a change of layout would move and cost, offline")
    plan.add_arguments(planner)
    patch.add_arguments(
        commands.add_parser("patch", help="put the import line into a Megatron-LM checkout", description=patch.__doc__)
    )
    preflight.add_arguments(
        commands.add_parser(
            "preflight", help="what protection will take, and whether it will hold", description=preflight.__doc__
        )
    )
    run_by_name = people.add_commands(commands) | {"plan": plan.run, "patch": patch.run, "preflight": preflight.run}
    return parser, run_by_name


def main(argv: list[str] | None = None) -> int:
    """Runs a command; returns one of :mod:`~megatron_resilience.exits`."""
    parser, run_by_name = build_parser()
    args = parser.parse_args(argv)
    try:
        if args.command in run_by_name:
            return _ask(run_by_name[args.command], args)
        if args.command == "launch":
            from megatron_resilience.control.launcher import launch as run

            return run(launch_options.from_namespace(args, dict(os.environ)))
    except ResilienceError as error:
        print(f"megatron-resilience: {error}", file=sys.stderr)
        return exits.IMPOSSIBLE
    raise AssertionError(args.command)


def _ask(run: Run, args: argparse.Namespace) -> int:
    try:
        return run(args)
    except ControlError as error:
        print(f"megatron-resilience: {error}", file=sys.stderr)
        return exits.UNREACHABLE
    except BrokenPipeError:
        # `| head` has seen enough; nothing may be flushed into it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return exits.DONE
    except KeyboardInterrupt:
        return exits.DONE


if __name__ == "__main__":
    sys.exit(main())
