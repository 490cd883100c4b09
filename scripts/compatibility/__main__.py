"""Tries pair after pair. Started by scripts/compatibility.sh, whose head says how."""

from __future__ import annotations

import argparse
import datetime
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from megatron_resilience import exits
from megatron_resilience.errors import ConfigurationError
from scripts.compatibility import results
from scripts.compatibility.environment import ROOT, Environment, end_in_good_order, environment
from scripts.compatibility.pairs import PAIRS, SUITES, Pair

_SUITE_S = 600


def main(argv: list[str] | None = None) -> int:
    """Returns an exit status."""
    parser = argparse.ArgumentParser(prog="scripts/compatibility.sh")
    parser.add_argument(
        "--pair", action="append", choices=[pair.name for pair in PAIRS], help="only this one; may be repeated"
    )
    parser.add_argument("--fresh", action="store_true", help="even if it was done with this very package")
    parser.add_argument("--list", action="store_true", help="print the pairs")
    parser.add_argument("--report", action="store_true", help="only write docs/compatibility.md anew")
    args = parser.parse_args(argv)
    if args.list:
        for pair in PAIRS:
            print(f"{pair.name:16} torch {pair.torch}, megatron-core {pair.megatron}, Python {pair.python}")
        return exits.DONE
    if args.report:
        results.write(results.read())
        return exits.DONE
    end_in_good_order()
    chosen = [pair for pair in PAIRS if not args.pair or pair.name in args.pair]
    try:
        verdicts = [done["verdict"] for done in try_all(chosen, args.fresh)]
    except ConfigurationError as error:
        print(f"compatibility.sh: {error}", file=sys.stderr)
        return exits.IMPOSSIBLE
    return exits.DONE if set(verdicts) <= {results.WORKS, results.REFUSED} else exits.FAILED


def try_all(pairs: Iterable[Pair], fresh: bool) -> Iterable[dict[str, Any]]:
    """Each pair's result; written as soon as it is there."""
    package = results.package_digest()
    for pair in pairs:
        known = results.read()
        done = known.get(pair.name)
        if done is None or fresh or not _settled(done) or _key(done) != (pair.torch, pair.megatron, package):
            print(
                f"== {pair.name}: torch {pair.torch}, megatron-core {pair.megatron}, Python {pair.python}", flush=True
            )
            with environment() as made:
                done = try_pair(pair, made) | {"package": package}
            known[pair.name] = done
            results.write({p.name: known[p.name] for p in PAIRS if p.name in known})
        print(f"{pair.name}: {done['verdict']}{': ' if done['detail'] else ''}{done['detail']}", flush=True)
        yield done


def _settled(done: dict[str, Any]) -> bool:
    """What failed may have been the machine: it is tried again."""
    return done["verdict"] in (results.WORKS, results.REFUSED)


def _key(done: dict[str, Any]) -> tuple[str, str, str]:
    return done["torch"], done["megatron_core"], done["package"]


def try_pair(pair: Pair, made: Environment) -> dict[str, Any]:
    """Installs it, and runs the tests unless the package refuses it."""
    started = time.monotonic()
    installed = made.install(pair)
    found = {
        "torch": pair.torch,
        "megatron_core": pair.megatron,
        "python": pair.python,
        "date": _today(),
        "commit": _commit(),
    }
    found |= {"verdict": results.WORKS, "detail": "", "suites": {}, "install_s": round(time.monotonic() - started)}
    if installed.code != 0:
        last = installed.output.strip().splitlines() or [f"exit status {installed.code}"]
        return found | {"verdict": results.MISSING, "detail": last[-1]}
    found["python"] = made.python_run(
        "-c", "import platform; print(platform.python_version())", timeout=60
    ).output.strip()
    refusal = made.refusal()
    if refusal:
        return found | {"verdict": results.REFUSED, "detail": refusal}
    for name, arguments in SUITES.items():
        ran = run_suite(made, arguments)
        found["suites"][name] = ran
        print(f"   {name}: {ran['passed']} passed, {ran['failed']} failed, {ran['seconds']:.0f} s", flush=True)
        if ran["failed"]:
            found["verdict"] = results.FAILS
    return found


def run_suite(made: Environment, arguments: Iterable[str]) -> dict[str, Any]:
    """Counts, seconds, and the names of what failed; a run that died counts as one failure."""
    report = made.source / "report.xml"
    report.unlink(missing_ok=True)
    started = time.monotonic()
    options = ("-q", "-p", "no:cacheprovider", f"--junit-xml={report}")
    done = made.python_run("-m", "pytest", *options, *arguments, timeout=_SUITE_S)
    counted = count(report)
    if done.code != 0:
        print(done.output[-6000:], file=sys.stderr)
        if not counted["failures"]:
            counted |= {"failed": 1, "failures": [f"pytest ended with {done.code}"]}
    return counted | {"seconds": round(time.monotonic() - started, 1)}


def count(report: Path) -> dict[str, Any]:
    """From pytest's JUnit report."""
    found: dict[str, Any] = {"passed": 0, "failed": 0, "skipped": 0, "failures": []}
    if report.exists():
        for case in ElementTree.parse(report).iter("testcase"):
            outcomes = {child.tag for child in case} & {"failure", "error", "skipped"}
            kind = "skipped" if outcomes == {"skipped"} else "failed" if outcomes else "passed"
            found[kind] += 1
            if kind == "failed":
                found["failures"].append(f"{case.get('classname')}::{case.get('name')}")
    return found


def _today() -> str:
    return datetime.date.today().isoformat()


def _commit() -> str:
    """The last that changed the package, marked if the package has been edited since."""
    git, package = ["git", "-C", str(ROOT)], ["--", "megatron_resilience"]
    last = subprocess.run([*git, "log", "-1", "--format=%h", *package], capture_output=True, text=True).stdout.strip()
    edited = subprocess.run([*git, "status", "--porcelain", *package], capture_output=True, text=True).stdout
    return f"{last or 'unknown'}{' and edits' if edited else ''}"


if __name__ == "__main__":
    sys.exit(main())
