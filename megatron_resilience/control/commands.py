"""``status``, ``events``, ``drain``, ``swap``, ``reshard`` and ``outcome``: people and a job. What they exit with: ``exits``.

``outcome`` alone exits with the job's own status, so that a batch script can.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_resilience.control.client import Address, Client
from megatron_resilience.control.jobdir import JobDir, read_secret
from megatron_resilience.control.options import JOB_VARIABLE, SECRET_VARIABLE, split_endpoint
from megatron_resilience.control.status import text as status_text
from megatron_resilience.errors import ConfigurationError, ControlError
from megatron_resilience.exits import DONE, FAILED, IMPOSSIBLE
from megatron_resilience.observe.events import line, read_events

_POLL_S = 0.2
_CLEAR = "\033[H\033[J"


def add_commands(commands: Any) -> dict[str, Callable[[argparse.Namespace], int]]:
    """Adds the commands to a parser's; returns what runs each."""
    status = commands.add_parser("status", help="how a running job is: nodes, spares, what is protected")
    _add_job(status)
    status.add_argument("--watch", action="store_true", help="again every second, until interrupted")
    status.add_argument("--json", action="store_true", help="as one JSON object a look")
    events = commands.add_parser("events", help="what has happened to a job, running or ended")
    _add_folder(events)
    events.add_argument(
        "--events", type=Path, metavar="FILE", help="the log that launch --events wrote, instead of --job-dir"
    )
    events.add_argument(
        "--kind", action="append", metavar="KIND", help="only these, such as recovered; may be repeated"
    )
    events.add_argument("--follow", action="store_true", help="and what happens from now on, until interrupted")
    events.add_argument("--json", action="store_true", help="as JSON lines, with every field")
    for name, what in (("drain", "takes a node out of the job, for good"), ("swap", "gives a node's slot to a spare")):
        command = commands.add_parser(
            name, help=what, description=f"{what}; training goes on, bit for bit".capitalize()
        )
        _add_job(command)
        command.add_argument("node", metavar="NODE", help="its id as in status, or its host's name")
        command.add_argument("--no-wait", action="store_true", help="do not wait until the job trains again")
    reshard = commands.add_parser(
        "reshard",
        help="changes the parallel layout of a running job",
        description="Training goes on until it is ready.",
    )
    _add_job(reshard)
    for name in ("tp", "pp", "dp", "cp", "ep", "etp", "vpp"):
        reshard.add_argument(f"--{name}", type=int, metavar="N", help=f"{name.upper()} (default: 1)")
    reshard.add_argument("--nodes", nargs="+", default=[], metavar="NODE", help="to train on, in this order")
    reshard.add_argument(
        "--at-iteration", type=int, default=0, metavar="N", help="after which (default: when it is ready)"
    )
    reshard.add_argument("--dry-run", action="store_true", help="only say whether it can be")
    reshard.add_argument("--no-wait", action="store_true", help="do not wait until the job trains in it")
    outcome = commands.add_parser("outcome", help="exits with the status that a job ended with, and says why")
    _add_folder(outcome)
    return {
        "status": _status,
        "events": _events,
        "drain": _move,
        "swap": _move,
        "reshard": _reshard,
        "outcome": _outcome,
    }


def _add_folder(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--job-dir", type=Path, metavar="DIR", help=f"the one that launch was given (or ${JOB_VARIABLE})"
    )


def _add_job(parser: argparse.ArgumentParser) -> None:
    _add_folder(parser)
    parser.add_argument("--agent", metavar="HOST:PORT", help="where any agent of the job listens, instead of --job-dir")
    parser.add_argument(
        "--secret-file", type=Path, metavar="FILE", help=f"the job's, if it is not in --job-dir (or ${SECRET_VARIABLE})"
    )


def _folder(args: argparse.Namespace) -> Path | None:
    named = os.environ.get(JOB_VARIABLE)
    return args.job_dir or (Path(named) if named else None)


def _job_dir(args: argparse.Namespace) -> JobDir:
    folder = _folder(args)
    if folder is None:
        raise ConfigurationError(
            f"which job? --job-dir DIR (or ${JOB_VARIABLE}) names the folder that launch was given"
        )
    if not folder.is_dir():
        raise ConfigurationError(f"--job-dir {folder} is not a folder: the job has not begun, or ran with another")
    return JobDir(folder)


