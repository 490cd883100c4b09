"""Forks ranks from one process of the node that has already imported torch and Megatron.

Importing takes 5 to 15 s, Megatron's own set-up about one: a rank that is forked is at the door that much earlier.
Safe as long as nothing has touched the device: the zygote only imports. It is single-threaded, and a CUDA context in
it (some library's import may create one) is refused, because a forked process cannot use the device then.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import importlib
import multiprocessing.process
import multiprocessing.util
import os
import runpy
import secrets
import select
import shutil
import signal
import sys
import tempfile
import traceback
from typing import Any, NoReturn

from megatron_resilience import exits
from megatron_resilience.control.channel import Channel
from megatron_resilience.control.link import AGENT_FD
from megatron_resilience.control.stacks import write_on_signal
from megatron_resilience.errors import ResilienceError

PRELOAD = ("numpy", "torch", "torch.distributed", "megatron_resilience.autoload")
_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int, sig: int = signal.SIGKILL) -> None:
    """Makes the kernel send ``sig`` to this process when its parent dies, however it dies.

    Args:
        parent: its process id, from before the fork: it may be dead when the child gets to run.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, sig, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def start_zygote(script: str) -> tuple[int, Channel]:
    """Forks this node's zygote from the calling process, which must have one thread only.

    Args:
        script: the training script; its folder comes first on the module path, as under ``python script``.

    Returns:
        Its pid and the channel to it.
    """
    ours, theirs = Channel.pair()
    agent = os.getpid()
    pid = os.fork()
    if pid:
        theirs.close()
        return pid, ours
    ours.close()
    try:
        die_with_parent(agent)
        os.setpgid(0, 0)
        # Slurm sends it to every process of a step; the agent decides what it means.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        sys.path.insert(0, os.path.dirname(os.path.abspath(script)))
        _serve(theirs)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


def preload() -> None:
    """Imports what every rank needs; the plugin installs its hooks with it.

    Raises:
        ResilienceError: a module is missing, or an import has touched the GPU.
    """
    for name in PRELOAD:
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise ResilienceError(
                f"cannot import {error.name or name} in {sys.executable}: {error}. "
                "The launcher must run in the environment of the training job"
            ) from error
    import torch

    if torch.cuda.is_initialized():
        raise ResilienceError(
            "importing Megatron has initialised CUDA, so ranks cannot be forked: launch with --start-method spawn"
        )


def _serve(channel: Channel) -> NoReturn:
    try:
        preload()
    except ResilienceError as error:
        channel.send({"kind": "failed", "error": str(error)})
        os._exit(1)
    channel.send({"kind": "loaded"})
    temporary = os.path.join(tempfile.gettempdir(), f"mr-{secrets.token_hex(4)}-")
    children: dict[int, int] = {}
    poll = select.poll()
    poll.register(channel.sock, select.POLLIN)
    while True:
        for fd, _ in poll.poll():
            if fd != channel.sock.fileno():
                pid = children.pop(fd)
                _end_group(pid)
                shutil.rmtree(f"{temporary}{pid}", ignore_errors=True)
                _, status = os.waitpid(pid, 0)
                poll.unregister(fd)
                os.close(fd)
                with contextlib.suppress(OSError):
                    channel.send({"kind": "exited", "pid": pid, "status": os.waitstatus_to_exitcode(status)})
                continue
            received = channel.receive()
            if received is None:
                _end(children, temporary)
            message, fds = received
            zygote = os.getpid()
            pid = os.fork()
            if pid == 0:
                with contextlib.suppress(OSError):
                    channel.close()
                    for other in children:
                        os.close(other)
                keep_temporaries_in(f"{temporary}{os.getpid()}")
                _become_rank(message, fds, zygote)
            for passed in fds:
                os.close(passed)
            pidfd = os.pidfd_open(pid)
            children[pidfd] = pid
            poll.register(pidfd, select.POLLIN)
            channel.send({"kind": "started", "ticket": message["ticket"], "pid": pid})


def keep_temporaries_in(folder: str) -> None:
    """Where this process's and its children's ``multiprocessing`` puts its sockets, made when they need it.

    A rank that is killed cannot remove them (Megatron starts such a process to save checkpoints); who knows the name can.
    """

    def get_temp_dir() -> str:
        config: dict[str, Any] = multiprocessing.process.current_process()._config  # type: ignore[attr-defined]
        if config.get("tempdir") is None:
            os.makedirs(folder, 0o700, exist_ok=True)
            config["tempdir"] = folder
        return str(config["tempdir"])

    multiprocessing.util.get_temp_dir = get_temp_dir


def _end(children: dict[int, int], temporary: str) -> NoReturn:
    """The agent has let go: nothing of this node is left when this process exits."""
    for pidfd in children:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    for pid in children.values():
        _end_group(pid)
        os.waitpid(pid, 0)
        shutil.rmtree(f"{temporary}{pid}", ignore_errors=True)
    os._exit(0)


def _end_group(rank: int) -> None:
    """Ends what a rank that is dying has forked (a checkpoint's writers): it would keep the rank's connections open.

    Before the rank is waited for, so that its number is still its own.
    """
    with contextlib.suppress(ProcessLookupError):
        os.killpg(rank, signal.SIGKILL)


def _become_rank(message: dict[str, Any], fds: list[int], zygote: int) -> NoReturn:
    """In the forked child: the rank's environment, then the user's script."""
    status = 1
    try:
        die_with_parent(zygote)
        # As torchrun does. Where the kernel shares the processor out by session, ranks must not have one share together, and
        # agents not the same as the ranks that they watch.
        os.setsid()
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.environ.clear()
        os.environ.update(message["env"])
        os.environ[AGENT_FD] = str(fds[0])
        write_on_signal(fds[1])
        _reseed()
        status = run_script(message["argv"])
    finally:
        os._exit(status)


def _reseed() -> None:
    # Forked siblings would otherwise share what the imports seeded (names of temporary files, for one).
    import random

    random.seed()
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]


def run_script(argv: list[str]) -> int:
    """Runs a script as ``python script args...`` would; returns the exit status."""
    sys.argv = list(argv)
    status = 0
    try:
        runpy.run_path(argv[0], run_name="__main__")
    except SystemExit as error:
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
    except ResilienceError as error:
        print(f"megatron-resilience: {error}", file=sys.stderr)
        status = exits.IMPOSSIBLE
    except BaseException:
        traceback.print_exc()
        status = exits.FAILED
    with contextlib.suppress(Exception):
        atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    return status
