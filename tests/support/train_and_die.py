# examples/train_gpt.py, left and entered again on purpose at every iteration (LEAVE_IN names the function whose end is
# the moment; no process dies), or with deaths in it (DEATHS; see deaths.py): a rank sends SIGKILL to its whole node, to all
# ranks of its node, or to itself alone, or hangs. Each once: a marker file remembers it. Or its rounds of protection are
# slow: SLOW_ROUNDS names generations that rank SLOW_RANK takes a second and a half to begin to send.

import json
import os
import signal
import threading
import time
from pathlib import Path

import psutil

# Megatron is imported by the rank alone: the process that each rank starts to save imports this module too.
if __name__ == "__main__":
    import torch
    from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
    from megatron.core.pipeline_parallel import schedules
    from megatron.training import get_args, training

    from megatron_resilience.deadpool.protection import Protection

    MOMENTS = {
        "forward": (schedules, "forward_step"),
        "backward": (schedules, "backward_step"),
        "reduction": (_ParamAndGradBucketGroup, "finish_grad_sync"),
        "optimizer": (torch.optim.AdamW, "step"),
        "gather": (_ParamAndGradBucketGroup, "start_param_sync"),
        "scheduler": (OptimizerParamScheduler, "step"),
        "logging": (training, "training_log"),
        "checkpoint": (training, "save_checkpoint_and_time"),
        "evaluation": (training, "evaluate_and_print_results"),
        # The top of train()'s loop.
        "between": (training, "maybe_finalize_async_save"),
    }


def kill(what):
    zygote = psutil.Process().parent()
    if what == "node":
        agent = zygote.parent()
        victims = [agent, *agent.children(recursive=True)]
    else:
        victims = zygote.children() if what == "ranks" else []
    for process in victims:
        if process.pid != os.getpid():
            os.kill(process.pid, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def loop():
    while True:
        pass


def freeze():
    os.kill(os.getpid(), signal.SIGSTOP)


HANGS = {"loop": loop, "sleep": lambda: time.sleep(3600), "nap": lambda: time.sleep(3), "freeze": freeze}


def arm(death):
    owner, name = MOMENTS[death["moment"]]
    original = getattr(owner, name)
    marker = Path(death["marker"])

    def armed(*args, **kwargs):
        # The scheduler steps once before training.
        iteration = getattr(get_args(), "curr_iteration", None)
        if iteration is not None and iteration + 1 >= death["at"] and not marker.exists():
            marker.touch()
            if death["hang"]:
                HANGS[death["hang"]]()
            elif death["after"] == 0:
                kill(death["what"])
            else:
                threading.Thread(target=lambda: (time.sleep(death["after"]), kill(death["what"])), daemon=True).start()
        return original(*args, **kwargs)

    setattr(owner, name, armed)


def leave():
    owner, name = MOMENTS[os.environ["LEAVE_IN"]]
    original = getattr(owner, name)
    left = set()

    def leaving(*args, **kwargs):
        result = original(*args, **kwargs)
        iteration = get_args().curr_iteration
        if iteration not in left:
            left.add(iteration)
            raise RuntimeError("gloo: left on purpose")
        return result

    setattr(owner, name, leaving)


def slow():
    generations = set(json.loads(os.environ["SLOW_ROUNDS"]))
    original = Protection._round

    def delayed(self, generation, index):
        if generation in generations:
            time.sleep(1.5)
        return original(self, generation, index)

    Protection._round = delayed


if __name__ == "__main__":
    if os.environ["RANK"] == os.environ.get("SLOW_RANK"):
        slow()
    if "LEAVE_IN" in os.environ:
        leave()
    for death in json.loads(os.environ.get("DEATHS", "[]")):
        if os.environ["RANK"] == str(death["rank"]):
            arm(death)
    script = Path(__file__).parents[2] / "examples" / "train_gpt.py"
    # Not by runpy: the main module remains this file, which is light, for the processes that import it again.
    exec(compile(script.read_text(), str(script), "exec"), {"__name__": "__main__", "__file__": str(script)})
