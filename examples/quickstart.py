"""The main job in a few minutes: a GPT learns real text, loses a node, and changes its parallel layout and back, alive.

    bash scripts/quickstart.sh [--out DIR] [--victim 0|1] [--iterations N] [--seed N]

Trains twice. The one run is a single job under ``megatron-resilience launch ... --deadpool --hotswap-parallelism``, 2 nodes x 2
ranks plus a spare. First act: a whole node (agent and ranks) gets SIGKILL in the middle of an iteration. Second act: the layout
changes from TP2 x DP2 to PP2 x DP2 and later back, while it trains.

The other run is the oracle, stock Megatron under plain torchrun and without a fault. Up to the first change of layout it is
one undisturbed job. Nothing can be equal to that one afterwards, for another layout adds numbers in another order; so there the
oracle saves, and stock Megatron goes on at the other layout from what it loads, and the same again on the way back.

Ends with a table, a picture of both loss curves, and the comparison to the bit; exit status 1 if they differ.
"""

import argparse
import json
import os
import platform
import random
import shutil
import signal
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import psutil
import torch

from megatron_resilience.observe.events import read_events
from megatron_resilience.observe.trace import differences, losses

ROOT = Path(__file__).resolve().parents[1]
RANKS_PER_NODE, NODES, SPARES = 2, 2, 1
MODEL = """
--num-layers 4 --hidden-size 256 --num-attention-heads 8 --seq-length 128 --max-position-embeddings 128
--micro-batch-size 4 --global-batch-size 8 --use-distributed-optimizer
--lr 1e-3 --min-lr 1e-4 --lr-decay-style cosine --lr-warmup-iters 4 --weight-decay 0.1 --clip-grad 1.0
--split 98,2,0 --eval-iters 0 --eval-interval 1000 --log-interval 1 --num-workers 0 --seed 1234
--no-masked-softmax-fusion --no-gradient-accumulation-fusion --no-persist-layer-norm
"""
LAYOUTS = {
    "TP2 DP2": "--tensor-model-parallel-size 2",
    "PP2 DP2": "--pipeline-model-parallel-size 2",
}
FIRST, OTHER = LAYOUTS
# The one format that Megatron loads at another layout.
CHECKPOINT = "--ckpt-format torch_dist --dist-ckpt-optim-fully-reshardable"
ON_CPU = "--transformer-impl local --attention-backend unfused --distributed-backend gloo"
ON_GPU = "--bf16 --distributed-backend nccl"


