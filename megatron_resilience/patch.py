"""``megatron-resilience patch CHECKOUT``: the one import line in a Megatron-LM checkout, put in and taken out again.

Under ``megatron-resilience launch`` no patch is needed. The diffs in ``patches/`` have no context, so that they contain nothing
of Megatron's; what they would be applied to is checked here instead.
"""

from __future__ import annotations

import argparse
import ast
import re
from dataclasses import dataclass
from pathlib import Path

from megatron_resilience import exits
from megatron_resilience.errors import ConfigurationError, UnsupportedError
from megatron_resilience.files import folder

MODULE = "megatron_resilience.autoload"
_HUNK = re.compile(r"^@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")


@dataclass(frozen=True)
class Hunk:
    """Lines ``removed`` from line ``at`` on (0-based), and ``added`` in their place."""

    at: int
    removed: tuple[str, ...]
    added: tuple[str, ...]


@dataclass(frozen=True)
class Diff:
    """A zero-context diff of one file. ``path`` is relative to the checkout."""

    path: str
    hunks: tuple[Hunk, ...]

    def apply(self, lines: list[str], where: str) -> list[str]:
        """The patched lines.

        Raises:
            ConfigurationError: a line that is to go is not there.
        """
        result = list(lines)
        for hunk in reversed(self.hunks):
            end = hunk.at + len(hunk.removed)
            if tuple(result[hunk.at : end]) != hunk.removed or hunk.at > len(result):
                raise ConfigurationError(
                    f"{where}: line {hunk.at + 1} is not what the patch was made for; it was edited"
                )
            result[hunk.at : end] = hunk.added
        return result

    def reverted(self) -> Diff:
        """The diff back."""
        shift, hunks = 0, []
        for hunk in self.hunks:
            hunks.append(Hunk(hunk.at + shift, hunk.added, hunk.removed))
            shift += len(hunk.added) - len(hunk.removed)
        return Diff(self.path, tuple(hunks))


def parse(text: str) -> Diff:
    """Reads a zero-context diff of one file.

    Raises:
        ValueError: it is something else.
    """
    path, hunks = "", []
    lines = iter(text.splitlines())
    for line in lines:
        if line.startswith("+++ b/"):
            path = line.removeprefix("+++ b/")
        match = _HUNK.match(line)
        if match:
            start, count = int(match[1]), int(match[2] or 1)
            body = [next(lines) for _ in range(count + int(match[4] or 1))]
            removed = tuple(b[1:] for b in body[:count])
            if any(b[0] != "-" for b in body[:count]) or any(b[0] != "+" for b in body[count:]):
                raise ValueError(f"{path}: the diff has context")
            # `-4,0` means after line 4, `-4` means line 4 itself.
            hunks.append(Hunk(start if count == 0 else start - 1, removed, tuple(b[1:] for b in body[count:])))
    if not path or not hunks:
        raise ValueError("no diff of a file")
    return Diff(path, tuple(hunks))


def release_of(checkout: Path) -> str:
    """``major.minor.patch`` of a Megatron-LM checkout.

    Raises:
        ConfigurationError: it is none.
    """
    info = checkout / "megatron" / "core" / "package_info.py"
    if not info.is_file():
        raise ConfigurationError(f"{checkout} is no checkout of Megatron-LM: {info.relative_to(checkout)} is missing")
    found = dict(re.findall(r"^(MAJOR|MINOR|PATCH) = (\d+)", info.read_text(), re.MULTILINE))
    try:
        return f"{found['MAJOR']}.{found['MINOR']}.{found['PATCH']}"
    except KeyError as missing:
        raise ConfigurationError(f"{info}: no {missing.args[0]} in it, so its release is unknown") from missing


def diffs_for(release: str) -> list[Diff]:
    """The diffs for a release.

    Raises:
        UnsupportedError: there are none.
    """
    minor = ".".join(release.split(".")[:2])
    chosen = sorted(folder("patches").glob(f"core_v{minor}.*/*.diff"))
    if not chosen:
        known = ", ".join(sorted(p.name for p in folder("patches").iterdir() if p.is_dir()))
        raise UnsupportedError(
            f"found Megatron-LM {release}; there are patches for {known}: check out one of those tags"
        )
    return [parse(path.read_text()) for path in chosen]


def patch(checkout: Path, revert: bool) -> list[str]:
    """Applies the diffs, or takes them back; all of them or none. Returns what was done, one line a file.

    Raises:
        ConfigurationError: it is no checkout, not a known release, or edited where the patch goes.
    """
    release = release_of(checkout)
    said, changed = [f"{checkout}: Megatron-LM {release}"], {}
    for diff in diffs_for(release):
        path = checkout / diff.path
        if not path.is_file():
            raise ConfigurationError(f"{path} is missing in this checkout")
        lines = path.read_text().split("\n")
        there = any(line.startswith(f"import {MODULE}") for line in lines)
        if there != revert:
            said.append(f"{diff.path}: {'is patched already' if there else 'is not patched'}, nothing done")
            continue
        result = _undo(diff, lines) if revert else diff.apply(lines, str(path))
        if not revert:
            _check_place("\n".join(result), path)
        changed[path] = "\n".join(result)
        said.append(f"{diff.path}: {'the patch is taken back' if revert else 'patched'}")
    for path, text in changed.items():
        path.write_text(text)
    return said


def _undo(diff: Diff, lines: list[str]) -> list[str]:
    """Takes the added lines out wherever they are now: others may have edited above them."""
    if all(not hunk.removed for hunk in diff.hunks):
        added = {line for hunk in diff.hunks for line in hunk.added}
        return [line for line in lines if line not in added]
    return diff.reverted().apply(lines, diff.path)


def _check_place(text: str, path: Path) -> None:
    """The line is an import of the module itself, and comes before Megatron's and torch's.

    Raises:
        ConfigurationError: it would not be.
    """
    try:
        body = ast.parse(text).body
    except SyntaxError as error:
        raise ConfigurationError(
            f"{path}: line {error.lineno} is not where the patch was made for; it was edited"
        ) from error
    imported = [
        alias.name if isinstance(node, ast.Import) else str(node.module)
        for node in body
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for alias in node.names
    ]
    early = imported[: imported.index(MODULE)] if MODULE in imported else None
    if early is None or any(name.split(".")[0] in ("megatron", "torch") for name in early):
        raise ConfigurationError(
            f"{path}: the import would not come before Megatron's, because the file was edited: "
            f"put `import {MODULE}` first yourself"
        )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of ``patch``."""
    parser.add_argument("checkout", type=Path, metavar="CHECKOUT", help="folder of a Megatron-LM checkout")
    parser.add_argument("--revert", action="store_true", help="take the patch back")


def run(args: argparse.Namespace) -> int:
    """Runs the command; 0 when the checkout is as asked for."""
    print("\n".join(patch(args.checkout, args.revert)))
    return exits.DONE
