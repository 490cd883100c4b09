# tests/support/logical.py with one death in a change of layout, when the state is about to move: of the new world's rank
# DIE_RANK alone (DIE_WHAT: rank), or of its whole node, the old world's ranks and the agent with it (node). Once: DIE_MARKER
# remembers it. TENANTS names a folder: each rank of the old world keeps in it how many bytes it holds, and each rank of the new
# one, when its tensors are made, adds to "found" how many the old ones on its node hold.

import os
import runpy
import signal
from pathlib import Path

import psutil

import megatron_resilience.autoload  # noqa: F401
from megatron_resilience.control.node import NODE
from megatron_resilience.hotswap.engine import Transfer
from megatron_resilience.megatron_adapter.tenancy import Tenancy


def arm():
    move = Transfer.run
    marker = Path(os.environ["DIE_MARKER"])

    def armed(self, *args):
        if not marker.exists():
            marker.touch()
            agent = psutil.Process().parent().parent()
            for process in [agent, *agent.children(recursive=True)] if os.environ["DIE_WHAT"] == "node" else []:
                if process.pid != os.getpid():
                    os.kill(process.pid, signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)
        return move(self, *args)

    Transfer.run = armed


def watch_memory(folder):
    from megatron.training import get_args

    node = os.environ[NODE]
    reoccupy, vacate, init = Tenancy.reoccupy, Tenancy.vacate, Tenancy.__init__

    def note(tenancy):
        (folder / f"{node}.{os.getpid()}").write_text(str(tenancy.bytes))

    def begin(self, *args):
        init(self, *args)
        if get_args().pipeline_model_parallel_size == 1:
            note(self)
            return
        others = [path for path in folder.glob(f"{node}.*") if psutil.pid_exists(int(path.suffix[1:]))]
        with (folder / "found").open("a") as found:
            found.write(f"{sum(int(path.read_text()) for path in others)}\n")

    def leave(self):
        vacate(self)
        note(self)

    def back(self):
        reoccupy(self)
        note(self)

    Tenancy.__init__, Tenancy.vacate, Tenancy.reoccupy = begin, leave, back


if __name__ == "__main__":
    if os.environ["RANK"] == os.environ["DIE_RANK"]:
        arm()
    if "TENANTS" in os.environ:
        watch_memory(Path(os.environ["TENANTS"]))
    runpy.run_path(str(Path(__file__).with_name("logical.py")), run_name="__main__")