def _client(args: argparse.Namespace) -> Client:
    # In the same order as launch.
    secret = None
    if args.secret_file is not None:
        secret = read_secret(args.secret_file, f"--secret-file {args.secret_file}")
    elif os.environ.get(SECRET_VARIABLE):
        secret = os.environ[SECRET_VARIABLE].encode()
    if args.agent:
        address: Address = split_endpoint(args.agent, "--agent")
        if secret is None:
            raise ConfigurationError(
                f"--agent {args.agent}: the job's secret is needed, --secret-file FILE or ${SECRET_VARIABLE}"
            )
        return Client(lambda: [address], secret)
    folder = _job_dir(args)
    ended = folder.outcome()
    if ended is not None:
        raise ControlError(f"the job has ended with status {ended[0]}{': ' if ended[1] else ''}{ended[1]}")
    return Client(folder.read_agents, secret or folder.secret(create=False))


def _status(args: argparse.Namespace) -> int:
    client = _client(args)
    while True:
        now = client.ask("status")["status"]
        print(
            f"{_CLEAR if args.watch and not args.json else ''}{json.dumps(now) if args.json else status_text(now)}",
            flush=True,
        )
        if not args.watch:
            return DONE
        time.sleep(1.0)


def _move(args: argparse.Namespace) -> int:
    client = _client(args)
    before = client.ask("status")["status"]
    answer = client.ask(args.command, node=args.node)
    if not answer["done"]:
        now = client.ask("status")["status"]
        if now["epoch"] == before["epoch"] or args.node in [slot["node"] for slot in now["slots"]]:
            print(f"megatron-resilience: {answer['text']}", file=sys.stderr)
            return IMPOSSIBLE
        # The agent that led took it, and died before it could say so.
        answer = {"text": now["cause"], "epoch": now["epoch"]}
    print(answer["text"])
    if args.no_wait or not answer["epoch"]:
        return DONE
    return _wait(client, answer["epoch"])


def _reshard(args: argparse.Namespace) -> int:
    sizes = {name: getattr(args, name) for name in ("tp", "pp", "dp", "cp", "ep", "etp", "vpp")}
    layout = " ".join(f"{name.upper()}{size}" for name, size in sizes.items() if size is not None)
    if not layout:
        raise ConfigurationError("reshard: which layout? give at least one of --tp, --pp, --dp, --ep ...")
    client = _client(args)
    asked = {"layout": layout, "at": args.at_iteration, "nodes": args.nodes, "dry_run": args.dry_run}
    answer = client.ask("reshard", **asked)
    if not answer["done"]:
        print(f"megatron-resilience: {answer['text']}", file=sys.stderr)
        return IMPOSSIBLE
    print(answer["text"])
    while answer["epoch"] and not args.no_wait:
        try:
            now = client.ask("status")["status"]
        except ControlError as error:
            print(f"megatron-resilience: {error}", file=sys.stderr)
            return FAILED
        if now["switch"] is None:
            if now["epoch"] == answer["epoch"]:
                print(f"training goes on in layout {now['layout']}")
                return DONE
            print(f"megatron-resilience: it was given up, training goes on as it was ({now['cause']})", file=sys.stderr)
            return FAILED
        time.sleep(_POLL_S)
    return DONE


def _wait(client: Client, epoch: int) -> int:
    """Until the job trains in an epoch, or a later one."""
    while True:
        try:
            now = client.ask("status")["status"]
        except ControlError as error:
            print(f"megatron-resilience: {error}", file=sys.stderr)
            return FAILED
        last = now["recovery"]
        if last is not None and last["epoch"] >= epoch:
            print(
                f"training goes on from generation {last['generation']} after {sum(last['seconds'].values()):.2f} s, "
                f"{last['steps_again']} steps were done again"
            )
            return DONE
        time.sleep(_POLL_S)


def _events(args: argparse.Namespace) -> int:
    path = args.events
    if path is None:
        path = _job_dir(args).path / "events"
    if not path.exists():
        raise ConfigurationError(
            f"{path} does not exist: the job has not begun, or ran with another --job-dir or --events"
        )
    shown: set[str] = set()
    while True:
        for event in read_events(path):
            text = json.dumps(event)
            if text not in shown and (not args.kind or event["kind"] in args.kind):
                print(text if args.json else line(event), flush=True)
            shown.add(text)
        if not args.follow:
            return DONE
        time.sleep(_POLL_S)


def _outcome(args: argparse.Namespace) -> int:
    ended = _job_dir(args).outcome()
    if ended is None:
        print(
            "megatron-resilience: the job runs, or all its agents died before they could say how it ended",
            file=sys.stderr,
        )
        return FAILED
    print(f"ended with status {ended[0]}{': ' if ended[1] else ''}{ended[1]}")
    return ended[0]