def main():
    """Runs everything; exit status 0 when both runs are equal to the bit."""
    options = parse()
    gpus = torch.cuda.device_count()
    needed = RANKS_PER_NODE * (NODES + SPARES)
    on_gpu = gpus >= needed
    if 0 < gpus < needed:
        say(f"{gpus} GPUs are here, {needed} would be needed: training on the CPU")
    environment = os.environ | {
        "MEGATRON_RESILIENCE_ACCELERATOR": "cuda" if on_gpu else "cpu",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
    }
    out = options.out
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    say("preparing text: Python's own manual, with a SentencePiece vocabulary trained on it")
    run([sys.executable, "examples/prepare_text.py", str(out / "data")], environment, out / "prepare.log")
    arguments = [*MODEL.split(), *(ON_GPU if on_gpu else ON_CPU).split()]
    arguments += ["--train-iters", str(options.iterations), "--lr-decay-iters", str(options.iterations)]
    arguments += ["--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model", f"{out}/data/tokenizer.model"]
    arguments += ["--data-path", f"{out}/data/text", "--data-cache-path", f"{out}/data/cache"]

    first, second = options.iterations * 7 // 12, options.iterations * 10 // 12
    stretches = [(FIRST, first), (OTHER, second), (FIRST, options.iterations)]
    started = time.time()
    oracle(out, arguments, environment, stretches)
    oracle_s = time.time() - started

    say(f"the same in one job with --deadpool: 2 nodes x 2 ranks and a spare node, a death, then to {OTHER} and back")
    schedule = out / "schedule.yaml"
    schedule.write_text(f"{first}: {OTHER}\n{second}: {FIRST}\n")
    launch = [sys.executable, "-m", "megatron_resilience.control.cli", "launch", "--local-nodes"]
    launch += ["--nnodes", str(NODES + SPARES), "--spares", str(SPARES), "--nproc-per-node", str(RANKS_PER_NODE)]
    launch += ["--events", str(out / "events.jsonl"), "examples/train_gpt.py", *arguments, *LAYOUTS[FIRST].split()]
    launch += ["--trace-dir", str(out / "live"), "--deadpool"]
    launch += ["--hotswap-parallelism", "--hotswap-schedule", str(schedule)]
    chance = random.Random(options.seed)
    death = Death(options.victim, options.iterations // 3, chance.random())
    started = time.time()
    watch(launch, environment, out / "live.log", out / "live", options.iterations, death, out / "events.jsonl")
    live_s = time.time() - started

    drop_unread_steps(out / "oracle")
    differing = differences(out / "live", out / "oracle")
    summary = report(out, death, differing, stretches, oracle_s, live_s, on_gpu)
    draw(out, death, summary)
    told = "total_s" in summary and len(summary["changes"]) == len(stretches) - 1
    return 1 if differing or not told else 0


def oracle(out, arguments, environment, stretches):
    """Stock Megatron under torchrun; where the layout is to change, a job saves and ends, and another one loads."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    # Where it keeps its logs; else it leaves a folder in /tmp.
    torchrun += ["--log-dir", str(out / "torchrun")]
    torchrun += ["--nproc-per-node", str(RANKS_PER_NODE * NODES), "examples/train_gpt.py"]
    loads = []
    for number, (layout, until) in enumerate(stretches, 1):
        how = "loads it, and goes on" if loads else "trains undisturbed"
        ends = "to the end" if number == len(stretches) else f"until iteration {until}, and saves"
        say(f"oracle: stock Megatron under torchrun, without --deadpool, {how} at {layout} {ends}")
        command = [*torchrun, *arguments, *LAYOUTS[layout].split(), *CHECKPOINT.split(), *loads]
        command += ["--trace-dir", str(out / "oracle")]
        if number < len(stretches):
            checkpoint = out / f"checkpoint{number}"
            command += ["--save", str(checkpoint), "--save-interval", str(until), "--exit-interval", str(until)]
            loads = ["--load", str(checkpoint)]
        watch(command, environment, out / f"oracle{number}.log", out / "oracle", until)
    for number in range(1, len(stretches)):
        shutil.rmtree(out / f"checkpoint{number}")


def drop_unread_steps(trace):
    """Removes from the last states what --load leaves in parameter groups: the step of the checkpoint.

    It is stale, and torch's Adam does not read it; what it reads is a count per parameter, and is compared. Where an optimizer
    has no such counts (FusedAdam), the group's step is the real one and stays.
    """
    for path in trace.glob("state*.json"):
        state = json.loads(path.read_text())
        if any(name.endswith("/step") for name in state["tensors"]):
            for groups in state["groups"]:
                for group in groups:
                    group.pop("step", None)
            path.write_text(json.dumps(state))


def parse():
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "quickstart", help="folder, made anew")
    parser.add_argument("--victim", type=int, choices=range(NODES), default=0, help="node to kill (0: the leader)")
    parser.add_argument("--iterations", type=int, default=42)
    parser.add_argument("--seed", type=int, default=int(time.time()), help="of the moment of death")
    return parser.parse_args()


class Death:
    """Kills a node once, a random part of an iteration after a given one."""

    def __init__(self, node, iteration, part):
        self.node, self.iteration, self.part = node, iteration, part
        self.victims, self.time = [], None

    def due(self, done, seconds_per_iteration, launcher):
        """Called as iterations are done; kills when it is time."""
        if self.time is not None or done < self.iteration:
            return
        time.sleep(self.part * seconds_per_iteration)
        agents = sorted(psutil.Process(launcher.pid).children(), key=lambda process: process.pid)
        victims = [agents[self.node], *agents[self.node].children(recursive=True)]
        self.time = time.time()
        for victim in victims:
            os.kill(victim.pid, signal.SIGKILL)
        self.victims = [victim.pid for victim in victims]
        say(f"killed node n{self.node}: agent, zygote and ranks, {len(victims)} processes, in iteration {done + 1}")


def watch(command, environment, log, trace, iterations, death=None, events=None):
    """Runs a training command until an iteration, shows its progress, and lets death in."""
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environment, cwd=ROOT)
    shown, done, began, changes = reached(trace), 0, time.time(), 0
    try:
        while process.poll() is None:
            now = reached(trace)
            if now and not done:
                began = time.time()
            done = now
            if death is not None:
                death.due(done, (time.time() - began) / max(1, done - 1), process)
            if done >= shown - shown % 10 + 10:
                shown = done - done % 10
                say(f"  iteration {shown:3d}/{iterations}   loss {losses(trace)[shown]:.3f}")
            for change in switches(events)[changes:]:
                changes += 1
                say(f"{change['cause']}: a pause of {change['pause_s']:.2f} s after iteration {change['generation']}")
            time.sleep(0.02)
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait()
    if process.returncode != 0:
        print(log.read_text()[-5000:])
        sys.exit(f"quickstart: {' '.join(command[:4])} ... ended with {process.returncode}; all of it is in {log}")


def reached(trace):
    """The last iteration that a trace has."""
    return max(losses(trace), default=0) if trace.is_dir() else 0


def switches(events):
    """The changes of layout in an event log, which may not be there yet."""
    found = read_events(events) if events is not None and events.exists() else []
    return [event for event in found if event["kind"] == "switch_done"]


def report(out, death, differing, stretches, oracle_s, live_s, on_gpu):
    """Prints the table and keeps it, with its figures, in ``out``."""
    recovered = [e for e in read_events(out / "events.jsonl") if e["kind"] == "recovered"]
    machine = f"{platform.machine()}, {os.cpu_count()} cores, {'GPU' if on_gpu else 'CPU and gloo'}"
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "megatron-core"))
    rows = [("machine", machine), ("versions", f"Python {platform.python_version()}, {versions}")]
    rows.append(("what died", f"node n{death.node}: {len(death.victims)} processes by SIGKILL"))
    summary = {"machine": machine, "versions": versions, "differences": differing, "cause": None}
    for event in recovered:
        lag = max(0.0, event["time"] - sum(event["seconds"].values()) - death.time)
        seconds = {**event["seconds"], "detect": event["seconds"]["detect"] + lag}
        rows += [
            ("repaired by", event["cause"]),
            ("generation resumed", event["generation"]),
            ("steps executed again", event["steps_again"]),
            *((f"seconds: {phase}", f"{value:.3f}") for phase, value in seconds.items()),
            ("kill to first completed step", f"{sum(seconds.values()):.3f} s"),
        ]
        summary |= {"cause": event["cause"], "seconds": seconds, "total_s": sum(seconds.values())}
        summary |= {"generation": event["generation"], "steps_again": event["steps_again"]}
    summary["changes"] = []
    for event in switches(out / "events.jsonl"):
        seconds = {phase: value for phase, value in event["seconds"].items() if phase != "first step"}
        parts = ", ".join(f"{phase} {value:.3f}" for phase, value in seconds.items())
        received, kept = (event["bytes"][what] / 2**20 for what in ("received", "kept"))
        rows += [
            ("live change", f"{event['cause']}, after iteration {event['generation']}"),
            ("  pause", f"{event['pause_s']:.3f} s ({parts})"),
            (
                "  prepared meanwhile",
                f"{event['prepare_s']:.1f} s while it trained, {event['wait_s']:.2f} s of waiting",
            ),
            ("  state", f"{received:.1f} MiB from another node, {kept:.1f} MiB from this one's memory"),
        ]
        summary["changes"].append(
            {k: event[k] for k in ("cause", "generation", "pause_s", "prepare_s", "wait_s", "seconds")}
        )
    chain = ", saved and loaded at ".join(f"{layout} to iteration {until}" for layout, until in stretches)
    rows.append(("the oracle", f"stock Megatron at {chain}"))
    rows.append(("whole job, oracle / live", f"{oracle_s:.0f} s / {live_s:.0f} s, start-ups included"))
    equal = "EQUAL to the bit: every loss, gradient norm, sample; final masters, moments, steps, RNG, parameters"
    rows.append(("against the oracle", equal if not differing else f"DIFFERENT: {differing[:3]}"))
    width = max(len(name) for name, _ in rows)
    text = "\n".join(f"{name:<{width}}  {value}" for name, value in rows)
    print("\n" + text + "\n", flush=True)
    (out / "table.txt").write_text(text + "\n")
    (out / "summary.json").write_text(json.dumps(summary, indent=1))
    return summary


def draw(out, death, summary):
    """Both loss curves in one picture."""
    oracle, live = losses(out / "oracle"), losses(out / "live")
    figure, axes = plt.subplots(figsize=(8, 4.5))
    axes.plot(list(oracle), list(oracle.values()), color="tab:gray", linewidth=5, alpha=0.5, label="stock Megatron")
    axes.plot(list(live), list(live.values()), color="tab:blue", label="one job: a node killed, the layout changed")
    if "total_s" in summary:
        place = summary["generation"] + 0.5
        label = f"node n{death.node} killed ({summary['total_s']:.2f} s)"
        axes.axvline(place, color="tab:red", linestyle="--", label=label)
    for change in summary["changes"]:
        target = change["cause"].rpartition(" to ")[2]
        label = f"live change to {target} ({change['pause_s']:.2f} s)"
        axes.axvline(change["generation"] + 0.5, color="tab:green", linestyle=":", label=label)
    axes.set(
        xlabel="iteration",
        ylabel="loss",
        title="A GPT learns Python's manual, loses a node, changes its layout and back",
    )
    axes.legend()
    figure.tight_layout()
    figure.savefig(out / "loss.png", dpi=120)
    say(f"picture: {out / 'loss.png'}   table: {out / 'table.txt'}   events: {out / 'events.jsonl'}")


def run(command, environment, log):
    """Runs a short command; its output goes to ``log``."""
    with log.open("w") as output:
        done = subprocess.run(command, stdout=output, stderr=output, env=environment, cwd=ROOT, check=False)
    if done.returncode != 0:
        print(log.read_text()[-3000:])
        sys.exit(f"quickstart: {command[1]} ended with {done.returncode}")


def say(text):
    """A line of progress."""
    print(f"[quickstart] {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
