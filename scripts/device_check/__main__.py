"""Runs the parts one by one, each in a process of its own and for a limited time. Started by scripts/device_check.sh."""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import torch

from megatron_resilience import exits
from megatron_resilience.accelerator import Accelerator, select
from scripts.device_check import copies, groups, training
from scripts.device_check.report import Check, table, write

PARTS = {"copies": 120, "groups": 90, "training": 300}
"""With their limits in seconds."""
_STATE_MIB = {"cuda": 4096, "cpu": 64}
_MATRIX = {"cuda": 8192, "cpu": 256}


def main(argv: list[str] | None = None) -> int:
    """See scripts/device_check.sh for the exit statuses."""
    parser = argparse.ArgumentParser(prog="scripts/device_check.sh")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--scratch", type=Path, required=True)
    parser.add_argument("--stand-in", action="store_true")
    parser.add_argument("--part", choices=PARTS)
    args = parser.parse_args(argv)
    if not args.stand_in and not torch.cuda.is_available():
        print(
            f"device_check.sh: no CUDA here (torch {torch.__version__} sees no GPU): nothing checked", file=sys.stderr
        )
        return exits.IMPOSSIBLE
    device = select("cpu" if args.stand_in else "cuda")
    if args.part is not None:
        print(json.dumps([asdict(check) for check in run(args.part, device, args.scratch)]))
        return exits.DONE
    checks = [check for part in PARTS for check in apart(part, args.scratch, args.stand_in)]
    machine = describe(device)
    if args.stand_in:
        print("On the CPU stand-in: this says nothing of a GPU.")
    print(", ".join(f"{name} {value}" for name, value in machine.items()))
    print(table(checks))
    path = args.out / "docs" / "results" / "device-check.json"
    write(path, machine, checks)
    print(f"written: {path}")
    return exits.FAILED if any(check.held is False for check in checks) else exits.DONE


def run(part: str, device: Accelerator, scratch: Path) -> list[Check]:
    """One part, in this process."""
    if part == "copies":
        return copies.check(device, _STATE_MIB[device.name], _MATRIX[device.name])
    if part == "groups":
        return groups.check(device)
    folder = scratch / "training"
    folder.mkdir()
    return training.check(device, folder)


def apart(part: str, scratch: Path, stand_in: bool) -> list[Check]:
    """One part, in a process of its own: what hangs or dies there is a line of the table."""
    command = [sys.executable, "-m", "scripts.device_check", "--part", part, "--out", ".", "--scratch", str(scratch)]
    try:
        done = subprocess.run(
            [*command, *(["--stand-in"] if stand_in else [])],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PARTS[part],
        )
    except subprocess.TimeoutExpired:
        return [Check(part, "came to its end", f"not within {PARTS[part]} s", "yes", False)]
    lines = done.stdout.splitlines()
    if done.returncode != 0 or not lines:
        print(f"--- {part}\n{done.stdout[-2000:]}{done.stderr[-4000:]}", file=sys.stderr)
        return [Check(part, "came to its end", f"exit status {done.returncode}, see above", "yes", False)]
    return [Check(**fields) for fields in json.loads(lines[-1])]


def describe(device: Accelerator) -> dict[str, str]:
    """What this was run on."""
    known = {"python": platform.python_version(), "torch": str(torch.__version__)}
    if device.name != "cuda":
        return {"device": "cpu"} | known
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    return {"device": torch.cuda.get_device_name(), "cuda": str(torch.version.cuda), "nccl": nccl} | known


if __name__ == "__main__":
    sys.exit(main())
