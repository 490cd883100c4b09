"""The launcher's options. Those that torchrun also has keep torchrun's names. Pure."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import yaml

from megatron_resilience.errors import ConfigurationError

SECRET_VARIABLE = "MEGATRON_RESILIENCE_SECRET"
JOB_VARIABLE = "MEGATRON_RESILIENCE_JOB_DIR"


@dataclass(frozen=True)
class LaunchOptions:
    """What ``megatron-resilience launch`` was asked for.

    Attributes:
        nnodes: agents of the job, spares included.
        spares: of them.
        nproc_per_node: ranks per node.
        node_rank: of this agent; decides who is bound to a slot first. None: taken from Slurm.
        rdzv_endpoint: ``HOST:PORT`` of the first agent; None with ``local_nodes``.
        local_nodes: run all nodes as separate agents on this machine.
        node_addr: address of the interface to use; None: the one that reaches the endpoint.
        max_restarts: faults repaired before the job stops.
        heartbeat_timeout_s: silence after which an agent counts as gone.
        spare_skeletons: for how many slots a spare keeps ranks ready at the door.
        failure_domains: YAML file, name of a rack to its hosts; None: every node is a domain of its own.
        events: file of the event log.
        secret_file: file of mode 0600 with the job's secret.
        job_dir: folder that all nodes see, for secret, events, addresses and outcome; None: there is none.
        script: the training script.
        script_args: its arguments.
    """

    nnodes: int
    spares: int
    nproc_per_node: int
    node_rank: int | None
    rdzv_endpoint: str | None
    local_nodes: bool
    node_addr: str | None
    max_restarts: int
    heartbeat_timeout_s: float
    spare_skeletons: int | None
    failure_domains: Path | None
    events: Path | None
    secret_file: Path | None
    job_dir: Path | None
    script: str
    script_args: tuple[str, ...]

    @property
    def slots(self) -> int:
        """Nodes that train."""
        return self.nnodes - self.spares

    @property
    def world_size(self) -> int:
        """Ranks that train."""
        return self.slots * self.nproc_per_node


def add_arguments(parser: argparse.ArgumentParser, launching: bool = True) -> None:
    """Adds the options of ``launch`` to a parser; without ``launching`` settings may stand for all of them."""
    add = parser.add_argument
    add("--nnodes", type=int, required=launching, help="agents of the job, spares included")
    add("--spares", type=int, default=0, help="how many of them wait as spares")
    add("--nproc-per-node", "--nproc_per_node", type=int, default=1, help="ranks per node")
    add("--node-rank", "--node_rank", type=int, help="of this agent; default: $SLURM_NODEID")
    add(
        "--rdzv-endpoint",
        "--rdzv_endpoint",
        metavar="HOST:PORT",
        help="where the agent of node rank 0 listens",
    )
    add("--local-nodes", action="store_true", help="all nodes as separate agents on this machine")
    add(
        "--node-addr",
        metavar="ADDRESS",
        help="of the interface to use; default: the one that reaches the endpoint",
    )
    add("--max-restarts", "--max_restarts", type=int, default=100, help="faults to repair before giving up")
    add(
        "--heartbeat-timeout",
        type=float,
        default=10.0,
        metavar="SECONDS",
        help="silence of an agent that means it is gone",
    )
    add(
        "--spare-skeletons",
        type=int,
        metavar="SLOTS",
        help="slots for which a spare keeps ranks ready (default: all on CPU, 1 on GPU)",
    )
    add(
        "--failure-domains",
        type=Path,
        metavar="FILE",
        help="YAML, name of a rack to its hosts: copies of a rank's state are kept in other racks (default: other nodes)",
    )
    add("--events", type=Path, metavar="FILE", help="event log, JSON lines")
    add(
        "--secret-file",
        type=Path,
        metavar="FILE",
        help=f"the job's secret, mode 0600 (or ${SECRET_VARIABLE})",
    )
    add(
        "--job-dir",
        type=Path,
        metavar="DIR",
        help=f"folder of this job alone, which all nodes see (or ${JOB_VARIABLE}): brings the secret and the event log, and is "
        "what status, events, drain and swap are given",
    )
    script = (
        "the training script"
        if launching
        else "the training script, or settings: a YAML file, or a name in configs/jobs"
    )
    add("script", help=script)
    add("script_args", nargs=argparse.REMAINDER, help="its arguments")


def from_namespace(args: argparse.Namespace, environment: dict[str, str]) -> LaunchOptions:
    """Validated options.

    Raises:
        ConfigurationError: names the option at fault, what was found, and what to do.
    """
    node_rank = args.node_rank
    if node_rank is None and not args.local_nodes and "SLURM_NODEID" in environment:
        node_rank = int(environment["SLURM_NODEID"])
    options = LaunchOptions(
        nnodes=args.nnodes,
        spares=args.spares,
        nproc_per_node=args.nproc_per_node,
        node_rank=node_rank,
        rdzv_endpoint=args.rdzv_endpoint,
        local_nodes=args.local_nodes,
        node_addr=args.node_addr,
        max_restarts=args.max_restarts,
        heartbeat_timeout_s=args.heartbeat_timeout,
        spare_skeletons=args.spare_skeletons,
        failure_domains=args.failure_domains,
        events=args.events,
        secret_file=args.secret_file,
        job_dir=args.job_dir or (Path(environment[JOB_VARIABLE]) if environment.get(JOB_VARIABLE) else None),
        script=args.script,
        script_args=tuple(args.script_args),
    )
    _validate(options)
    return options


def _validate(options: LaunchOptions) -> None:
    if options.nnodes < 1 or options.nproc_per_node < 1:
        raise ConfigurationError(
            f"--nnodes {options.nnodes} --nproc-per-node {options.nproc_per_node}: both must be at least 1"
        )
    if not 0 <= options.spares < options.nnodes:
        raise ConfigurationError(
            f"--spares is {options.spares} and --nnodes {options.nnodes}: spares are counted in --nnodes, "
            "and at least one node must train"
        )
    if options.local_nodes and options.node_rank is not None:
        raise ConfigurationError("--local-nodes starts every node itself: leave out --node-rank")
    if not options.local_nodes and options.nnodes > 1:
        if options.rdzv_endpoint is None:
            raise ConfigurationError(
                f"--nnodes {options.nnodes} needs --rdzv-endpoint HOST:PORT (the node with --node-rank 0), "
                "or --local-nodes to run all of them here"
            )
        if options.node_rank is None:
            raise ConfigurationError("--node-rank is needed outside Slurm ($SLURM_NODEID is not set)")
    if options.rdzv_endpoint is not None:
        split_endpoint(options.rdzv_endpoint)
    if not Path(options.script).is_file():
        raise ConfigurationError(f"the training script {options.script} is not a file")
    if options.heartbeat_timeout_s <= 0:
        raise ConfigurationError("--heartbeat-timeout must be positive")


def failure_domain(path: Path | None, names: set[str]) -> str:
    """The failure domain of the host that goes by ``names``; empty without a file.

    Raises:
        ConfigurationError: the file is not of the form ``rack: [host, ...]``, or lists the host not exactly once.
    """
    if path is None:
        return ""
    try:
        racks = yaml.safe_load(path.read_text())
    except (OSError, yaml.YAMLError) as error:
        raise ConfigurationError(f"--failure-domains {path}: {error}") from error
    if not isinstance(racks, dict) or not all(isinstance(hosts, list) for hosts in racks.values()):
        raise ConfigurationError(f"--failure-domains {path}: expected lines of the form `rack: [host, ...]`")
    found = [str(rack) for rack, hosts in racks.items() if names & set(map(str, hosts))]
    if len(found) != 1:
        where = f"in {' and '.join(found)}" if found else "in no rack"
        raise ConfigurationError(f"--failure-domains {path}: host {min(names)} is {where}; list it exactly once")
    return found[0]


def split_endpoint(endpoint: str, option: str = "--rdzv-endpoint") -> tuple[str, int]:
    """``HOST:PORT`` taken apart.

    Args:
        option: that it was given with.

    Raises:
        ConfigurationError: it is not of that form.
    """
    host, colon, port = endpoint.rpartition(":")
    if not colon or not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ConfigurationError(f"{option} {endpoint}: expected HOST:PORT with a port from 1 to 65535")
    return host, int(port)
