"""The quickstart's text becomes a data set, and back."""

from __future__ import annotations

import math
from pathlib import Path
from pydoc_data.topics import topics

import numpy
import pytest
import sentencepiece

from megatron_resilience.observe import trace
from tests.support.configurations import CONFIGURATIONS
from tests.support.template import ROOT

SCRIPT = str(ROOT / "examples" / "prepare_text.py")


@pytest.fixture(scope="module")
def prepared(_session_template, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    child = _session_template.fork(SCRIPT, [str(folder)])
    assert child.wait(60) == 0, child.output
    return folder


def read_documents(prefix: Path) -> list[list[int]]:
    """By the format, not by Megatron: header, sizes, pointers, document indices."""
    index = Path(f"{prefix}.idx").read_bytes()
    assert index[:9] == b"MMIDIDX\x00\x00"
    dtype = {8: numpy.uint16, 4: numpy.int32}[index[17]]
    count = int.from_bytes(index[18:26], "little")
    sizes = numpy.frombuffer(index, numpy.int32, count, offset=34)
    tokens = numpy.fromfile(f"{prefix}.bin", dtype)
    assert sizes.sum() == len(tokens)
    return [part.tolist() for part in numpy.split(tokens, sizes.cumsum()[:-1])]


def test_documents_decode_to_the_text(prepared):
    tokenizer = sentencepiece.SentencePieceProcessor(model_file=str(prepared / "tokenizer.model"))
    assert tokenizer.get_piece_size() == 1024
    read = read_documents(prepared / "text")
    assert len(read) == len(topics)
    for name, tokens in zip(sorted(topics), read, strict=True):
        assert tokens[-1] == tokenizer.eos_id()
        assert tokenizer.decode(tokens[:-1]) == topics[name]


def test_same_bytes_again(prepared, template, tmp_path):
    child = template.fork(SCRIPT, [str(tmp_path)])
    assert child.wait(60) == 0, child.output
    for name in ("text.bin", "text.idx", "tokenizer.model"):
        assert (tmp_path / name).read_bytes() == (prepared / name).read_bytes(), name


def test_vocabulary_size_is_checked(template, tmp_path):
    child = template.fork(SCRIPT, [str(tmp_path / "new"), "--vocab-size", "1000"])
    assert child.wait(60) == 2
    assert "--vocab-size 1000: use a multiple of 128" in child.output
    assert not (tmp_path / "new").exists()


@pytest.mark.e2e
def test_megatron_trains_on_it(prepared, template, tmp_path):
    configuration = CONFIGURATIONS["llama_tp2_sp"]
    drop = {"--mock-data": 1, "--tokenizer-type": 2, "--vocab-size": 2}
    argv = list(configuration.argv)
    for option, length in drop.items():
        at = argv.index(option)
        del argv[at : at + length]
    argv += ["--tokenizer-type", "SentencePieceTokenizer"]
    argv += ["--tokenizer-model", str(prepared / "tokenizer.model"), "--data-path", str(prepared / "text")]
    argv += ["--data-cache-path", str(tmp_path / "cache"), "--trace-dir", str(tmp_path / "trace")]
    for result in template.run_ranks(configuration.world_size, argv):
        assert result.returncode == 0, result.output
    losses = [float.fromhex(line["loss"]["lm loss"]) for line in trace.read(tmp_path / "trace")[0]]
    # An untrained model is as good as a guess among the vocabulary.
    assert abs(losses[0] - math.log(1024)) < 0.5
    assert losses[-1] < losses[0]
