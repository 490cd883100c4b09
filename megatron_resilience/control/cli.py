"""``megatron-resilience COMMAND``."""

from __future__ import annotations

import argparse
import os
import sys

from megatron_resilience.control import options as launch_options
from megatron_resilience.errors import ResilienceError
from megatron_resilience.routing import command as plan
from megatron_resilience.version import __version__

USER_ERROR = 2


def main(argv: list[str] | None = None) -> int:
    """Runs a command; exit status 0 when it did what was asked, 2 when it was asked for something impossible."""
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
    args = parser.parse_args(argv)
    try:
        if args.command == "plan":
            return plan.run(args)
        if args.command == "launch":
            from megatron_resilience.control.launcher import launch as run

            return run(launch_options.from_namespace(args, dict(os.environ)))
    except ResilienceError as error:
        print(f"megatron-resilience: {error}", file=sys.stderr)
        return USER_ERROR
    raise AssertionError(args.command)


if __name__ == "__main__":
    sys.exit(main())
