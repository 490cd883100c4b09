# tests/support/logical.py with one death in a change of layout, when the state is about to move: of the new world's rank
# DIE_RANK alone (DIE_WHAT: rank), or of its whole node, the old world's ranks and the agent with it (node). Once: DIE_MARKER
# remembers it.

import os
import runpy
import signal
from pathlib import Path

import psutil

import megatron_resilience.autoload  # noqa: F401
from megatron_resilience.hotswap.engine import Transfer


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


if __name__ == "__main__":
    if os.environ["RANK"] == os.environ["DIE_RANK"]:
        arm()
    runpy.run_path(str(Path(__file__).with_name("logical.py")), run_name="__main__")
