"""Starts this node's agent, or with ``--local-nodes`` all of them on this machine."""

from __future__ import annotations

import os
import secrets
import signal
import sys
import time
import traceback
from typing import NoReturn

from megatron_resilience import exits
from megatron_resilience.control.addresses import bind
from megatron_resilience.control.agent import be_local_node, run_agent
from megatron_resilience.control.jobdir import JobDir, read_secret
from megatron_resilience.control.options import SECRET_VARIABLE, LaunchOptions, split_endpoint
from megatron_resilience.control.zygote import preload
from megatron_resilience.errors import ConfigurationError, ResilienceError
from megatron_resilience.transport.environment import problems

_GRACE_S = 10.0


def launch(options: LaunchOptions) -> int:
    """Runs the job's part on this machine; returns the exit status.

    Raises:
        ResilienceError: it cannot start; the message is for the user.
    """
    if options.nproc_per_node > 1:
        # As torchrun does; it must stand before torch is loaded, and ranks are forked from here.
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    unsafe = problems(os.environ) if "--deadpool" in options.script_args else []
    if unsafe:
        raise ConfigurationError("--deadpool cannot protect this run:\n  - " + "\n  - ".join(unsafe))
    if options.job_dir is not None:
        JobDir(options.job_dir).prepare()
    secret = job_secret(options)
    _check_writable(options)
    if options.local_nodes:
        return _launch_local(options, secret)
    _preload(options)
    return run_agent(options, options.node_rank or 0, secret)


def job_secret(options: LaunchOptions) -> bytes:
    """The secret that agents prove to each other.

    Raises:
        ConfigurationError: none was given for a job of several launchers, or its file is readable by others.
    """
    if options.secret_file is not None:
        return read_secret(options.secret_file, f"--secret-file {options.secret_file}")
    if SECRET_VARIABLE in os.environ:
        return os.environ[SECRET_VARIABLE].encode()
    if options.job_dir is not None:
        return JobDir(options.job_dir).secret()
    if options.local_nodes or options.nnodes == 1:
        return secrets.token_bytes(32)
    raise ConfigurationError(
        "a job of several nodes needs a secret that all its agents share: --job-dir DIR (a folder that all of them see), "
        f"--secret-file FILE (mode 0600), or {SECRET_VARIABLE}"
    )


def _check_writable(options: LaunchOptions) -> None:
    if options.events is None:
        return
    folder = options.events.parent
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise ConfigurationError(f"--events {options.events}: the folder {folder} does not exist or is not writable")


def _launch_local(options: LaunchOptions, secret: bytes) -> int:
    """Agents as children; this process only waits for them.

    Their output is this process's own. It imports what ranks need once, so that all nodes fork from it.
    """
    host, port = split_endpoint(options.rdzv_endpoint) if options.rdzv_endpoint else ("127.0.0.1", 0)
    listener = bind(host, port)
    endpoint = listener.getsockname()[:2]
    _preload(options)
    agents, launcher = {}, os.getpid()
    for order in range(options.nnodes):
        pid = os.fork()
        if pid == 0:
            _be_agent(options, order, secret, endpoint, listener, launcher)
        agents[pid] = order
    listener.close()
    return _wait(agents)


def _preload(options: LaunchOptions) -> None:
    """Imports what ranks need, before any agent has a connection: on a cold file system it takes longer than a heartbeat."""
    sys.path.insert(0, os.path.dirname(os.path.abspath(options.script)))
    preload()


def _be_agent(options, order, secret, endpoint, listener, launcher) -> NoReturn:
    status = exits.FAILED
    try:
        be_local_node(launcher)
        if order != 0:
            listener.close()
        status = run_agent(options, order, secret, endpoint, listener if order == 0 else None)
    except ResilienceError as error:
        print(f"[megatron-resilience] {error}", file=sys.stderr, flush=True)
        status = exits.IMPOSSIBLE
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(status)


def _wait(agents: dict[int, int]) -> int:
    """Waits for the agents. The job's status is that of the last agent that ended by itself."""
    stopping = False

    def forward(signum: int, _: object) -> None:
        nonlocal stopping
        stopping = True
        for pid in agents:
            try:
                os.kill(pid, signal.SIGTERM if signum == signal.SIGTERM else signal.SIGINT)
            except ProcessLookupError:
                continue

    # To end in good order, as SIGTERM asks for, takes a while; who is in a hurry interrupts.
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, forward)
    status, died = 0, None
    patience = None
    while agents:
        pid, raw = os.waitpid(-1, 0 if patience is None else os.WNOHANG)
        if pid == 0:
            if patience is not None and time.monotonic() > patience:
                for left in agents:
                    os.kill(left, signal.SIGKILL)
            time.sleep(0.02)
            continue
        order = agents.pop(pid, None)
        if order is None:
            continue
        code = os.waitstatus_to_exitcode(raw)
        if code < 0:
            died = 128 - code
        elif code == exits.NODE_LEFT:
            died = exits.FAILED
        else:
            status = code
            # One agent that ended by itself means that the job has ended.
            patience = time.monotonic() + _GRACE_S
    if stopping:
        return status or 128 + signal.SIGTERM
    return status if patience is not None or died is None else died
