"""A node dies while checkpoints are being written behind training: those on disk are an undisturbed run's."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from megatron_resilience.observe.trace import differences
from tests.e2e.test_hot_swap import longer
from tests.support.job import TRAIN_AND_DIE, job
from tests.support.template import Template

pytestmark = pytest.mark.e2e

# The other format saves the padding of its buffers, which nobody has initialised: two stock runs differ in it.
SAVE = ("--async-save", "--ckpt-format", "torch_dist", "--save-interval", "3", "--dist-ckpt-optim-fully-reshardable")
BEGUN = re.compile(r"saving checkpoint at iteration +(\d+)")
COMPLETE = re.compile(r"successfully saved checkpoint from iteration +(\d+)")


def saved(folder: Path) -> dict[str, list[str]]:
    """Names of each checkpoint's files."""
    return {path.name: sorted(f.name for f in path.iterdir()) for path in sorted(folder.glob("iter_*"))}


def contents(folder: Path) -> dict[str, bytes]:
    """The tensors of a torch_dist checkpoint."""
    import torch

    reader = dcp.FileSystemReader(str(folder))
    metadata = reader.read_metadata().state_dict_metadata
    tensors = {
        key: torch.empty(value.size, dtype=value.properties.dtype)
        for key, value in metadata.items()
        if isinstance(value, TensorStorageMetadata)
    }
    dcp.load(tensors, storage_reader=reader, no_dist=True)
    return {key: value.view(torch.uint8).numpy().tobytes() if value.dim() else b"" for key, value in tensors.items()}


@pytest.mark.full  # Minutes each: at its first save every rank starts a process that imports Megatron anew.
@pytest.mark.parametrize("writing_s", [0, 4])
@pytest.mark.parametrize(("at", "rank", "what"), [(4, 3, "node"), (5, 1, "rank"), (7, 0, "node")])
def test_what_was_being_written_is_written_again(
    template: Template, tmp_path: Path, at: int, rank: int, what: str, writing_s: int
) -> None:
    """Written at once, or slowly enough for the node to die meanwhile."""
    configuration = longer("tp2_dp2_fp32", 7, *SAVE)
    argv = [*configuration.argv, "--save", str(tmp_path / "theirs"), "--trace-dir", str(tmp_path / "oracle")]
    for result in template.run_ranks(4, argv):
        assert result.returncode == 0, result.output[-4000:]
    env = {
        "DIE_IN": "forward",
        "DIE_AT": str(at),
        "DIE_RANK": str(rank),
        "DIE_AFTER": "0",
        "DIE_WHAT": what,
        "SLOW_WRITES": str(writing_s),
        "DIE_MARKER": str(tmp_path / "died"),
    }
    extra = ("--deadpool", "--save", str(tmp_path / "ours"))
    with job(template, tmp_path / "run", configuration, extra, script=TRAIN_AND_DIE, env=env) as running:
        running.finish(timeout=300)
        assert (tmp_path / "died").exists()
        assert differences(running.trace, tmp_path / "oracle") == []
        (recovered,) = running.of_kind("recovered")
        before, _, _ = running.child.output.partition("[megatron-resilience] epoch 2")
        incomplete = set(BEGUN.findall(before)) - set(COMPLETE.findall(before))
        # Whoever prints that a save is complete may die before it does: then it is only done once more.
        assert recovered["generation"] <= min(map(int, incomplete), default=at), (
            "back to the save that was not complete"
        )
    assert saved(tmp_path / "ours") == saved(tmp_path / "theirs")
    assert len(saved(tmp_path / "ours")) == 3, "two in training, one at its end"
    for name in saved(tmp_path / "ours"):
        ours, theirs = contents(tmp_path / "ours" / name), contents(tmp_path / "theirs" / name)
        assert ours.keys() == theirs.keys()
        assert [key for key in ours if ours[key] != theirs[key]] == []
