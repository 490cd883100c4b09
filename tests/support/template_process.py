"""The process that ranks are forked from: imports once what takes seconds, then forks on request.

Not imported by tests; ``template.Template`` starts it as ``python template_process.py FD`` and talks to it
over the socket FD, one JSON object per line:

* ``{"op": "fork", target, argv, env, output, cwd}`` → ``{"pid": ...}``
* ``{"op": "poll"}`` → ``{"exited": {pid: return code}}`` of children that ended since the last poll
* ``{"op": "orphans"}`` → ``{"pids": [...]}``: live processes whose parents, ranks, have died

It is a subreaper, so that whatever its ranks leave behind becomes its child and is seen.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import sys
import threading
import traceback
from pathlib import Path
from typing import Any

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_ROOT = Path(__file__).resolve().parents[2]


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), f"prctl({option}) failed")


def _die_with(parent: int) -> None:
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        # The parent died before the line above.
        os._exit(1)


def _import_everything() -> None:
    """What the training script needs; its main() is not run."""
    from tests.support.template import TRAIN_GPT

    spec = importlib.util.spec_from_file_location("_train_gpt", TRAIN_GPT)
    assert spec is not None and spec.loader is not None
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
    threads = len(os.listdir("/proc/self/task"))
    if threads != 1:
        raise RuntimeError(f"the template has {threads} threads after its imports; forking it is unsafe")


def _run(target: str, argv: list[str]) -> int:
    sys.argv = [target, *argv]
    try:
        if target.endswith(".py"):
            runpy.run_path(target, run_name="__main__")
            return 0
        module, _, function = target.partition(":")
        result = getattr(importlib.import_module(module), function)()
        return result if isinstance(result, int) else 0
    except SystemExit as exit_:
        if exit_.code is None or isinstance(exit_.code, int):
            return exit_.code or 0
        print(exit_.code, file=sys.stderr)
        return 1
    except BaseException:
        traceback.print_exc()
        return 1


def _flush_tensorboard() -> None:
    # Stock Megatron leaves the points of its final evaluations to a daemon thread, which may lose the race with the exit.
    module = sys.modules.get("megatron.training.global_vars")
    if module is not None and module._GLOBAL_TENSORBOARD_WRITER is not None:
        module._GLOBAL_TENSORBOARD_WRITER.flush()


def _child(request: dict[str, Any], parent: int, control: socket.socket) -> None:
    code = 1
    try:
        os.setsid()
        _die_with(parent)
        control.close()
        null = os.open(os.devnull, os.O_RDONLY)
        output = os.open(request["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        for source, descriptor in ((null, 0), (output, 1), (output, 2)):
            os.dup2(source, descriptor)
        os.close(null)
        os.close(output)
        os.chdir(request["cwd"])
        os.environ.clear()
        os.environ.update(request["env"])
        if threads := request["env"].get("OMP_NUM_THREADS"):
            import torch

            # OpenMP read the variable when the template imported torch.
            torch.set_num_threads(int(threads))
        code = _run(request["target"], request["argv"])
        _flush_tensorboard()
        threading._shutdown()
        atexit._run_exitfuncs()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _children() -> set[int]:
    return {int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()}


class _Server:
    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._ranks: set[int] = set()

    def fork(self, request: dict[str, Any]) -> dict[str, Any]:
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            _child(request, parent, self._control)
        self._ranks.add(pid)
        return {"pid": pid}

    def poll(self, request: dict[str, Any]) -> dict[str, Any]:
        exited = {}
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if pid == 0:
                break
            if pid in self._ranks:
                self._ranks.remove(pid)
                exited[pid] = os.waitstatus_to_exitcode(status)
        return {"exited": exited}

    def orphans(self, request: dict[str, Any]) -> dict[str, Any]:
        return {"pids": sorted(_children() - self._ranks)}


def main() -> None:
    """Serves until the socket closes."""
    _die_with(int(sys.argv[2]))
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    control = socket.socket(fileno=int(sys.argv[1]))
    # Ranks and their own children must not hold the control socket open.
    control.set_inheritable(False)
    sys.path.insert(0, str(_ROOT))
    _import_everything()
    gc.collect()
    gc.freeze()
    server = _Server(control)
    with control.makefile("r", encoding="utf-8") as requests:
        control.sendall(b'{"ready": true}\n')
        for line in requests:
            request = json.loads(line)
            answer = getattr(server, request["op"])(request)
            control.sendall(json.dumps(answer).encode() + b"\n")
    for pid in _children():
        os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    main()
