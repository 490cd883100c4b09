"""The main job in a few minutes: a GPT learns real text while one of its nodes is killed.

    bash scripts/quickstart.sh [--out DIR] [--victim 0|1] [--iterations N] [--seed N]

Trains twice: once undisturbed under plain torchrun (the oracle), once as 2 nodes x 2 ranks (TP2 x DP2) plus a spare under
``megatron-resilience launch ... --deadpool``, where a whole node (agent and ranks) gets SIGKILL in the middle of an
iteration. Ends with a table, a picture of both loss curves, and the comparison to the bit; exit status 1 if they differ.
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
--micro-batch-size 4 --global-batch-size 16 --tensor-model-parallel-size 2 --use-distributed-optimizer
--lr 1e-3 --min-lr 1e-4 --lr-decay-style cosine --lr-warmup-iters 4 --weight-decay 0.1 --clip-grad 1.0
--split 98,2,0 --eval-iters 0 --eval-interval 1000 --log-interval 1 --num-workers 0 --seed 1234
--no-masked-softmax-fusion --no-gradient-accumulation-fusion --no-persist-layer-norm
"""
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

    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    torchrun += ["--nproc-per-node", str(RANKS_PER_NODE * NODES)]
    say(f"oracle: {options.iterations} undisturbed iterations under torchrun, without --deadpool")
    started = time.time()
    command = [*torchrun, "examples/train_gpt.py", *arguments, "--trace-dir", str(out / "oracle")]
    watch(command, environment, out / "oracle.log", out / "oracle", options.iterations)
    oracle_s = time.time() - started

    say("the same with --deadpool: 2 nodes x 2 ranks and a spare node, and a death in it")
    launch = [sys.executable, "-m", "megatron_resilience.control.cli", "launch", "--local-nodes"]
    launch += ["--nnodes", str(NODES + SPARES), "--spares", str(SPARES), "--nproc-per-node", str(RANKS_PER_NODE)]
    launch += ["--events", str(out / "events.jsonl"), "examples/train_gpt.py", *arguments]
    launch += ["--trace-dir", str(out / "swapped"), "--deadpool"]
    chance = random.Random(options.seed)
    death = Death(options.victim, options.iterations // 2, chance.random())
    started = time.time()
    watch(launch, environment, out / "swapped.log", out / "swapped", options.iterations, death)
    swapped_s = time.time() - started

    differing = differences(out / "swapped", out / "oracle")
    summary = report(out, death, differing, oracle_s, swapped_s, on_gpu)
    draw(out, death, summary)
    return 1 if differing or "total_s" not in summary else 0


def parse():
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "quickstart", help="folder, made anew")
    parser.add_argument("--victim", type=int, choices=range(NODES), default=0, help="node to kill (0: the leader)")
    parser.add_argument("--iterations", type=int, default=60)
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


def watch(command, environment, log, trace, iterations, death=None):
    """Runs a training command, shows its progress, and lets death in."""
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environment, cwd=ROOT)
    shown, done, began = 0, 0, time.time()
    try:
        while process.poll() is None:
            now = max(losses(trace), default=0) if trace.is_dir() else 0
            if now and not done:
                began = time.time()
            done = now
            if death is not None:
                death.due(done, (time.time() - began) / max(1, done - 1), process)
            if done >= shown + 10:
                shown = done - done % 10
                say(f"  iteration {shown:3d}/{iterations}   loss {losses(trace)[shown]:.3f}")
            time.sleep(0.02)
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait()
    if process.returncode != 0:
        print(log.read_text()[-5000:])
        sys.exit(f"quickstart: {' '.join(command[:4])} ... ended with {process.returncode}; all of it is in {log}")


def report(out, death, differing, oracle_s, swapped_s, on_gpu):
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
    rows.append(("whole job, oracle / swapped", f"{oracle_s:.0f} s / {swapped_s:.0f} s, start-up included"))
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
    oracle, swapped = losses(out / "oracle"), losses(out / "swapped")
    figure, axes = plt.subplots(figsize=(8, 4.5))
    axes.plot(list(oracle), list(oracle.values()), color="tab:gray", linewidth=5, alpha=0.5, label="undisturbed")
    axes.plot(list(swapped), list(swapped.values()), color="tab:blue", label="with --deadpool, node killed")
    if "total_s" in summary:
        place = summary["generation"] + 0.5
        axes.axvline(
            place, color="tab:red", linestyle="--", label=f"node n{death.node} killed ({summary['total_s']:.2f} s)"
        )
    axes.set(xlabel="iteration", ylabel="loss", title="A GPT learns Python's manual; one of its nodes dies")
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
